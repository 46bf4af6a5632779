"""The read-only paths: ``/`` with its script and style, ``/status.json``, ``/metrics``, ``/healthz``, ``/readyz``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Final

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from p2pkv.errors import P2pkvError
from p2pkv.limits import MAX_NODES_SIZED
from p2pkv.store.sizes import ArtifactSizes
from p2pkv_node.node import Node
from p2pkv_node.snapshot import Observer
from p2pkv_node.web.metrics import exposition
from p2pkv_node.web.status import status_of

_ASSETS: Final = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/chart.js": ("chart.js", "text/javascript"),
}


def web_app(node: Node, stop: trio.Event) -> Starlette:
    """Return the ASGI application over ``node``, which is no longer ready once ``stop`` is set."""
    observer = Observer(node, stop)
    sizes = ArtifactSizes(node.store.database, node.store.blocks, reads=MAX_NODES_SIZED)

    def route(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except P2pkvError as error:
                return JSONResponse({"error": error.to_dict()}, 503)

        return Route(path, endpoint, methods=["GET"])

    async def status(_: Request) -> Response:
        return JSONResponse(await status_of(observer, sizes))

    async def metrics(request: Request) -> Response:
        snapshot = await observer.snapshot()
        accept = request.headers.get("accept", "")
        body, content_type = await observer.read(partial(exposition, snapshot, accept))
        return Response(body, headers={"Content-Type": content_type})

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readiness(_: Request) -> Response:
        reason = await observer.unready_reason()
        return PlainTextResponse("ready\n") if reason is None else PlainTextResponse(f"{reason}\n", 503)

    async def asset(content: bytes, media_type: str, _: Request) -> Response:
        return Response(content, media_type=media_type)

    return Starlette(
        routes=[
            *(route(path, partial(asset, _read(name), kind)) for path, (name, kind) in _ASSETS.items()),
            route("/status.json", status),
            route("/metrics", metrics),
            route("/healthz", health),
            route("/readyz", readiness),
        ]
    )


def _read(name: str) -> bytes:
    return (files(__package__) / "assets" / name).read_bytes()
