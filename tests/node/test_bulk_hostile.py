"""Hostile connections to a bulk port and hostile lanes, while honest ones beside them go on: nothing grows, nobody waits."""

from __future__ import annotations

import os
import random
from contextlib import AsyncExitStack, suppress

import pytest
import trio

from p2pkv.errors import PeerUnreachableError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_BULK_STRANGERS, MAX_CODED_BLOCK_BYTES
from p2pkv.ports import BulkSender
from p2pkv.units import KIB, MIB
from p2pkv_node.bulk import BulkSettings, TlsBulkLane
from p2pkv_node.bulk_greeting import GREETING_BYTES
from tests.support.lanes import (
    HOST,
    PEER,
    Sink,
    Source,
    assert_no_answer,
    block,
    greeting,
    make_lane,
    offered,
    open_descriptors,
    open_lane,
    raw_provider,
    stranger,
    until,
)
from tests.support.memory import bounded_memory


class Service:
    """An honest lane that carries blocks while a test goes on."""

    def __init__(self, sender: BulkSender, sink: Sink, cid: Cid) -> None:
        self._sender, self._sink, self._cid = sender, sink, cid

    async def goes_on(self) -> None:
        count = len(self._sink.received) + 3
        self._sender.send_blocks([self._cid] * 3)
        await until(lambda: len(self._sink.received) == count)


async def open_service(lane: TlsBulkLane) -> Service:
    cid, data = block(1)
    sink = Sink((cid, data))
    sender, _ = await open_lane(lane, sink, Source((cid, data)))
    service = Service(sender, sink, cid)
    await service.goes_on()
    return service


# --- at a provider's port ------------------------------------------------------------------------------------------------


async def test_a_storm_of_strangers_is_bounded_and_leaves_nothing() -> None:
    """Silent ones, garbage, half a handshake, a wrong token: several times as many as may be there at once."""
    rng = random.Random(5)
    async with AsyncExitStack() as stack:
        lane = await stack.enter_async_context(make_lane(BulkSettings(host=HOST, handshake_timeout_s=60)).running())
        service = await open_service(lane)
        assert lane.port is not None
        before = open_descriptors()
        strangers: list[trio.SocketStream] = []
        words = (b"", rng.randbytes(KIB), b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n")
        with bounded_memory(16 * MIB):
            for number in range(4 * MAX_BULK_STRANGERS):
                strangers.append(await stack.enter_async_context(await trio.open_tcp_stream(HOST, lane.port)))
                with suppress(trio.BrokenResourceError):
                    await strangers[-1].send_all(words[number % 4])
                if number % 32 == 0:
                    await service.goes_on()
            await until(lambda: lane.statistics().dropped_strangers >= 3 * MAX_BULK_STRANGERS)
            assert len(open_descriptors() - before) <= len(strangers) + MAX_BULK_STRANGERS + 1
            await lane.connect(HOST, offered(lane), Sink())
        for one in strangers:
            await one.aclose()
        await until(lambda: lane.statistics().dropped_strangers == len(strangers))
        await until(lambda: len(open_descriptors() - before) <= 2)  # both ends of the honest lane
        await service.goes_on()


async def test_a_greeting_in_drops_is_cut_off_in_time() -> None:
    async with make_lane(BulkSettings(host=HOST, handshake_timeout_s=0.5)).running() as lane:
        service = await open_service(lane)
        offer = offered(lane)
        slow = await stranger(lane)
        try:
            await slow.handshake()
            sent = 0
            with suppress(PeerUnreachableError):
                for byte in greeting(offer):
                    await slow.send(bytes((byte,)))
                    sent += 1
                    await trio.sleep(0.05)
                    await service.goes_on()
        finally:
            slow.close()
        assert sent < GREETING_BYTES
        await until(lambda: lane.statistics().dropped_strangers == 1)
        assert lane.statistics().refused_tokens == 0
        await lane.connect(HOST, offer, Sink())  # its token was never whole, and is still good


async def test_a_token_of_another_node_is_refused_and_stays_good_where_it_is_from() -> None:
    async with make_lane(BulkSettings(host=HOST)).running() as one, make_lane(BulkSettings(host=HOST)).running() as other:
        service = await open_service(one)
        ours, theirs = offered(one), offered(other)
        await assert_no_answer(one, greeting(theirs))
        assert one.statistics().refused_tokens == 1
        await service.goes_on()
        await one.connect(HOST, ours, Sink())
        await one.connect(HOST, theirs, Sink())


async def test_who_steals_a_token_gets_nothing_and_hurts_nobody() -> None:
    mine = block(2)
    async with make_lane(BulkSettings(host=HOST)).running() as lane, make_lane(seed=b"t" * 32).running() as thief:
        service = await open_service(lane)
        senders: list[BulkSender] = []
        source, sink, stolen = Source(mine), Sink(mine), Sink(mine)
        offer = lane.offer(PEER, source, want_sender=senders.append)
        assert offer is not None
        with pytest.raises(PeerUnreachableError):
            await thief.connect(HOST, offer, stolen)
        await service.goes_on()
        await lane.connect(HOST, offer, sink)
        await until(lambda: len(senders) == 1)
        senders[0].send_blocks([mine[0]])
        await until(lambda: sink.received == [mine])
        await assert_no_answer(lane, greeting(offer))  # what it may have seen of its owner's is no use either
        await service.goes_on()
        assert (stolen.received, lane.statistics().refused_tokens) == ([], 2)


# --- at a consumer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [MAX_CODED_BLOCK_BYTES + 1, 2**32 - 1], ids=["above the bound", "4 GiB"])
async def test_an_oversized_frame_ends_its_lane_alone(length: int) -> None:
    cid, data = block(9)
    async with make_lane(BulkSettings(host=HOST)).running() as lane:
        service = await open_service(lane)
        sink = Sink((cid, data))
        with bounded_memory(8 * MIB):
            async with raw_provider(lane, sink) as provider:
                await provider.send(cid.binary + length.to_bytes(4, "big"))
                with suppress(PeerUnreachableError):
                    for _ in range(64):  # more than the kernel takes, were nobody to hang up
                        await provider.send(os.urandom(16 * KIB))
                await until(lambda: sink.closed == 1)
                await service.goes_on()
        assert sink.received == []
        assert lane.statistics().protocol_faults == 1
