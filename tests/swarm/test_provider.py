"""The consumer's driver for one provider: what a bulk lane reports reaches the fetch in batches, once, and in time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pkv.errors import DiskFullError, P2pkvError
from p2pkv.exchange.connection import BULK, ProviderConnection
from p2pkv.exchange.messages import BulkClosed, BulkOffered, BulkRequest, Message, WantBlocks
from p2pkv.formats.cid import Cid
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender, BulkSink, BulkSource, Channel, PeerAddress, PeerId
from p2pkv.swarm.provider import Provider
from sims.network import open_world
from sims.node import SimNode
from sims.routing import ProviderRecords

BLOCKS = {Cid.of_block(data): data for data in (bytes([number]) * 1000 for number in range(32))}
CIDS = list(BLOCKS)


class FakeLane:
    """A ``BulkLane`` of a consumer that is connected at once; the test brings the blocks, as the receiving thread does."""

    def __init__(self) -> None:
        self.sink: BulkSink | None = None

    def offer(self, peer_id: PeerId, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        return None

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        self.sink = sink
        await trio.lowlevel.checkpoint()
        return self

    def close(self) -> None:
        """Nothing to end."""

    def bring(self, cid: Cid, data: bytes | None = None) -> None:
        assert self.sink is not None
        self.sink.receive_block(cid, memoryview(BLOCKS[cid] if data is None else data))


class Events:
    """What the provider tells, in order."""

    def __init__(self) -> None:
        self.delivered: list[list[Cid]] = []
        self.lies: list[Cid] = []
        self.failures: list[P2pkvError] = []

    def provider_delivered(self, provider: Provider, blocks: Sequence[tuple[Cid, int]]) -> None:
        assert all(size == len(BLOCKS[cid]) for cid, size in blocks)
        self.delivered.append([cid for cid, _ in blocks])

    def provider_lied(self, provider: Provider, cid: Cid) -> None:
        self.lies.append(cid)

    def store_failed(self, error: P2pkvError) -> None:
        self.failures.append(error)

    def provider_said(self, provider: Provider, message: Message) -> None:
        """Not of interest here."""


class Setting:
    def __init__(
        self, provider: Provider, events: Events, lane: FakeLane, node: SimNode, wanted: list[Cid | BulkClosed]
    ) -> None:
        self.provider, self.events, self.lane, self.node, self.wanted = provider, events, lane, node, wanted

    def want(self, cids: Sequence[Cid]) -> None:
        self.provider.want(cids, lambda cid: len(BLOCKS[cid]))

    def end_lane(self) -> None:
        assert self.lane.sink is not None
        self.lane.sink.lane_closed()


@asynccontextmanager
async def open_setting() -> AsyncIterator[Setting]:
    """A provider that is connected and has its lane; ``wanted`` is what its other end hears: wants, and the lane's end."""
    wanted: list[Cid | BulkClosed] = []

    async def serve(channel: Channel) -> None:
        connection = ProviderConnection("peer", frozenset({BULK}))
        await channel.send(connection.data_to_send())
        while data := await channel.receive():
            for message in connection.receive_data(data):
                if isinstance(message, BulkRequest):
                    connection.offer_bulk(BulkOffered(1, bytes(32), bytes(32)))
                elif isinstance(message, WantBlocks):
                    wanted.extend(message.cids)
                elif isinstance(message, BulkClosed):
                    wanted.append(message)
            await channel.send(connection.data_to_send())

    async with open_world() as world, trio.open_nursery() as nursery:
        records = ProviderRecords()
        SimNode(world, records, "peer").network.set_channel_handler(serve)
        node = SimNode(world, records, "me")
        lane, events = FakeLane(), Events()
        node.context.bulk = lane
        provider = Provider(node.context, await node.network.open_channel(PeerAddress("peer")), events)
        nursery.start_soon(provider.run)
        provider.request_lane()
        while not provider.bulk:  # noqa: ASYNC110 - virtual time, and the driver has no event for it
            await trio.sleep(0.001)
        yield Setting(provider, events, lane, node, wanted)
        nursery.cancel_scope.cancel()


async def test_blocks_that_come_together_are_told_together(autojump_clock: MockClock) -> None:
    async with open_setting() as setting:
        setting.want(CIDS)
        setting.lane.bring(CIDS[0])
        await wait_all_tasks_blocked()
        assert setting.events.delivered == [[CIDS[0]]]  # the first one at once
        for cid in CIDS[1:6]:
            setting.lane.bring(cid)
            await trio.lowlevel.checkpoint()
        await trio.sleep(0.049)
        assert len(setting.events.delivered) == 1
        await trio.sleep(0.002)  # far from half of what is outstanding, but not for ever
        assert setting.events.delivered[1:] == [CIDS[1:6]]
        assert all(setting.node.store.read(cid) == BLOCKS[cid] for cid in CIDS[:6])


async def test_half_of_what_is_outstanding_is_told_without_delay(autojump_clock: MockClock) -> None:
    async with open_setting() as setting:
        setting.want(CIDS[:5])
        setting.lane.bring(CIDS[0])
        await wait_all_tasks_blocked()
        setting.lane.bring(CIDS[1])
        await trio.lowlevel.checkpoint()
        started = trio.current_time()
        setting.lane.bring(CIDS[2])
        with trio.fail_after(0.001):
            await wait_all_tasks_blocked()
        assert trio.current_time() == started
        assert setting.events.delivered == [[CIDS[0]], CIDS[1:3]]


@pytest.mark.parametrize("honest_first", [0, 3])
async def test_after_a_lie_nothing_more_is_taken_and_it_is_told_once(autojump_clock: MockClock, honest_first: int) -> None:
    async with open_setting() as setting:
        setting.want(CIDS)
        for cid in CIDS[:honest_first]:
            setting.lane.bring(cid)
        for cid in CIDS[10:20]:
            setting.lane.bring(cid, random.Random(1).randbytes(1000))
        for cid in CIDS[20:]:
            setting.lane.bring(cid)
        await trio.sleep(0.1)
        setting.end_lane()
        assert setting.events.lies == [CIDS[10]]
        assert [cid for batch in setting.events.delivered for cid in batch] == CIDS[:honest_first]
        assert not any(map(setting.node.store.has, CIDS[honest_first:]))


async def test_a_peer_that_is_out_already_is_told_of_no_more(autojump_clock: MockClock) -> None:
    async with open_setting() as setting:
        setting.want(CIDS)
        setting.lane.bring(CIDS[0], b"a lie")
        setting.provider.close()  # for a lie on the stream, say
        setting.end_lane()
        assert setting.events.lies == []


async def test_a_full_disk_is_told_once(autojump_clock: MockClock) -> None:
    async with open_setting() as setting:
        setting.want(CIDS)
        setting.node.store.capacity = 2500
        for cid in CIDS[:8]:
            setting.lane.bring(cid)
        await trio.sleep(0.1)
        setting.end_lane()
        assert [type(error) for error in setting.events.failures] == [DiskFullError]
        assert [cid for batch in setting.events.delivered for cid in batch] == CIDS[:2]


async def test_what_a_lane_lost_is_asked_again_and_what_it_brought_is_not(autojump_clock: MockClock) -> None:
    async with open_setting() as setting:
        setting.want(CIDS)
        await trio.sleep(0.1)
        assert setting.wanted == CIDS
        for cid in CIDS[:3]:
            setting.lane.bring(cid)
        setting.end_lane()
        await trio.sleep(0.1)
        assert not setting.provider.bulk
        assert [cid for batch in setting.events.delivered for cid in batch] == CIDS[:3]
        closed, *again = setting.wanted[len(CIDS) :]
        assert closed == BulkClosed()
        assert sorted(again, key=str) == sorted(CIDS[3:], key=str)
