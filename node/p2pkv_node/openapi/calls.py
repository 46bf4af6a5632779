"""The calls of the control API: path, method, what goes in, and what comes back."""

from __future__ import annotations

from typing import Any, Final

from p2pkv.formats.tensors import Dtype
from p2pkv.limits import (
    MAX_LAYERS,
    MAX_LEASE_S,
    MAX_NAME_BYTES,
    MAX_PIN_NAME_BYTES,
    MAX_PREFILL_S,
    MAX_QUORUM,
    MAX_SEGMENTS,
    MAX_TOKENS,
    MAX_TOKENS_PER_S,
    MIN_TOKENS_PER_S,
)
from p2pkv.units import DAY
from p2pkv_node.openapi.schema import (
    BOOLEAN,
    CID,
    COUNT,
    EPOCH,
    HEX_DIGEST,
    TEXT,
    Schema,
    items,
    nullable,
    obj,
    one_of,
    ref,
    said,
)

_FAILED: Final[dict[str, Any]] = {
    "description": "An error; the status follows from its fault.",
    "content": {"application/json": {"schema": ref("Error")}},
}
_PATH: Final[Schema] = said(TEXT, "Absolute path of a file that the node can see.")
_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}


def _call(
    name: str, summary: str, answers: dict[int, Any], *, body: Schema | None = None, parameter: str = ""
) -> dict[str, Any]:
    """Return one operation; ``answers`` are schemas by status. ``parameter`` is the variable part of its path."""
    operation: dict[str, Any] = {"operationId": name, "summary": summary}
    if parameter:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": CID if parameter == "cid" else TEXT}
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    told = {str(status): _answer(schema) for status, schema in answers.items()}
    return {**operation, "responses": {**told, "default": _FAILED}}


def _answer(schema: Schema) -> dict[str, Any]:
    return {"description": "Done.", "content": {"application/json": {"schema": schema}}}


def _events(name: str, summary: str, events: str, body: Schema) -> dict[str, Any]:
    """Return a call that answers with server-sent events, each of the schema ``events``."""
    operation = _call(name, summary, {}, body=body)
    told = (
        "Each event is one line `data: ` with a JSON object of this schema, and an empty line. The last one is `report` or "
        "`error`. Closing the connection ends the call; the same call goes on where it was."
    )
    operation["responses"]["200"] = {"description": told, "content": {"text/event-stream": {"schema": ref(events)}}}
    return operation


_FETCH: Final[dict[str, Schema]] = {
    "in_order": said(BOOLEAN, "Hand segments over in order; false where it is absent."),
    "patience_s": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1.0 * DAY,
        "description": "Give up after so many seconds; 60 where it is absent.",
    },
}
_FETCH_PROMPT: Final = obj(
    {
        "model_id": HEX_DIGEST,
        "dtype": one_of(*Dtype),
        "token_ids": items(_TOKEN, minItems=1, maxItems=MAX_TOKENS),
        "shared": said(nullable({"type": "integer", "minimum": 1}), "Tokens from the start that others share."),
        "quorum": said(
            nullable({"type": "integer", "minimum": 2, "maximum": MAX_QUORUM}),
            "Look for other publishers too, until so many have signed the same.",
        ),
        **_FETCH,
    },
    optional=("shared", "quorum", *_FETCH),
    description="What is published of a prompt.",
)
_FETCH_ARTIFACT: Final = obj(
    {
        "manifest": CID,
        "segments": said(
            nullable({"type": "integer", "minimum": 1, "maximum": MAX_SEGMENTS}), "Only so many, from the start."
        ),
        "impatient": said(BOOLEAN, "Do not wait for peers that are all silent; false where it is absent."),
        "layers": said(
            nullable(items({"type": "integer", "minimum": 0, "maximum": MAX_LAYERS}, minItems=2, maxItems=2)),
            "Only from the first number up to, without, the second, counted from 0.",
        ),
        **_FETCH,
    },
    optional=("segments", "impatient", "layers", *_FETCH),
    description="An artifact, whole or a slice of it.",
)
_LEASE_SECONDS: Final[Schema] = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_LEASE_S}
_PIN_NAME: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_PIN_NAME_BYTES}
_ADDED_RULE: Final = obj({"rule": ref("Rule"), "added": BOOLEAN})
_ADDED_PIN: Final = obj({"name": TEXT, "manifest": CID, "added": BOOLEAN})
_PREFILL: Final = obj(
    {
        "model_id": HEX_DIGEST,
        "device": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES},
        "hit_tokens": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS},
        "loading_s": {"type": "number", "minimum": 0, "maximum": MAX_PREFILL_S},
        "tokens_per_s": nullable({"type": "number", "minimum": MIN_TOKENS_PER_S, "maximum": MAX_TOKENS_PER_S}),
    },
    optional=("tokens_per_s",),
)

PATHS: Final[dict[str, Any]] = {
    "/v1/openapi.json": {"get": _call("openapi", "This document.", {200: {"type": "object"}})},
    "/v1/status": {"get": _call("status", "Addresses, peers, store and transfers.", {200: ref("Status")})},
    "/v1/stats": {"get": _call("stats", "The figures that the metrics have too.", {200: ref("Stats")})},
    "/v1/peers": {"get": _call("peers", "The peers that the node knows, the busy ones first.", {200: ref("Peers")})},
    "/v1/artifacts": {"get": _call("artifacts", "What is stored, the newest first.", {200: ref("Artifacts")})},
    "/v1/artifacts/{cid}": {
        "get": _call("artifact", "The envelope of a stored artifact.", {200: ref("ArtifactEnvelope")}, parameter="cid"),
        "delete": _call(
            "remove", "Take an artifact off the node, unless it is pinned.", {200: ref("Removed")}, parameter="cid"
        ),
    },
    "/v1/publish": {
        "post": _events(
            "publish",
            "Take over what a publisher staged in the home.",
            "PublishEvent",
            obj({"staging": {"type": "string", "pattern": "^[0-9a-f]{32}$"}, "manifest": CID}),
        )
    },
    "/v1/announce": {
        "post": _call(
            "announce",
            "Announce a stored artifact again now.",
            {200: obj({"manifest": CID, "keys": COUNT})},
            body=obj({"manifest": CID}),
        )
    },
    "/v1/import": {"post": _events("import", "Take over the artifact of a CAR file.", "ImportEvent", obj({"path": _PATH}))},
    "/v1/export": {
        "post": _events(
            "export", "Write a stored artifact to a CAR file.", "ExportEvent", obj({"manifest": CID, "path": _PATH})
        )
    },
    "/v1/fetch": {"post": _events("fetch", "Fetch from peers.", "FetchEvent", {"oneOf": [_FETCH_PROMPT, _FETCH_ARTIFACT]})},
    "/v1/prefills": {
        "post": _call(
            "tellPrefill",
            "Tell how a prefill went, and how fast this machine computes.",
            {200: obj({"saved_s": nullable({"type": "number"})})},
            body=_PREFILL,
        )
    },
    "/v1/leases": {
        "post": _call(
            "lease",
            "Keep a whole artifact where it is, and tell where its blocks lie.",
            {201: ref("Lease")},
            body=obj({"manifest": CID, "seconds": _LEASE_SECONDS}),
        )
    },
    "/v1/leases/{lease}": {
        "post": _call(
            "renewLease",
            "Let a lease last for so many seconds from now.",
            {200: obj({"lease": TEXT, "expires": EPOCH})},
            body=obj({"seconds": _LEASE_SECONDS}),
            parameter="lease",
        ),
        "delete": _call(
            "releaseLease", "Give a lease back.", {200: obj({"lease": TEXT, "released": BOOLEAN})}, parameter="lease"
        ),
    },
    "/v1/trust": {
        "get": _call("rules", "The rules about publishers.", {200: ref("Rules")}),
        "post": _call(
            "addRule", "Accept or reject what a publisher signs.", {201: _ADDED_RULE, 200: _ADDED_RULE}, body=ref("NewRule")
        ),
        "delete": _call(
            "removeRules",
            "Take away all rules about a publisher.",
            {200: obj({"removed": items(ref("Rule"))})},
            body=obj({"publisher": TEXT}),
        ),
    },
    "/v1/pins": {
        "get": _call("pins", "What is pinned.", {200: ref("Pins")}),
        "post": _call(
            "pin",
            "Keep an artifact from being collected and removed.",
            {201: _ADDED_PIN, 200: _ADDED_PIN},
            body=obj({"name": _PIN_NAME, "manifest": CID}),
        ),
        "delete": _call(
            "unpin",
            "Take a pin away, or all of that name.",
            {200: obj({"name": TEXT, "removed": COUNT})},
            body=obj({"name": TEXT, "manifest": CID}, optional=("manifest",)),
        ),
    },
    "/v1/gc": {
        "post": _call(
            "collect",
            "Collect garbage, or tell what would go.",
            {200: ref("Collected")},
            body=obj({"dry_run": BOOLEAN}, optional=("dry_run",)),
        )
    },
    "/v1/shutdown": {"post": _call("shutdown", "End the daemon.", {200: obj({"stopping": BOOLEAN})})},
}
