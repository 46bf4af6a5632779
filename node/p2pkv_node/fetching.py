"""The part of the control API that fetches, and tells how it goes (``docs/control-api.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from p2pkv.artifact.read import Artifact
from p2pkv.artifact.slice import Slice
from p2pkv.errors import UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_QUORUM, MAX_TOKENS
from p2pkv.store.location import Location
from p2pkv.store.store import Store
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, Progress, SegmentReady, Witnessed
from p2pkv.swarm.target import ManifestTarget, PromptTarget, Target
from p2pkv.swarm.witnesses import Deliver, Emit, fetch_with_witnesses
from p2pkv.units import DAY
from p2pkv_node.events import Events, answer_with_events
from p2pkv_node.node import Node
from p2pkv_node.requests import Handler, read_body, read_cid, seconds_of, text_of

_PATIENCE_S: Final = 60.0
_MAX_PATIENCE_S: Final = 1.0 * DAY


async def _fetch(node: Node, request: Request) -> Response:
    body = await read_body(request)
    patience_s = seconds_of(body, "patience_s", _MAX_PATIENCE_S, default=_PATIENCE_S)
    return answer_with_events(node, partial(_run, node, _target(body), _quorum(body), patience_s))


async def _run(node: Node, target: Target, quorum: int | None, patience_s: float, events: Events) -> None:
    def hear(event: FetchEvent) -> None:
        if not events.over:
            events.emit(*_event(event, node.store))

    def deliver(report: FetchReport) -> None:
        events.end("report", _report(report))  # the fetch closes its streams a little later

    if quorum is None or not isinstance(target, PromptTarget):
        await node.fetch(target, hear, patience_s, deliver)
        return

    async def fetch(emit: Emit, conclude: Deliver) -> None:
        await node.fetch(target, emit, patience_s, conclude)

    await fetch_with_witnesses(node.context, target, quorum, fetch, hear, deliver, patience_s)


def _target(body: dict[str, Any]) -> Target:
    in_order, impatient = _flag(body, "in_order"), _flag(body, "impatient")
    if "manifest" in body:
        return ManifestTarget(read_cid(text_of(body, "manifest")), _slice(body), in_order, impatient)
    for name in ("segments", "layers", "impatient"):
        if name in body:
            raise UsageError(f"`{name}` goes with `manifest` alone")
    tokens, shared = body.get("token_ids"), body.get("shared")
    if not isinstance(tokens, list) or not tokens or len(tokens) > MAX_TOKENS or not all(type(t) is int for t in tokens):
        raise UsageError(f"`token_ids` is not a list of 1 to {MAX_TOKENS} numbers")
    if shared is not None and (type(shared) is not int or not 0 < shared <= len(tokens)):
        raise UsageError("`shared` is not a number of tokens within the prompt")
    try:
        model_id = bytes.fromhex(text_of(body, "model_id"))
        dtype = Dtype(text_of(body, "dtype"))
    except ValueError:
        raise UsageError("`model_id` is not hexadecimal, or `dtype` is unknown") from None
    if len(model_id) != DIGEST_BYTES:
        raise UsageError(f"`model_id` is not {DIGEST_BYTES} bytes")
    return PromptTarget(model_id, dtype, tuple(tokens), shared, in_order)


def _quorum(body: dict[str, Any]) -> int | None:
    quorum = body.get("quorum")
    if quorum is None:
        return None
    if "manifest" in body:
        raise UsageError("`quorum` goes with a prompt alone")
    if type(quorum) is not int or not 2 <= quorum <= MAX_QUORUM:
        raise UsageError(f"`quorum` is not a number from 2 to {MAX_QUORUM}")
    return quorum


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if type(value) is not bool:
        raise UsageError(f"`{name}` is neither true nor false")
    return value


def _slice(body: dict[str, Any]) -> Slice:
    segments, layers = body.get("segments"), body.get("layers")
    if segments is not None and type(segments) is not int:
        raise UsageError("`segments` is not a number")
    match layers:
        case None:
            return Slice(segments)
        case [int(first), int(end)] if type(first) is type(end) is int:
            return Slice(segments, range(first, end))
        case _:
            raise UsageError("`layers` is not a list of two numbers: the first layer, and the one after the last")


def _event(event: FetchEvent, store: Store) -> tuple[str, dict[str, Any]]:
    match event:
        case Progress():
            return "progress", asdict(event)
        case Matched(artifact, hit_tokens, segments):
            fields = {"manifest": str(artifact.cid), "hit_tokens": hit_tokens, "segments": segments}
            return "matched", {**fields, "blocks": located(_opening(artifact), store)}
        case SegmentReady(index, blocks):
            return "segment", {"index": index, "blocks": located(blocks, store)}
        case Witnessed(artifact, nodes):
            return "witness", {"manifest": str(artifact.cid), "blocks": located([*_opening(artifact), *nodes], store)}


def _opening(artifact: Artifact) -> list[Cid]:
    """Return what an artifact is opened with: its manifest, and its token ids where they are in a block."""
    tokens = artifact.manifest.tokens.cid
    return [artifact.cid] if tokens is None else [artifact.cid, tokens]


def located(cids: Sequence[Cid], store: Store) -> dict[str, Location | None]:
    """Return where the client finds blocks: no tensor goes through HTTP."""
    return {str(cid): store.locate(cid) for cid in cids}


def _report(report: FetchReport) -> dict[str, Any]:
    artifact = report.artifact
    return {
        "manifest": str(artifact.cid) if artifact is not None else None,
        "token_count": len(artifact.token_ids) if artifact is not None else 0,
        "hit_tokens": report.hit_tokens,
        "segments": report.segments,
        "layers": [report.layers.start, report.layers.stop] if report.layers is not None else None,
        "complete": report.complete,
        "local_bytes": report.local_bytes,
        "bytes_by_peer": dict(report.bytes_by_peer),
        "rate_by_peer": dict(report.rate_by_peer),
        "duplicate_bytes": report.duplicate_bytes,
        "blocks_refused": report.blocks_refused,
        "peers_lost": report.peers_lost,
        "peers_dropped": list(report.peers_dropped),
        "refusals": [asdict(refusal) for refusal in report.refusals],
        "times": dict(report.times),
    }


HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {("/v1/fetch", "POST"): _fetch}
