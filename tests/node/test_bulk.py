"""The bulk lane over loopback: blocks go over, strangers and liars do not, and nothing stays behind."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from p2pkv.errors import ListenError, PeerUnreachableError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_STREAMS_PER_PEER
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender
from p2pkv.units import KIB, MIB
from p2pkv_node import bulk_send
from p2pkv_node.bulk import MAGIC, TOKEN_BYTES, BulkSettings, TlsBulkLane
from p2pkv_node.bulk_lane import THREAD_NAME
from p2pkv_node.bulk_receive import LaneReader, reader_count
from p2pkv_node.bulk_tls import TlsConnection, client_context, make_identity

HOST = "127.0.0.1"
PEER = "12D3KooWConsumer"
DEADLINE_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test, however it ends, leaves a lane's thread behind."""
    yield
    assert lane_threads() == []


@pytest.fixture
async def lane() -> AsyncIterator[TlsBulkLane]:
    """One node that is both provider and consumer."""
    with trio.fail_after(3 * DEADLINE_S):
        async with TlsBulkLane(BulkSettings(host=HOST)).running() as running:
            yield running


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


async def stranger(lane: TlsBulkLane, context: ssl.SSLContext | None = None) -> TlsConnection:
    assert lane.port is not None
    raw = socket.create_connection((HOST, lane.port))
    return TlsConnection(raw, context or client_context(), server_side=False)


# --- blocks ------------------------------------------------------------------------------------------------------------------


async def test_a_block_goes_over(lane: TlsBulkLane) -> None:
    cid, data = block(1, MAX_CODED_BLOCK_BYTES)
    sink, source = Sink((cid, data)), Source((cid, data))
    sender, receiver = await open_lane(lane, sink, source)
    statistics = lane.statistics()
    assert (statistics.sending_lanes, statistics.receiving_lanes) == (1, 1)
    sender.send_blocks([cid])
    await until(lambda: len(sink.received) == 1)
    assert sink.received == [(cid, data)]
    await until(lambda: source.sent == [len(data)])
    receiver.close()
    await until(lambda: lane.statistics().sending_lanes == 0 and sink.closed == 1)
    assert source.closed == 1
    statistics = lane.statistics()
    assert (statistics.receiving_lanes, statistics.protocol_faults, statistics.dropped_strangers) == (0, 0, 0)
    assert (statistics.blocks_sent, statistics.bytes_sent) == (1, len(data))
    assert (statistics.blocks_received, statistics.bytes_received) == (1, len(data))


async def test_blocks_of_many_sizes_go_over_in_order_and_are_all_reported(lane: TlsBulkLane) -> None:
    blocks = [block(seed, size) for seed, size in enumerate([1, 16 * KIB - 40, 16 * KIB, 192 * KIB, MIB, 3, 700 * KIB])]
    sink, source = Sink(*blocks), Source(*blocks)
    sender, _ = await open_lane(lane, sink, source)
    sender.send_blocks([cid for cid, _ in blocks[:5]])
    sender.send_blocks([cid for cid, _ in blocks[5:]])
    await until(lambda: len(source.sent) == len(blocks))
    assert source.sent == [len(data) for _, data in blocks]
    await until(lambda: len(sink.received) == len(blocks))
    assert sink.received == blocks


async def test_a_block_that_is_not_here_is_reported_and_the_next_one_sent(lane: TlsBulkLane) -> None:
    here, gone = block(1), block(2)
    sink, source = Sink(here, gone), Source(here)
    sender, _ = await open_lane(lane, sink, source)
    sender.send_blocks([gone[0], here[0], gone[0]])
    await until(lambda: source.sent == [0, len(here[1]), 0])
    await until(lambda: sink.received == [here])


async def test_a_consumer_that_reads_nothing_has_next_to_nothing_read_for_it_and_is_cut_off() -> None:
    blocks = [block(seed, MIB) for seed in range(4)]
    slow, slow_source, sink, source = Sink(*blocks), Source(*blocks), Sink(*blocks), Source(*blocks)
    slow.gate.clear()
    async with (
        TlsBulkLane(BulkSettings(host=HOST, send_timeout_s=1.0)).running() as lane,
        TlsBulkLane().running() as slow_node,
    ):
        stuck, _ = await open_lane(lane, slow, slow_source, consumer=slow_node)
        sender, _ = await open_lane(lane, sink, source)
        stuck.send_blocks([blocks[number % 4][0] for number in range(200)])
        await until(lambda: len(slow_source.sent) > 0)  # told while there is more to send
        assert slow_source.closed == 0
        for number in range(40):  # its neighbour does not notice
            sender.send_blocks([blocks[number % 4][0]])
        await until(lambda: len(sink.received) == 40)
        # One block is being sent, and the kernel holds what it holds.
        assert slow_source.reads < 40
        await until(lambda: slow_source.closed == 1)
        assert len(slow_source.sent) == slow_source.reads - 1
        slow.gate.set()
        await until(lambda: slow.closed == 1)


async def test_a_lane_ends_before_its_key_is_worn_out(lane: TlsBulkLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_send, "MAX_BULK_LANE_BYTES", 128 * KIB)
    blocks = [block(seed) for seed in range(2)]
    sink, source = Sink(*blocks), Source(*blocks)
    sender, _ = await open_lane(lane, sink, source)
    for cid, _ in blocks:
        sender.send_blocks([cid])
    await until(lambda: sink.closed == 1 and source.closed == 1)
    assert len(sink.received) == 2
    assert source.sent == [64 * KIB, 64 * KIB]
    sender.send_blocks([blocks[0][0]])  # dropped
    assert source.reads == 2


# --- tokens ------------------------------------------------------------------------------------------------------------------


async def test_a_wrong_token_is_refused_without_an_answer(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    sink = Sink()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, replace(offer, token=bytes(TOKEN_BYTES)), sink)
    assert lane.statistics().refused_tokens == 1
    connection = await stranger(lane)
    try:
        await connection.handshake()
        await connection.send(MAGIC + bytes(TOKEN_BYTES))
        with pytest.raises(PeerUnreachableError):
            await connection.receive(1)
    finally:
        connection.close()
    assert sink.closed == 0
    await lane.connect(HOST, offer, Sink())  # the true one is still good


async def test_a_token_with_another_magic_is_refused_and_spent(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    connection = await stranger(lane)
    try:
        await connection.handshake()
        await connection.send(b"p2pkvBL2" + offer.token)
        with pytest.raises(PeerUnreachableError):
            await connection.receive(1)
    finally:
        connection.close()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, offer, Sink())


async def test_a_token_opens_one_lane_only(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    await lane.connect(HOST, offer, Sink())
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, offer, Sink())
    assert lane.statistics().refused_tokens == 1


async def test_an_expired_token_is_refused() -> None:
    clock = Clock()
    async with TlsBulkLane(BulkSettings(host=HOST, token_seconds=10), clock=clock).running() as lane:
        late, in_time = offered(lane), offered(lane)
        clock.now += 9.9
        await lane.connect(HOST, in_time, Sink())
        clock.now += 0.1
        with pytest.raises(PeerUnreachableError):
            await lane.connect(HOST, late, Sink())
        assert lane.statistics().refused_tokens == 1


async def test_tokens_come_from_the_injected_source() -> None:
    tokens = iter([b"a" * TOKEN_BYTES])
    async with TlsBulkLane(BulkSettings(host=HOST), token_source=lambda: next(tokens)).running() as lane:
        assert offered(lane).token == b"a" * TOKEN_BYTES


async def test_one_peer_cannot_hoard_offers() -> None:
    clock = Clock()
    async with TlsBulkLane(BulkSettings(host=HOST), clock=clock).running() as lane:
        await lane.connect(HOST, offered(lane), Sink())  # an open lane counts as well
        for _ in range(MAX_STREAMS_PER_PEER - 1):
            offered(lane)
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None
        offered(lane, "another peer")
        clock.now += 60
        offered(lane)  # what nobody took has expired


async def test_all_offers_together_are_bounded(monkeypatch: pytest.MonkeyPatch, lane: TlsBulkLane) -> None:
    monkeypatch.setattr("p2pkv_node.bulk.MAX_BULK_OFFERS", 3)
    for number in range(3):
        offered(lane, f"peer {number}")
    assert lane.offer("one more", Source(), want_sender=lambda sender: None) is None


async def test_lanes_are_bounded_at_both_ends() -> None:
    async with TlsBulkLane(BulkSettings(host=HOST, max_connections=1)).running() as lane:
        first, second = offered(lane), offered(lane)
        await lane.connect(HOST, first, Sink())
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None
        with pytest.raises(PeerUnreachableError, match="no bulk lane can be opened"):
            await lane.connect(HOST, second, Sink())
        async with TlsBulkLane().running() as other:
            with pytest.raises(PeerUnreachableError):
                await other.connect(HOST, second, Sink())


# --- strangers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_handshake", [False, True])
async def test_a_silent_stranger_is_cut_off(with_handshake: bool) -> None:
    async with TlsBulkLane(BulkSettings(host=HOST, handshake_timeout_s=0.2)).running() as lane:
        connection = await stranger(lane)
        try:
            if with_handshake:
                await connection.handshake()
                await connection.send(MAGIC)
            with trio.fail_after(DEADLINE_S):
                await connection.wait_readable()
        finally:
            connection.close()
        await until(lambda: lane.statistics().dropped_strangers == 1)


async def test_silent_strangers_do_not_shut_out_honest_peers() -> None:
    async with TlsBulkLane(BulkSettings(host=HOST, max_strangers=2, handshake_timeout_s=60)).running() as lane:
        silent = [await stranger(lane) for _ in range(5)]
        try:
            await lane.connect(HOST, offered(lane), Sink())
            # Two stayed until the consumer came and displaced one more.
            await until(lambda: lane.statistics().dropped_strangers == 4)
        finally:
            for connection in silent:
                connection.close()


async def test_a_stranger_that_leaves_at_once_costs_nothing(lane: TlsBulkLane) -> None:
    assert lane.port is not None
    before = open_descriptors()
    with socket.create_connection((HOST, lane.port)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets the connection
    await until(lambda: lane.statistics().dropped_strangers == 1)
    assert open_descriptors() == before


async def test_a_process_out_of_descriptors_accepts_again_later(lane: TlsBulkLane, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def failing_accept(listener: socket.socket) -> object:
        if failures:
            raise OSError(failures.pop(0), "made up")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing_accept)
    await lane.connect(HOST, offered(lane), Sink())
    assert failures == []


async def test_tls_1_2_is_refused_by_the_provider(lane: TlsBulkLane) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    connection = await stranger(lane, context)
    try:
        with pytest.raises(PeerUnreachableError):
            await connection.handshake()
    finally:
        connection.close()
    await until(lambda: lane.statistics().dropped_strangers == 1)


# --- the provider is not who it should be ----------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        yield listener, listener.getsockname()[1]


@asynccontextmanager
async def impostor(context: ssl.SSLContext) -> AsyncIterator[tuple[int, bytearray]]:
    """A TLS server that takes whatever one client sends; yields its port and the bytes it heard."""
    heard = bytearray()

    async def serve(listener: socket.socket) -> None:
        await trio.lowlevel.wait_readable(listener.fileno())
        raw, _ = listener.accept()
        connection = TlsConnection(raw, context, server_side=True)
        try:
            await connection.handshake()
            while True:
                heard.extend(await connection.receive(1))
        except PeerUnreachableError:
            pass
        finally:
            connection.close()
            ended.set()

    ended = trio.Event()
    with listening() as (listener, port):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener)
            yield port, heard
            with trio.fail_after(DEADLINE_S):
                await ended.wait()


async def test_a_man_in_the_middle_never_sees_the_token(lane: TlsBulkLane) -> None:
    async with impostor(make_identity().context) as (port, heard):
        sink = Sink()
        with pytest.raises(PeerUnreachableError, match="certificate"):
            await lane.connect(HOST, replace(offered(lane), port=port), sink)
    assert heard == b""
    assert lane.statistics().refused_certificates == 1
    assert sink.closed == 0


async def test_tls_1_2_is_refused_by_the_consumer(lane: TlsBulkLane) -> None:
    identity = make_identity()
    identity.context.minimum_version = ssl.TLSVersion.TLSv1_2
    identity.context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with impostor(identity.context) as (port, heard):
        with pytest.raises(PeerUnreachableError):
            await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), identity.fingerprint), Sink())
    assert heard == b""


async def test_a_port_that_says_nothing_is_given_up() -> None:
    async with TlsBulkLane(BulkSettings(handshake_timeout_s=0.2)).running() as lane:
        with listening() as (_, port), pytest.raises(PeerUnreachableError, match="in time"):
            await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), bytes(32)), Sink())


@pytest.mark.parametrize(("host", "port"), [(HOST, 1), (HOST, 70_000), ("localhost", 1), ("::1", 1)])
async def test_what_cannot_be_dialled_is_unreachable(lane: TlsBulkLane, host: str, port: int) -> None:
    before = open_descriptors()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(host, BulkOffer(port, bytes(TOKEN_BYTES), bytes(32)), Sink())
    assert open_descriptors() == before


# --- the provider breaks the rules -----------------------------------------------------------------------------------------


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
        await connection.receive(len(MAGIC) + TOKEN_BYTES)
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


@pytest.mark.parametrize(
    ("expected", "length"),
    [
        pytest.param(4, 5, id="longer than asked"),
        pytest.param(5, 4, id="shorter than asked"),
        pytest.param(4, 2**32 - 1, id="4 GiB"),
        pytest.param(MAX_CODED_BLOCK_BYTES + 1, MAX_CODED_BLOCK_BYTES + 1, id="above the bound, whatever the sink says"),
        pytest.param(0, 0, id="nothing"),
        pytest.param(None, 4, id="not asked for"),
    ],
)
async def test_a_frame_that_breaks_the_rules_ends_the_lane_before_allocation(
    lane: TlsBulkLane, expected: int | None, length: int
) -> None:
    cid, _ = block(1)
    sink = Sink()
    if expected is not None:
        sink.sizes[cid] = expected
    async with raw_provider(lane, sink) as provider:
        # The header alone ends it: nobody waits for, or makes room for, the bytes that it announces.
        await provider.send(cid.binary + length.to_bytes(4, "big"))
        await until(lambda: sink.closed == 1)
    assert sink.received == []
    assert lane.statistics().protocol_faults == 1


async def test_garbage_instead_of_a_cid_ends_the_lane(lane: TlsBulkLane) -> None:
    sink = Sink()
    async with raw_provider(lane, sink) as provider:
        await provider.send(bytes(40))
        await until(lambda: sink.closed == 1)
    assert lane.statistics().protocol_faults == 1


async def test_half_a_block_is_never_handed_over(lane: TlsBulkLane) -> None:
    cid, data = block(1)
    sink = Sink((cid, data))
    async with raw_provider(lane, sink) as provider:
        await provider.send(cid.binary + len(data).to_bytes(4, "big") + data[:100])
        provider.close()
        await until(lambda: sink.closed == 1)
    assert sink.received == []
    assert lane.statistics().protocol_faults == 0  # leaving is no lie


async def test_a_young_connection_waits_for_a_slow_reader(lane: TlsBulkLane) -> None:
    cid, data = block(1, MIB)
    frame, count = cid.binary + len(data).to_bytes(4, "big") + data, 24  # more than the kernel buffers
    sink = Sink((cid, data))
    sink.gate.clear()
    async with raw_provider(lane, sink) as provider, trio.open_nursery() as nursery:

        async def send_frames() -> None:
            for number in range(count):
                for start in range(0, len(frame), 16 * KIB):
                    await provider.send(frame[start : start + 16 * KIB])
                if number == 0:
                    nursery.start_soon(release)

        async def release() -> None:
            await until(lambda: len(sink.received) == 1)
            await trio.testing.wait_all_tasks_blocked(0.05)
            sink.gate.set()

        await send_frames()
        await until(lambda: len(sink.received) == count)


async def test_another_greeting_is_another_protocol(lane: TlsBulkLane) -> None:
    identity = make_identity()

    async def greet(listener: socket.socket) -> None:
        await trio.lowlevel.wait_readable(listener.fileno())
        raw, _ = listener.accept()
        connection = TlsConnection(raw, identity.context, server_side=True)
        try:
            await connection.handshake()
            await connection.send(b"HTTP/1.1")
            await connection.wait_readable()
        finally:
            connection.close()

    with listening() as (listener, port):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(greet, listener)
            with pytest.raises(PeerUnreachableError, match="another protocol"):
                await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), identity.fingerprint), Sink())


async def test_a_consumer_that_talks_is_cut_off(lane: TlsBulkLane) -> None:
    senders: list[BulkSender] = []
    offer = lane.offer(PEER, Source(), want_sender=senders.append)
    assert offer is not None
    connection = await stranger(lane)
    try:
        await connection.handshake()
        await connection.send(MAGIC + offer.token)
        assert await connection.receive(len(MAGIC)) == MAGIC
        await until(lambda: lane.statistics().sending_lanes == 1)
        await connection.send(b"?")
        await until(lambda: lane.statistics().sending_lanes == 0)
    finally:
        connection.close()


PROVIDER_PROCESS = """
import json, sys, trio
from p2pkv.formats.cid import Cid
from p2pkv_node.bulk import BulkSettings, TlsBulkLane

DATA = bytes(65536)
CID = Cid.of_block(DATA)

class Source:
    def read_block(self, cid, buffer):
        buffer[: len(DATA)] = DATA
        return len(DATA)

    def blocks_sent(self, sizes):
        self.sender.send_blocks([CID] * len(sizes))

    def lane_closed(self):
        pass

async def main():
    senders, receive_sender = trio.open_memory_channel(1)
    async with TlsBulkLane(BulkSettings(host="127.0.0.1")).running() as lane:
        source = Source()
        offer = lane.offer("consumer", source, want_sender=senders.send_nowait)
        print(json.dumps([offer.port, offer.token.hex(), offer.fingerprint.hex()]), flush=True)
        sender = await receive_sender.receive()
        source.sender = sender
        source.blocks_sent([0])
        await trio.sleep_forever()

trio.run(main)
"""


async def test_a_provider_killed_in_the_middle_closes_the_lane(lane: TlsBulkLane) -> None:
    data = bytes(65536)
    sink = Sink((Cid.of_block(data), data))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "node")))}
    start = partial(subprocess.Popen, [sys.executable, "-c", PROVIDER_PROCESS], stdout=subprocess.PIPE, env=environment)
    with await trio.to_thread.run_sync(start) as process:
        try:
            assert process.stdout is not None
            with trio.fail_after(3 * DEADLINE_S):
                line = await trio.to_thread.run_sync(process.stdout.readline)
            port, token, fingerprint = json.loads(line)
            await lane.connect(HOST, BulkOffer(port, bytes.fromhex(token), bytes.fromhex(fingerprint)), sink)
            await until(lambda: len(sink.received) >= 10)
            assert sink.closed == 0
        finally:
            process.kill()
    await until(lambda: sink.closed == 1)
    assert all(received == data for _, received in sink.received)
    assert lane.statistics().receiving_lanes == 0


# --- closing -----------------------------------------------------------------------------------------------------------------


async def test_the_provider_closes_while_its_thread_is_stuck_in_send(lane: TlsBulkLane) -> None:
    blocks = [block(seed, MIB) for seed in range(4)]
    sink, source = Sink(*blocks), Source(*blocks)
    sink.gate.clear()
    sender, _ = await open_lane(lane, sink, source)
    sender.send_blocks([blocks[0][0]] * 200)
    await until(lambda: source.reads > 0)
    sender.close()
    sender.close()
    await until(lambda: lane.statistics().sending_lanes == 0 and source.closed == 1)
    assert source.reads < 200
    sink.gate.set()
    await until(lambda: sink.closed == 1)


async def test_the_consumer_closes_while_nothing_comes(lane: TlsBulkLane) -> None:
    sink, source = Sink(), Source()
    sender, receiver = await open_lane(lane, sink, source)
    receiver.close()
    receiver.close()
    await until(lambda: lane.statistics().sending_lanes == 0 and sink.closed == 1)
    assert lane_threads() == []
    assert source.closed == 1
    sender.send_blocks([block(1)[0]])
    assert source.reads == 0


async def test_the_sink_may_close_from_its_own_thread(lane: TlsBulkLane) -> None:
    blocks = [block(seed, KIB) for seed in range(3)]  # they fit the kernel's buffers
    sink = Sink(*blocks)
    sender, receiver = await open_lane(lane, sink, Source(*blocks))
    sink.after_block = receiver.close
    sink.gate.clear()
    sender.send_blocks([cid for cid, _ in blocks])
    await until(lambda: lane.statistics().blocks_sent == 3)
    sink.gate.set()
    await until(lambda: sink.closed == 1)
    assert len(sink.received) == 1  # what the kernel had taken in already does not come after close()


async def test_nothing_stays_behind() -> None:
    before = open_descriptors()
    blocks = [block(seed, MIB) for seed in range(4)]
    sinks = [Sink(*blocks) for _ in range(4)]
    async with TlsBulkLane(BulkSettings(host=HOST)).running() as provider, TlsBulkLane().running() as consumer:
        senders: list[BulkSender] = []
        for sink in sinks:
            offer = provider.offer(PEER, Source(*blocks), want_sender=senders.append)
            assert offer is not None
            await consumer.connect(HOST, offer, sink)
        await until(lambda: len(senders) == 4)
        for sender in senders:
            sender.send_blocks([blocks[0][0]])
        waiting = await stranger(provider)  # a stranger in the middle of its handshake goes as well
        await until(lambda: all(sink.received for sink in sinks))
        assert len(lane_threads()) == 4 + reader_count()
    waiting.close()
    assert [sink.closed for sink in sinks] == [1, 1, 1, 1]
    assert lane_threads() == []
    assert open_descriptors() == before
    assert provider.port is None
    assert provider.offer(PEER, Source(), want_sender=senders.append) is None
    with pytest.raises(PeerUnreachableError):
        await consumer.connect(HOST, BulkOffer(1, bytes(TOKEN_BYTES), bytes(32)), Sink())


async def test_a_defect_in_a_sink_ends_every_lane_and_is_told(lane: TlsBulkLane) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def receive() -> None:
        async with TlsBulkLane().running() as consumer:
            await open_lane(lane, good, consumer=consumer)
            sender, _ = await open_lane(lane, bad, Source(one), consumer=consumer)
            sender.send_blocks([one[0]])
            await trio.sleep_forever()

    bad, good, one = Sink(block(1)), Sink(), block(1)
    bad.after_block = fail
    with pytest.raises(ExceptionGroup) as caught:
        await receive()
    assert caught.group_contains(ZeroDivisionError)
    assert (bad.closed, good.closed) == (1, 1)


async def test_many_lanes_share_a_few_threads(lane: TlsBulkLane) -> None:
    blocks = [block(seed) for seed in range(40)]
    sinks = [Sink(*blocks) for _ in range(MAX_STREAMS_PER_PEER)]
    async with TlsBulkLane().running() as consumer:
        senders = [(await open_lane(lane, sink, Source(*blocks), consumer=consumer))[0] for sink in sinks]
        for sender in senders:
            sender.send_blocks([cid for cid, _ in blocks])
        await until(lambda: all(len(sink.received) == 40 for sink in sinks))
        assert len(lane_threads()) == len(sinks) + reader_count()
    assert all(sink.received == blocks for sink in sinks)


class ClosedLane:
    """What a reader needs of a lane, of one whose peer has left."""

    def __init__(self) -> None:
        self._socket, peer = socket.socketpair()
        peer.close()
        self.gone = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> bool:
        raise ConnectionResetError

    def fail(self, error: Exception) -> None:
        """As expected."""

    def let_go(self) -> None:
        self._socket.close()
        self.gone += 1


def test_a_lane_that_comes_while_the_thread_ends_is_left_to_the_next_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, first, second = LaneReader(), ClosedLane(), ClosedLane()
    take_new = LaneReader._take_new
    to_be_started: list[bool] = []

    def take_new_and_be_overtaken(*arguments: Any) -> bool:
        some = take_new(*arguments)
        if not some and not to_be_started:
            to_be_started.append(reader.add(second))  # type: ignore[arg-type]  # a stand-in
        return some

    monkeypatch.setattr(LaneReader, "_take_new", take_new_and_be_overtaken)
    assert reader.add(first)  # type: ignore[arg-type]  # as above
    reader._receive()
    assert (first.gone, second.gone, reader.lanes, to_be_started) == (1, 0, 1, [True])
    reader._receive()
    assert (first.gone, second.gone, reader.lanes) == (1, 1, 0)


async def test_a_lane_that_is_cancelled_at_birth_still_tells_its_sink() -> None:
    sink = Sink()
    async with TlsBulkLane(BulkSettings(host=HOST)).running() as provider, TlsBulkLane().running() as consumer:
        await consumer.connect(HOST, offered(provider), sink)
        # no checkpoint between here and the end: the lane's task has not run yet
    assert sink.closed == 1


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(UsageError):
        async with TlsBulkLane(BulkSettings(host=HOST)).running():
            raise UsageError("the body's own")


# --- listening ---------------------------------------------------------------------------------------------------------------


async def test_without_a_bulk_port_there_is_no_offer() -> None:
    async with TlsBulkLane().running() as lane:
        assert lane.port is None
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_ipv6_carries_a_block(host: str) -> None:
    try:
        lane = TlsBulkLane(BulkSettings(host=host))
        async with lane.running():
            cid, data = block(1)
            sink = Sink((cid, data))
            senders: list[BulkSender] = []
            offer = lane.offer(PEER, Source((cid, data)), want_sender=senders.append)
            assert offer is not None
            await lane.connect("::1", offer, sink)
            await until(lambda: len(senders) == 1)
            senders[0].send_blocks([cid])
            await until(lambda: len(sink.received) == 1)
    except ListenError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("this machine has no IPv6")
        raise


@pytest.mark.parametrize("host", ["192.0.2.1", "localhost"])
async def test_an_address_that_is_not_ours_is_a_listen_error(host: str) -> None:
    with pytest.raises(ListenError):
        async with TlsBulkLane(BulkSettings(host=host)).running():
            pass


async def test_a_port_in_use_is_a_listen_error(lane: TlsBulkLane) -> None:
    assert lane.port is not None
    with pytest.raises(ListenError):
        async with TlsBulkLane(BulkSettings(host=HOST, port=lane.port)).running():
            pass


def test_the_private_key_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modes: list[tuple[int, int]] = []
    load = ssl.SSLContext.load_cert_chain

    def spy(context: ssl.SSLContext, path: Path) -> None:
        modes.append((path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777))
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    assert make_identity().fingerprint != make_identity().fingerprint
    assert modes == [(0o600, 0o700)] * 2
    assert list(tmp_path.iterdir()) == []
