"""A bulk lane whose other end breaks the rules, or dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial

import pytest
import trio
import trio.testing

from p2pkv.errors import PeerUnreachableError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import BulkOffer, BulkSender
from p2pkv.units import KIB, MIB
from p2pkv_node.bulk import TlsBulkLane
from p2pkv_node.bulk_greeting import TOKEN_BYTES
from p2pkv_node.bulk_tls import TlsConnection, make_identity
from p2pkv_node.bulk_wire import MAGIC
from tests.support.lanes import (
    DEADLINE_S,
    HOST,
    PEER,
    ROOT,
    Sink,
    Source,
    block,
    greeting,
    listening,
    raw_provider,
    stranger,
    until,
)

# --- the provider breaks the rules -----------------------------------------------------------------------------------------


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
    frame, count = cid.binary + len(data).to_bytes(4, "big") + data, 48  # more than the kernel buffers
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
        await connection.send(greeting(offer))
        assert await connection.receive(len(MAGIC)) == MAGIC
        await until(lambda: lane.statistics().sending_lanes == 1)
        await connection.send(b"?")
        await until(lambda: lane.statistics().sending_lanes == 0)
    finally:
        connection.close()


PROVIDER_PROCESS = """
import json, sys, trio
from p2pkv.formats.cid import Cid
from p2pkv_node.bulk import BulkSettings
from tests.support.lanes import HOST, PEER, make_lane

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
    async with make_lane(BulkSettings(host=HOST)).running() as lane:
        source = Source()
        offer = lane.offer(PEER, source, want_sender=senders.send_nowait)
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
