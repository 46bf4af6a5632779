"""The control API: HTTP on a unix socket whose file permissions are the access control (``docs/control-api.md``).

Everything is JSON. A fetch answers with server-sent events: each ``data:`` line is one JSON object with an ``event`` field.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from p2pkv import __version__
from p2pkv.artifact.slice import Slice
from p2pkv.errors import Fault, FormatError, NotFoundError, P2pkvError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import decode_did
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_TEXT_BYTES, MAX_TOKENS
from p2pkv.store.index import StoredArtifact
from p2pkv.store.location import Location
from p2pkv.store.store import Store
from p2pkv.swarm.context import in_thread
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, Progress, SegmentReady
from p2pkv.swarm.target import ManifestTarget, PromptTarget, Target
from p2pkv_node import keeping
from p2pkv_node.condition import condition_of
from p2pkv_node.node import Node
from p2pkv_node.requests import Handler, read_body, read_cid, text_of

logger = logging.getLogger(__name__)

_STATUS = {Fault.LOCAL: 400, Fault.REMOTE: 502, Fault.ENVIRONMENT: 503, Fault.POLICY: 403}
_MAX_PATIENCE_S = 24 * 3600.0


def control_app(node: Node, shutdown: trio.Event) -> Starlette:
    """Return the ASGI application over ``node``; ``shutdown`` is set when a client asks the daemon to end."""

    def route(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(node, request)
            except P2pkvError as error:
                status = 404 if isinstance(error, NotFoundError) else _STATUS[error.fault]
                return JSONResponse({"error": error.to_dict()}, status)

        return Route(path, endpoint, methods=[method])

    async def stop(_: Node, __: Request) -> Response:
        shutdown.set()
        return JSONResponse({"stopping": True})

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return JSONResponse(
            {"error": UsageError(f"{request.method} {request.url.path} is not part of the API").to_dict()}, status
        )

    return Starlette(
        exception_handlers={404: unknown, 405: unknown},
        routes=[
            route("/v1/status", "GET", _status),
            route("/v1/artifacts", "GET", _artifacts),
            route("/v1/artifacts/{cid}", "GET", _artifact),
            route("/v1/publish", "POST", _publish),
            route("/v1/fetch", "POST", _fetch),
            route("/v1/trust", "GET", _trust_list),
            route("/v1/trust", "POST", _trust_add),
            route("/v1/trust", "DELETE", _trust_remove),
            route("/v1/shutdown", "POST", stop),
            *(route(path, method, handler) for (path, method), handler in keeping.HANDLERS.items()),
        ],
    )


# --- resources ---------------------------------------------------------------------------------------------------------


async def _status(node: Node, _: Request) -> Response:
    store = await in_thread(node.store.statistics)
    return JSONResponse(
        {
            "version": __version__,
            "peer_id": node.network.peer_id,
            "addresses": list(node.network.addresses),
            "home": str(node.config.home),
            "uptime_s": time.time() - node.started,
            "connected_peers": list(node.network.connected_peers),
            "dht_peers": list(node.routing.peers),
            "fetches": node.fetches,
            "store": asdict(store),
            "served": asdict(node.server.statistics()),
            "announcing": asdict(node.announcer.statistics()),
            "banned_peers": node.context.bans.active(trio.current_time()),
            "trusted_publishers": len(node.trust.list()),
            "condition": asdict(condition_of(node)),
        }
    )


async def _artifacts(node: Node, _: Request) -> Response:
    rows = await in_thread(node.store.index.artifacts)
    return JSONResponse({"artifacts": [_row(row) for row in rows]})


async def _artifact(node: Node, request: Request) -> Response:
    """The envelope of a stored artifact, and the block of its token ids where it has one; the client verifies both."""
    cid = read_cid(request.path_params["cid"])
    envelope = await in_thread(partial(node.store.read, cid))
    artifact = await in_thread(partial(node.read_artifact, cid))
    token_cid = artifact.manifest.tokens.cid
    tokens = await in_thread(partial(node.store.read, token_cid)) if token_cid is not None else None
    return JSONResponse(
        {
            "manifest": str(cid),
            "envelope": base64.b64encode(envelope).decode(),
            "token_block": base64.b64encode(tokens).decode() if tokens is not None else None,
        }
    )


async def _publish(node: Node, request: Request) -> Response:
    body = await read_body(request)
    cids = body.get("cids")
    if not isinstance(cids, list) or not all(isinstance(cid, str) for cid in cids):
        raise UsageError("`cids` is not a list of CIDs")
    manifest = read_cid(text_of(body, "manifest"))
    artifact = await node.publish(text_of(body, "staging"), manifest, [read_cid(cid) for cid in cids])
    return JSONResponse({"manifest": str(manifest), "segments": len(artifact.chain_keys)}, 201)


async def _trust_list(node: Node, _: Request) -> Response:
    return JSONResponse({"publishers": [asdict(publisher) for publisher in await in_thread(node.trust.list)]})


async def _trust_add(node: Node, request: Request) -> Response:
    body = await read_body(request)
    did = text_of(body, "did")
    try:
        decode_did(did)
    except FormatError as error:
        raise UsageError(error.message, advice=error.advice) from None
    added = await in_thread(partial(node.trust.add, did, str(body.get("note", ""))[:MAX_TEXT_BYTES], int(time.time())))
    return JSONResponse({"did": did, "added": added}, 201 if added else 200)


async def _trust_remove(node: Node, request: Request) -> Response:
    did = text_of(await read_body(request), "did")
    return JSONResponse({"did": did, "removed": await in_thread(partial(node.trust.remove, did))})


# --- fetch -------------------------------------------------------------------------------------------------------------


async def _fetch(node: Node, request: Request) -> Response:
    body = await read_body(request)
    patience = body.get("patience_s", 60.0)
    if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 < patience <= _MAX_PATIENCE_S:
        raise UsageError(f"`patience_s` is not a number of seconds up to {_MAX_PATIENCE_S:.0f}")
    events = _fetch_events(node, _target(body), float(patience))
    return _EventStream(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class _EventStream(StreamingResponse):
    """Closes what it streams from as soon as the client is gone; Starlette leaves that to the garbage collector."""

    def __init__(self, events: AsyncGenerator[bytes, None], **settings: Any) -> None:
        super().__init__(events, **settings)
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


async def _fetch_events(node: Node, target: Target, patience_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the events of one fetch. The task lives in a nursery of the node's, so that no scope is open around a yield."""
    send, receive = trio.open_memory_channel[dict[str, Any]](math.inf)

    delivered = False

    def emit(event: FetchEvent) -> None:
        if not delivered:
            send.send_nowait(_event(event, node.store))

    def deliver(report: FetchReport) -> None:
        nonlocal delivered
        send.send_nowait({"event": "report", **_report(report)})
        delivered = True
        send.close()  # ends the answer; the fetch closes its streams a little later

    async def run() -> None:
        with send:
            try:
                await node.fetch(target, emit, patience_s, deliver)
            except P2pkvError as error:
                if not delivered:
                    send.send_nowait({"event": "error", **error.to_dict()})
            except Exception as error:  # a defect ends this fetch, and not the node with everybody else's
                logger.exception("a fetch failed for a reason that nobody foresaw")
                defect = P2pkvError(f"{type(error).__name__} in the daemon", advice="Please report it with the daemon's log.")
                if not delivered:
                    send.send_nowait({"event": "error", **defect.to_dict()})

    scope = node.background(run)
    try:
        async for event in receive:
            yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    finally:
        if not delivered:
            scope.cancel()  # the client went away: what arrived is kept, and the next fetch resumes


def _target(body: dict[str, Any]) -> Target:
    in_order = body.get("in_order", False)
    if type(in_order) is not bool:
        raise UsageError("`in_order` is neither true nor false")
    if "manifest" in body:
        return ManifestTarget(read_cid(text_of(body, "manifest")), _slice(body), in_order)
    for name in ("segments", "layers"):
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


def _event(event: FetchEvent, store: Store) -> dict[str, Any]:
    match event:
        case Progress():
            return {"event": "progress", **asdict(event)}
        case Matched(artifact, hit_tokens, segments):
            cids = [artifact.cid] if artifact.manifest.tokens.cid is None else [artifact.cid, artifact.manifest.tokens.cid]
            body = {"manifest": str(artifact.cid), "hit_tokens": hit_tokens, "segments": segments}
            return {"event": "matched", **body, "blocks": _located(cids, store)}
        case SegmentReady(index, blocks):
            return {"event": "segment", "index": index, "blocks": _located(blocks, store)}


def _located(cids: Sequence[Cid], store: Store) -> dict[str, Location | None]:
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


def _row(row: StoredArtifact) -> dict[str, Any]:
    return {**asdict(row), "manifest_cid": str(row.manifest_cid), "model_id": row.model_id.hex()}
