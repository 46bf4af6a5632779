"""The part of the control API that says what stays: pins, removing, collecting (``docs/control-api.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from p2pkv.errors import NotFoundError, UsageError
from p2pkv.store.collect import Collected
from p2pkv.store.holds import Pin
from p2pkv.swarm.context import in_thread
from p2pkv_node.node import Node
from p2pkv_node.requests import Handler, read_body, read_cid, text_of


async def _pins(node: Node, _: Request) -> Response:
    return JSONResponse({"pins": [_pin_row(pin) for pin in await in_thread(node.store.holds.pins)]})


async def _pin(node: Node, request: Request) -> Response:
    body = await read_body(request)
    name, manifest = text_of(body, "name"), read_cid(text_of(body, "manifest"))
    added = await in_thread(partial(node.store.holds.pin, name, manifest))
    return JSONResponse({"name": name, "manifest": str(manifest), "added": added}, 201 if added else 200)


async def _unpin(node: Node, request: Request) -> Response:
    body = await read_body(request)
    name = text_of(body, "name")
    manifest = read_cid(text_of(body, "manifest")) if "manifest" in body else None
    return JSONResponse({"name": name, "removed": await in_thread(partial(node.store.holds.unpin, name, manifest))})


async def _remove(node: Node, request: Request) -> Response:
    manifest = read_cid(request.path_params["cid"])
    if not await node.remove(manifest):
        raise NotFoundError(
            f"artifact {manifest} is not in the index of this node", advice="`p2pkv status` lists what is here."
        )
    return JSONResponse({"manifest": str(manifest), "removed": True})


async def _collect(node: Node, request: Request) -> Response:
    dry_run = (await read_body(request)).get("dry_run", False)
    if type(dry_run) is not bool:
        raise UsageError("`dry_run` is neither true nor false")
    return JSONResponse(_collected(await node.collect(dry_run=dry_run)))


def _pin_row(pin: Pin) -> dict[str, Any]:
    return {"name": pin.name, "manifest": str(pin.manifest_cid), "created": pin.created}


def _collected(collected: Collected) -> dict[str, Any]:
    evicted = [{**asdict(evicted), "manifest_cid": str(evicted.manifest_cid)} for evicted in collected.evicted]
    return {**asdict(collected), "evicted": evicted}


HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {
    ("/v1/pins", "GET"): _pins,
    ("/v1/pins", "POST"): _pin,
    ("/v1/pins", "DELETE"): _unpin,
    ("/v1/artifacts/{cid}", "DELETE"): _remove,
    ("/v1/gc", "POST"): _collect,
}
