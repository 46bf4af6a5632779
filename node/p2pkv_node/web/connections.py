"""The connections to the port of the status page: few, each for one request, and none for long.

An HTTP server of its own, as small as reading needs: hypercorn under trio bounds neither the number of connections nor the
time that a client takes to read its answer, not even when the daemon ends.
"""

from __future__ import annotations

import logging
from email.utils import formatdate
from typing import Final
from urllib.parse import unquote

import h11
import trio
from starlette.types import ASGIApp, Message
from trio_typing import TaskStatus

from p2pkv.limits import CLOSE_TIMEOUT_S, MAX_WEB_CONNECTIONS, SHUTDOWN_GRACE_S, WEB_CONNECTION_S

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 4096


class Connections:
    """Answers what comes in on ``listener`` with ``app``, which reads no bodies and sends short ones."""

    def __init__(self, app: ASGIApp, listener: trio.SocketListener) -> None:
        self._app = app
        self._listener = listener
        self._open: dict[trio.SocketStream, None] = {}  # the oldest first
        self._answering: set[trio.SocketStream] = set()  # those that wait for us; the others we wait for

    async def serve(self, stop: trio.Event, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``stop`` is set; what is being answered then has half of SHUTDOWN_GRACE_S left."""
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as listening:
                listening.start_soon(self._accept, connections)
                task_status.started()
                await stop.wait()
                listening.cancel_scope.cancel()
            for stream in self._open.keys() - self._answering:
                await trio.aclose_forcefully(stream)
            connections.cancel_scope.deadline = trio.current_time() + SHUTDOWN_GRACE_S / 2

    async def _accept(self, connections: trio.Nursery) -> None:
        await trio.serve_listeners(self._handle, [self._listener], handler_nursery=connections)

    async def _handle(self, stream: trio.SocketStream) -> None:
        self._open[stream] = None
        try:
            if len(self._open) > MAX_WEB_CONNECTIONS:
                await self._drop_one(stream)
            with trio.move_on_after(WEB_CONNECTION_S):
                await self._converse(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client left, or had to make room
        finally:
            self._open.pop(stream, None)

    async def _drop_one(self, newest: trio.SocketStream) -> None:
        """Make room: the oldest goes whose client keeps us waiting, so that slow ones never shut others out."""
        slow = (stream for stream in self._open if stream is not newest and stream not in self._answering)
        dropped = next(slow, next(iter(self._open)))
        del self._open[dropped]
        await trio.aclose_forcefully(dropped)

    async def _converse(self, stream: trio.SocketStream) -> None:
        """Read a request, answer it, and see to it that the answer arrives."""
        http = h11.Connection(h11.SERVER)  # it bounds the head of a request
        request: h11.Request | None = None
        try:
            request = await _read_request(http, stream)
            if request is None:
                return
            self._answering.add(stream)
            status, headers, body = await self._answer(request)
        except h11.RemoteProtocolError as error:
            status, headers, body = error.error_status_hint, [], b""
        finally:
            self._answering.discard(stream)
        headers += [
            (b"date", formatdate(usegmt=True).encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        content = [] if request is not None and request.method == b"HEAD" else [h11.Data(data=body)]
        events = [h11.Response(status_code=status, headers=headers), *content, h11.EndOfMessage()]
        await stream.send_all(b"".join(http.send(event) or b"" for event in events))
        await _linger(stream)

    async def _answer(self, request: h11.Request) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of the application's answer."""
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": "http",
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
        }
        status, body = 500, bytearray()
        headers: list[tuple[bytes, bytes]] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
            else:
                body.extend(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception:  # a defect spoils this answer, and not the node
            logger.exception("%s cannot be answered for a reason that nobody foresaw", scope["path"])
        return status, headers, bytes(body)


async def _read_request(http: h11.Connection, stream: trio.SocketStream) -> h11.Request | None:
    """Return the head of a request, ``None`` where the client left without one. Raises h11.RemoteProtocolError."""
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        http.receive_data(await stream.receive_some(_READ_BYTES))


async def _linger(stream: trio.SocketStream) -> None:
    """Read what the client still sends: closing over it would make the system take the answer back."""
    with trio.move_on_after(CLOSE_TIMEOUT_S):
        await stream.send_eof()
        while await stream.receive_some(_READ_BYTES):
            pass
