"""What every handler of the control API needs: its shape, and requests read under bounds."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from p2pkv.errors import CidError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_REQUEST_BYTES
from p2pkv_node.node import Node

Handler: TypeAlias = Callable[[Node, Request], Awaitable[Response]]


async def read_body(request: Request) -> dict[str, Any]:
    """Return a request's JSON object, read under a bound. Raises UsageError."""
    data = bytearray()
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            data += chunk
            if len(data) > MAX_REQUEST_BYTES:
                raise UsageError(f"the request exceeds {MAX_REQUEST_BYTES} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise UsageError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise UsageError("the request is not a JSON object")
    return body


def read_cid(text: str) -> Cid:
    """Parse a CID that a client sent: its mistake, and not some peer's. Raises UsageError."""
    try:
        return Cid.parse(text)
    except CidError as error:
        raise UsageError(error.message, advice=error.advice) from None


def text_of(body: dict[str, Any], name: str) -> str:
    """Return the text of a field. Raises UsageError."""
    value = body.get(name)
    if not isinstance(value, str):
        raise UsageError(f"`{name}` is missing or is not text")
    return value


def seconds_of(body: dict[str, Any], name: str, most: float, *, default: float | None = None) -> float:
    """Return the seconds of a field, above 0 and up to ``most``; ``default`` where it is absent. Raises UsageError."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise UsageError(f"`{name}` is not a number of seconds up to {most:.0f}")
    return float(value)
