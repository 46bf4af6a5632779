"""The part of the control API that lends artifacts to programs of this machine: leases (``docs/control-api.md``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_LEASE_S
from p2pkv.store.reader_leases import ReaderLeases
from p2pkv.swarm.context import in_thread
from p2pkv_node.node import Node
from p2pkv_node.requests import Handler, read_body, read_cid, seconds_of, text_of


async def _take(node: Node, request: Request) -> Response:
    body = await read_body(request)
    manifest, seconds = read_cid(text_of(body, "manifest")), seconds_of(body, "seconds", MAX_LEASE_S)
    return Response(await in_thread(partial(_lend, node.leases, manifest, seconds)), 201, media_type="application/json")


def _lend(leases: ReaderLeases, manifest: Cid, seconds: float) -> bytes:
    """Take a lease and put it into JSON, which is long where there are many blocks: too long for the event loop. Blocking."""
    lent = leases.take(manifest, seconds)
    blocks = {str(cid): place for cid, place in lent.blocks.items()}
    return json.dumps({"lease": lent.lease, "manifest": str(manifest), "expires": lent.expires, "blocks": blocks}).encode()


async def _renew(node: Node, request: Request) -> Response:
    lease, seconds = request.path_params["lease"], seconds_of(await read_body(request), "seconds", MAX_LEASE_S)
    return JSONResponse({"lease": lease, "expires": await in_thread(partial(node.leases.renew, lease, seconds))})


async def _release(node: Node, request: Request) -> Response:
    lease = request.path_params["lease"]
    return JSONResponse({"lease": lease, "released": await in_thread(partial(node.leases.release, lease))})


HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {
    ("/v1/leases", "POST"): _take,
    ("/v1/leases/{lease}", "POST"): _renew,
    ("/v1/leases/{lease}", "DELETE"): _release,
}
