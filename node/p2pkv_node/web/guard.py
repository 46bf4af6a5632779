"""What every request on the port of the status page is held to, and what every answer says to browsers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS: Final = ("GET", "HEAD")
_HTTP_PORT: Final = 80
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_RAW_HEADERS: Final = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def hosts_of(host: str, port: int) -> frozenset[str]:
    """Return what a request to this port may name as its host; ``host`` is the address, in brackets where it is IPv6."""
    names = frozenset({host, "localhost", "127.0.0.1", "[::1]"})
    return frozenset(f"{name}:{port}" for name in names) | (names if port == _HTTP_PORT else frozenset())


class Guard:
    """An ASGI application for HTTP around another one: it lets only reads in, and only those that name this port as host.

    A stranger's page whose name is made to resolve to this machine (DNS rebinding) has the browser's leave to read what its
    own name answers; its requests name that name, and get 421 here.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._refusal(scope) or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        named = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(named) != 1 or named[0] not in self._hosts:
            return PlainTextResponse("This port answers to its own address alone.\n", 421)
        if scope["method"] not in _METHODS:
            return PlainTextResponse("This port can only be read.\n", 405, {"Allow": ", ".join(_METHODS)})
        return None


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", ()) if name.decode().lower() not in HEADERS]
            message = {**message, "headers": [*kept, *_RAW_HEADERS]}
        await send(message)

    return sending
