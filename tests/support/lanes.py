"""Both ends of bulk lanes for tests, over loopback: sinks, sources, strangers, and a provider that says anything."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from OpenSSL import SSL

from bench.transfer.measure import family
from p2pkv.errors import PeerUnreachableError
from p2pkv.formats.cid import Cid
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender
from p2pkv.units import KIB
from p2pkv_node.bulk import BulkSettings, TlsBulkLane, make_token
from p2pkv_node.bulk_greeting import GREETING_BYTES, TOKEN_BYTES, make_greeting
from p2pkv_node.bulk_lane import THREAD_NAME
from p2pkv_node.bulk_tls import TlsConnection, make_identity
from p2pkv_node.bulk_wire import MAGIC
from p2pkv_node.identity import peer_id_from_seed, signer_from_seed

HOST = "127.0.0.1"
SEED = bytes(range(32))  # of every node that a test does not give another one
PEER = peer_id_from_seed(SEED)
DEADLINE_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


def make_lane(
    settings: BulkSettings | None = None,
    *,
    seed: bytes = SEED,
    clock: Callable[[], float] = trio.current_time,
    token_source: Callable[[], bytes] = make_token,
) -> TlsBulkLane:
    """Return the lanes of a node whose secret is ``seed``: it may be its own peer."""
    return TlsBulkLane(settings, sign=signer_from_seed(seed), clock=clock, token_source=token_source)


def another_peer(number: int) -> str:
    return peer_id_from_seed(number.to_bytes(32, "big"))


def greeting(offer: BulkOffer, seed: bytes = SEED) -> bytes:
    """Return what a consumer says to take up ``offer``."""
    return make_greeting(offer, signer_from_seed(seed))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads bring about."""
    with trio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - threads set no trio event
            await trio.sleep(0.002)


def block(seed: int, size: int = 64 * KIB) -> tuple[Cid, bytes]:
    data = random.Random(seed).randbytes(size)
    return Cid.of_block(data), data


class Sink:
    """Keeps what arrives. ``gate`` holds the lane's thread back while it is cleared."""

    def __init__(self, *blocks: tuple[Cid, bytes]) -> None:
        self.sizes: dict[Cid, int] = {cid: len(data) for cid, data in blocks}
        self.received: list[tuple[Cid, bytes]] = []
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self.after_block: Callable[[], None] = lambda: None

    def expected_size(self, cid: Cid) -> int | None:
        return self.sizes.get(cid)

    def receive_block(self, cid: Cid, data: memoryview) -> None:
        assert self.closed == 0
        self.received.append((cid, bytes(data)))
        assert self.gate.wait(DEADLINE_S)
        self.after_block()

    def lane_closed(self) -> None:
        self.closed += 1


class Source:
    """Gives blocks to a lane."""

    def __init__(self, *blocks: tuple[Cid, bytes]) -> None:
        self.blocks = dict(blocks)
        self.reads = 0
        self.sent: list[int] = []
        self.closed = 0

    def read_block(self, cid: Cid, buffer: memoryview) -> int:
        self.reads += 1
        data = self.blocks.get(cid, b"")
        buffer[: len(data)] = data
        return len(data)

    def blocks_sent(self, sizes: Sequence[int]) -> None:
        assert self.closed == 0
        self.sent += sizes

    def lane_closed(self) -> None:
        self.closed += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def receiving_processes() -> list[int]:
    """Return the ids of this process's children that receive on lanes."""
    _, *children = family(os.getpid())
    return [child for child in children if b"p2pkv_node.bulk_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def open_lane(
    lane: TlsBulkLane, sink: Sink, source: Source | None = None, *, consumer: TlsBulkLane | None = None
) -> tuple[BulkSender, BulkReceiver]:
    """Return both ends of a new lane, of one node or of two."""
    senders: list[BulkSender] = []
    offer = lane.offer(PEER, source or Source(), want_sender=senders.append)
    assert offer is not None
    receiver = await (consumer or lane).connect(HOST, offer, sink)
    await until(lambda: len(senders) == 1)
    return senders[0], receiver


def offered(lane: TlsBulkLane, peer: str = PEER) -> BulkOffer:
    offer = lane.offer(peer, Source(), want_sender=lambda sender: None)
    assert offer is not None
    return offer


async def stranger(lane: TlsBulkLane, context: SSL.Context | None = None) -> TlsConnection:
    assert lane.port is not None
    raw = socket.create_connection((HOST, lane.port))
    return TlsConnection(raw, context or SSL.Context(SSL.TLS_METHOD), server_side=False)


async def assert_no_answer(lane: TlsBulkLane, said: bytes) -> None:
    """Say something to a bulk port, and be cut off without an answer."""
    connection = await stranger(lane)
    try:
        await connection.handshake()
        await connection.send(said)
        with trio.fail_after(DEADLINE_S), pytest.raises(PeerUnreachableError):
            await connection.receive(1)
    finally:
        connection.close()


@contextmanager
def listening() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        yield listener, listener.getsockname()[1]


@asynccontextmanager
async def raw_provider(lane: TlsBulkLane, sink: Sink) -> AsyncIterator[TlsConnection]:
    """The provider's bare connection, behind whose back a test can send anything to a consumer's lane."""
    identity = make_identity()
    opened: list[TlsConnection] = []

    async def greet(listener: socket.socket) -> None:
        await trio.lowlevel.wait_readable(listener.fileno())
        raw, _ = listener.accept()
        opened.append(connection := TlsConnection(raw, identity.context, server_side=True))
        await connection.handshake()
        await connection.receive(GREETING_BYTES)
        await connection.send(MAGIC)

    with listening() as (listener, port):
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(greet, listener)
                await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), identity.fingerprint), sink)
            yield opened[0]
        finally:
            for connection in opened:
                connection.close()
