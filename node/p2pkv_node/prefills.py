"""The part of the control API in which programs tell how their prefills went (``docs/control-api.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from p2pkv.errors import UsageError
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.limits import MAX_NAME_BYTES, MAX_PREFILL_S, MAX_TOKENS, MAX_TOKENS_PER_S, MIN_TOKENS_PER_S
from p2pkv_node.node import Node
from p2pkv_node.requests import Handler, read_body, text_of
from p2pkv_node.savings import ToldPrefill


async def _prefill(node: Node, request: Request) -> Response:
    return JSONResponse({"saved_s": node.savings.add(_told(await read_body(request)))})


def _told(body: dict[str, Any]) -> ToldPrefill:
    """Read how a prefill went. Raises UsageError."""
    try:
        model_id = bytes.fromhex(text_of(body, "model_id"))
    except ValueError:
        raise UsageError("`model_id` is not hexadecimal") from None
    if len(model_id) != DIGEST_BYTES:
        raise UsageError(f"`model_id` is not {DIGEST_BYTES} bytes")
    device = text_of(body, "device")
    if not device or len(device.encode()) > MAX_NAME_BYTES:
        raise UsageError(f"`device` is not text of 1 to {MAX_NAME_BYTES} bytes")
    hit_tokens = body.get("hit_tokens")
    if type(hit_tokens) is not int or not 0 <= hit_tokens <= MAX_TOKENS:
        raise UsageError(f"`hit_tokens` is not a number from 0 to {MAX_TOKENS}")
    measured = body.get("tokens_per_s")
    rate = None if measured is None else _number(body, "tokens_per_s", MIN_TOKENS_PER_S, MAX_TOKENS_PER_S)
    return ToldPrefill(model_id, device, hit_tokens, _number(body, "loading_s", 0.0, MAX_PREFILL_S), rate)


def _number(body: dict[str, Any], name: str, least: float, most: float) -> float:
    """Return a number within its bounds; JSON's true and false are none. Raises UsageError."""
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:  # NaN is not either
        raise UsageError(f"`{name}` is not a number from {least:g} to {most:g}")
    return float(value)


HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {("/v1/prefills", "POST"): _prefill}
