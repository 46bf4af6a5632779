"""The control API: HTTP on a unix socket whose file permissions are the access control (``docs/control-api.md``).

Everything is JSON, described by ``/v1/openapi.json``. A call that takes long answers with server-sent events: each ``data:``
line is one JSON object with an ``event`` field.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from p2pkv import __version__
from p2pkv.errors import Fault, NotFoundError, P2pkvError, UsageError
from p2pkv.store.index import StoredArtifact
from p2pkv.store.trust_file import rule_fields, rule_from
from p2pkv.swarm.context import in_thread
from p2pkv.trust.rules import Action, trusted_publishers
from p2pkv_node import fetching, handing, keeping, leasing, prefills
from p2pkv_node.condition import condition_of
from p2pkv_node.node import Node
from p2pkv_node.openapi import document
from p2pkv_node.peers import peer_rows
from p2pkv_node.requests import Handler, read_body, read_cid, text_of
from p2pkv_node.snapshot import Observer, figures

_STATUS: Final = {Fault.LOCAL: 400, Fault.REMOTE: 502, Fault.ENVIRONMENT: 503, Fault.POLICY: 403}


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

    observer = Observer(node, shutdown)

    async def stats(_: Node, __: Request) -> Response:
        return JSONResponse(figures(await observer.snapshot()))

    async def stop(_: Node, __: Request) -> Response:
        shutdown.set()
        return JSONResponse({"stopping": True})

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return JSONResponse(
            {"error": UsageError(f"{request.method} {request.url.path} is not part of the API").to_dict()}, status
        )

    async def failed(request: Request, error: Exception) -> Response:
        """Say so as every error is said; the exception goes on to the log of the server, with where it came from."""
        message = f"{request.method} {request.url.path} failed: {type(error).__name__}"
        advice = "This is a defect of p2pkv: please report it with what the daemon has logged."
        return JSONResponse({"error": P2pkvError(message, advice=advice).to_dict()}, 500)

    handlers: dict[tuple[str, str], Handler] = {("/v1/stats", "GET"): stats, ("/v1/shutdown", "POST"): stop}
    for table in (_HANDLERS, fetching.HANDLERS, handing.HANDLERS, keeping.HANDLERS, leasing.HANDLERS, prefills.HANDLERS):
        handlers |= table
    return Starlette(
        exception_handlers={404: unknown, 405: unknown, 500: failed},
        routes=[route(path, method, handler) for (path, method), handler in handlers.items()],
    )


async def _openapi(_: Node, __: Request) -> Response:
    return JSONResponse(document())


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
            "trusted_publishers": len(trusted_publishers(node.trust.rules.rules())),
            "condition": asdict(condition_of(node)),
        }
    )


async def _peers(node: Node, _: Request) -> Response:
    return JSONResponse({"peers": peer_rows(node)})


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


def _row(row: StoredArtifact) -> dict[str, Any]:
    return {**asdict(row), "manifest_cid": str(row.manifest_cid), "model_id": row.model_id.hex()}


async def _trust_list(node: Node, _: Request) -> Response:
    return JSONResponse({"rules": [rule_fields(rule) for rule in await in_thread(node.trust.rules.rules)]})


async def _trust_add(node: Node, request: Request) -> Response:
    body = await read_body(request)
    rule = rule_from({"action": Action.ACCEPT.value, **body, "added": int(time.time())})
    added = await in_thread(partial(node.trust.rules.add_rule, rule))
    return JSONResponse({"rule": rule_fields(rule), "added": added}, 201 if added else 200)


async def _trust_remove(node: Node, request: Request) -> Response:
    publisher = text_of(await read_body(request), "publisher")
    removed = await in_thread(partial(node.trust.rules.remove, publisher))
    return JSONResponse({"removed": [rule_fields(rule) for rule in removed]})


_HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {
    ("/v1/openapi.json", "GET"): _openapi,
    ("/v1/status", "GET"): _status,
    ("/v1/peers", "GET"): _peers,
    ("/v1/artifacts", "GET"): _artifacts,
    ("/v1/artifacts/{cid}", "GET"): _artifact,
    ("/v1/trust", "GET"): _trust_list,
    ("/v1/trust", "POST"): _trust_add,
    ("/v1/trust", "DELETE"): _trust_remove,
}
