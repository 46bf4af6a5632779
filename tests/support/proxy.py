"""A TCP proxy on loopback that harms what passes: flips one bit on its way to the client, or holds everything back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.support.stores import flip

_CHUNK = 16 * 1024


class Proxy:
    """Forwards connections to :attr:`target`, a port on loopback. :meth:`flip_next` may be called from any thread."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.target: int | None = None
        self.flipped = 0
        self.held = trio.Event()
        self._flip = False
        self._hold_after: int | None = None

    @property
    def address(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}"

    def flip_next(self) -> None:
        """Flip a bit in the middle of the next bytes to the client, once."""
        self._flip = self.flipped == 0

    def hold_after(self, count: int) -> None:
        """Let ``count`` more bytes through to the client, and then none; :attr:`held` tells when it has come to that."""
        self._hold_after = count

    async def serve(self, client: trio.SocketStream) -> None:
        assert self.target is not None, "connected before there was a target"
        async with client:
            try:
                target = await trio.open_tcp_stream("127.0.0.1", self.target)
            except OSError:
                return  # nobody is there any more
            async with target, trio.open_nursery() as nursery:
                nursery.start_soon(self._up, client, target, nursery.cancel_scope)
                nursery.start_soon(self._down, target, client, nursery.cancel_scope)

    async def _up(self, client: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            async for data in client:
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the other end is gone, and so is this connection
        scope.cancel()

    async def _down(self, target: trio.SocketStream, client: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            while data := bytes(await target.receive_some(_CHUNK)):
                await client.send_all(self._harm(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the other end is gone, and so is this connection
        scope.cancel()

    def _harm(self, data: bytes) -> bytes:
        if self._flip:
            self._flip = False
            self.flipped += 1
            return flip(data, 4 * len(data))
        if self._hold_after is not None:
            self._hold_after -= len(data)
            if self._hold_after <= 0:
                self.held.set()
                return b""  # read on, so that the end of the connection is seen
        return data


@asynccontextmanager
async def open_proxy() -> AsyncIterator[Proxy]:
    """Yield a proxy that listens; leaving cuts all its connections."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy = Proxy(listener.socket.getsockname()[1])
        nursery.start_soon(trio.serve_listeners, proxy.serve, [listener])
        # An error of the body is carried around the nursery, which would wrap it in a group.
        try:
            yield proxy
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
