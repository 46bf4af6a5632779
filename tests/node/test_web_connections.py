"""Connections to the port of the status page: idle, slow and hostile clients hold nothing for long and shut nobody out."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from starlette.types import Message, Receive, Scope, Send
from trio.testing import MockClock

from p2pkv.limits import CLOSE_TIMEOUT_S, MAX_WEB_CONNECTIONS, SHUTDOWN_GRACE_S, WEB_CONNECTION_S
from p2pkv_node.web.connections import Connections

LARGE_BYTES = 2**24  # more than the buffers of two sockets hold
HEAD = b"Host: here\r\n"


@dataclass
class Site:
    """An application, and the port where it is answered."""

    port: int = 0
    stop: trio.Event = field(default_factory=trio.Event)
    gate: trio.Event = field(default_factory=trio.Event)
    asked: list[Scope] = field(default_factory=list)
    connections: Connections = field(init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope)
        body = b"hello\n"
        match scope["path"]:
            case "/large":
                body = bytes(LARGE_BYTES)
            case "/gate":
                await self.gate.wait()
            case "/body":
                body = repr(await receive()).encode()
            case "/defect":
                raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        half: Message = {"type": "http.response.body", "body": body[:3], "more_body": True}
        await send(half)
        await send({"type": "http.response.body", "body": body[3:]})

    @property
    def open(self) -> int:
        return len(self.connections._open)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)


@pytest.fixture
async def site(nursery: trio.Nursery, mock_clock: MockClock) -> AsyncIterator[Site]:
    """Time stands still unless a test lets it jump."""
    listener = trio.socket.from_stdlib_socket(socket.create_server(("127.0.0.1", 0)))
    site = Site(listener.getsockname()[1])
    site.connections = Connections(site, trio.SocketListener(listener))
    await nursery.start(site.connections.serve, site.stop)
    yield site
    nursery.cancel_scope.cancel()


async def true(condition: Callable[[], bool]) -> None:
    """Wait for sockets while the clock stands still."""
    while not condition():
        await trio.lowlevel.checkpoint()


async def rest_of(stream: trio.SocketStream) -> bytes:
    """Return what comes until the end, however that comes."""
    data = bytearray()
    try:
        while chunk := await stream.receive_some(65536):
            data += chunk
    except trio.BrokenResourceError:
        pass
    return bytes(data)


async def answer(site: Site, path: str, method: str = "GET", headers: bytes = HEAD) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body."""
    async with await site.connect() as stream:
        await stream.send_all(f"{method} {path} HTTP/1.1\r\n".encode() + headers + b"\r\n")
        head, _, body = (await rest_of(stream)).partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    found = dict(line.lower().split(b": ", 1) for line in lines)
    assert len(found) == len(lines)
    return int(status.split()[1]), found, body


# --- answers ----------------------------------------------------------------------------------------------------------------


async def test_an_answer_is_whole_and_the_last_of_its_connection(site: Site) -> None:
    status, headers, body = await answer(site, "/a%20path?query=1")
    assert (status, body) == (200, b"hello\n")
    assert (headers[b"content-length"], headers[b"connection"]) == (b"6", b"close")
    assert headers[b"date"].endswith(b" gmt")
    (scope,) = site.asked
    assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == (
        *("GET", "/a path", b"/a%20path", b"query=1"),
    )
    assert scope["headers"] == [(b"host", b"here")]
    await true(lambda: not site.open)


async def test_a_head_without_its_body(site: Site) -> None:
    status, headers, body = await answer(site, "/", "HEAD")
    assert (status, headers[b"content-length"], body) == (200, b"6", b"")


async def test_a_body_is_not_read(site: Site) -> None:
    async with await site.connect() as stream:
        await stream.send_all(b"POST /body HTTP/1.1\r\nContent-Length: 100000\r\n" + HEAD + b"\r\n" + bytes(100_000))
        assert b"'body': b''" in await rest_of(stream)  # and the rest of it does not make the system take the answer back


async def test_upgrades_are_not_taken(site: Site) -> None:
    for upgrade in (b"websocket", b"h2c"):
        status, _, body = await answer(site, "/", headers=HEAD + b"Connection: upgrade\r\nUpgrade: " + upgrade + b"\r\n")
        assert (status, body) == (200, b"hello\n")


async def test_a_large_answer_arrives(site: Site) -> None:
    assert len((await answer(site, "/large"))[2]) == LARGE_BYTES


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no host
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), b"400"),  # TLS
    ],
)
async def test_what_is_no_request_is_told_so(site: Site, sent: bytes, status: bytes) -> None:
    async with await site.connect() as stream:
        await stream.send_all(sent)
        head = await rest_of(stream)
    assert head.startswith(b"HTTP/1.1 " + status)
    assert site.asked == []
    assert (await answer(site, "/"))[0] == 200


async def test_a_defect_spoils_one_answer(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    status, _, body = await answer(site, "/defect")
    assert (status, body) == (500, b"")
    assert "ZeroDivisionError" in caplog.text
    assert (await answer(site, "/"))[0] == 200


# --- clients that take their time -------------------------------------------------------------------------------------------


async def test_an_idle_client_is_let_go(site: Site, mock_clock: MockClock) -> None:
    async with await site.connect() as stream:
        await true(lambda: site.open == 1)
        mock_clock.jump(WEB_CONNECTION_S)
        assert await rest_of(stream) == b""
    await true(lambda: not site.open)


async def test_a_request_that_drips_is_not_waited_for(site: Site, mock_clock: MockClock) -> None:
    async with await site.connect() as stream:
        await true(lambda: site.open == 1)
        for _ in range(2):
            await stream.send_all(b"GET /")
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(WEB_CONNECTION_S / 2)
        assert await rest_of(stream) == b""
    assert site.asked == []


async def test_an_answer_that_is_not_read_is_not_waited_for(site: Site, mock_clock: MockClock) -> None:
    async with await site.connect() as stream:
        await stream.send_all(b"GET /large HTTP/1.1\r\n" + HEAD + b"\r\n")
        await true(lambda: bool(site.asked))
        await trio.testing.wait_all_tasks_blocked()
        assert site.open == 1
        mock_clock.jump(WEB_CONNECTION_S)
        await true(lambda: not site.open)
        assert len(await rest_of(stream)) < LARGE_BYTES


async def test_a_client_that_keeps_its_end_open_is_not_waited_for(site: Site, mock_clock: MockClock) -> None:
    async with await site.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert (await rest_of(stream)).endswith(b"hello\n")
        await trio.testing.wait_all_tasks_blocked()
        assert site.open == 1
        mock_clock.jump(CLOSE_TIMEOUT_S)
        await true(lambda: not site.open)


async def test_a_client_that_leaves(site: Site) -> None:
    for sent in (b"", b"GET / HT", b"GET /gate HTTP/1.1\r\n" + HEAD + b"\r\n", b"GET /large HTTP/1.1\r\n" + HEAD + b"\r\n"):
        stream = await site.connect()
        await true(lambda: site.open == 1)
        if sent:
            await stream.send_all(sent)
            await trio.testing.wait_all_tasks_blocked()
        await stream.aclose()
        site.gate.set()
        await true(lambda: not site.open)
    assert (await answer(site, "/"))[0] == 200


# --- many clients -----------------------------------------------------------------------------------------------------------


async def test_a_good_client_is_answered_among_idle_and_slow_ones(site: Site) -> None:
    """The connections stay within their bound; those that keep us waiting make room, the oldest first."""
    slow = (b"", b"GET / HTTP/1.1\r\nX", b"GET /large HTTP/1.1\r\n" + HEAD + b"\r\n")
    async with AsyncExitStack() as stack:
        streams: list[trio.SocketStream] = []
        for number in range(2 * MAX_WEB_CONNECTIONS):
            streams.append(await stack.enter_async_context(await site.connect()))
            await streams[-1].send_all(slow[number % 3])
            assert site.open <= MAX_WEB_CONNECTIONS
        await trio.testing.wait_all_tasks_blocked()
        assert site.open == MAX_WEB_CONNECTIONS
        for _ in range(3):
            assert (await answer(site, "/"))[2] == b"hello\n"
            assert site.open <= MAX_WEB_CONNECTIONS
        for stream in streams[:MAX_WEB_CONNECTIONS:3]:  # idle ones, whose end is all that there is to hear
            assert await rest_of(stream) == b""


async def test_an_answer_in_the_making_stays_while_slow_clients_can_go(site: Site) -> None:
    async with AsyncExitStack() as stack:
        busy = await stack.enter_async_context(await site.connect())
        await busy.send_all(b"GET /gate HTTP/1.1\r\n" + HEAD + b"\r\n")
        await true(lambda: bool(site.asked))
        for _ in range(2 * MAX_WEB_CONNECTIONS):
            await stack.enter_async_context(await site.connect())
        await trio.testing.wait_all_tasks_blocked()
        site.gate.set()
        assert (await rest_of(busy)).endswith(b"hello\n")


async def test_where_all_answers_are_in_the_making_the_oldest_goes(site: Site) -> None:
    async with AsyncExitStack() as stack:
        busy: list[trio.SocketStream] = []
        for number in range(MAX_WEB_CONNECTIONS):
            busy.append(await stack.enter_async_context(await site.connect()))
            await busy[-1].send_all(b"GET /gate HTTP/1.1\r\n" + HEAD + b"\r\n")
            await true(lambda: len(site.asked) == number + 1)  # noqa: B023 - waited for within the round
        assert (await answer(site, "/"))[0] == 200
        assert await rest_of(busy[0]) == b""
        site.gate.set()
        assert (await rest_of(busy[1])).endswith(b"hello\n")
    await true(lambda: not site.open)


# --- the end ----------------------------------------------------------------------------------------------------------------


async def test_at_the_end_slow_clients_go_at_once_and_answers_are_finished(site: Site, mock_clock: MockClock) -> None:
    async with AsyncExitStack() as stack:
        idle, reading, busy, late = [await stack.enter_async_context(await site.connect()) for _ in range(4)]
        await reading.send_all(b"GET /large HTTP/1.1\r\n" + HEAD + b"\r\n")
        await busy.send_all(b"GET /gate HTTP/1.1\r\n" + HEAD + b"\r\n")
        await true(lambda: len(site.asked) == 2)
        await trio.testing.wait_all_tasks_blocked()
        site.stop.set()
        assert await rest_of(idle) == await rest_of(late) == b""
        assert len(await rest_of(reading)) < LARGE_BYTES
        site.gate.set()
        assert (await rest_of(busy)).endswith(b"hello\n")
        with pytest.raises(OSError, match="attempts to connect"):
            await site.connect()


async def test_an_answer_that_never_comes_does_not_hold_the_end_up(site: Site, mock_clock: MockClock) -> None:
    async with await site.connect() as busy:
        await busy.send_all(b"GET /gate HTTP/1.1\r\n" + HEAD + b"\r\n")
        await true(lambda: bool(site.asked))
        site.stop.set()
        await trio.testing.wait_all_tasks_blocked()
        assert site.open == 1
        mock_clock.jump(SHUTDOWN_GRACE_S / 2)
        assert await rest_of(busy) == b""
    await true(lambda: not site.open)
