"""The provider's driver over memory channels in virtual time: who is served what, over the stream and over lanes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pkv.errors import NotFoundError, PeerUnreachableError, StoreError
from p2pkv.exchange.messages import (
    BulkOffered,
    DontHave,
    Have,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    MAX_CODED_BLOCK_BYTES,
    MAX_UPLOAD_BYTES_PER_PEER,
)
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender, BulkSink, BulkSource
from p2pkv.units import KIB, MIB
from sims.store import MemoryBlockStore
from tests.support.serving import CIDS, Client, EndlessStore, Place, open_place, stored

_AT_ONCE = MAX_UPLOAD_BYTES_PER_PEER // MIB  # blocks of a MiB that may be outstanding

T = TypeVar("T")


@pytest.fixture
async def endless() -> AsyncIterator[Place]:
    async with open_place(EndlessStore()) as place:
        yield place


# --- blocks --------------------------------------------------------------------------------------------------------------


async def test_wants_are_served_in_order_and_nothing_stays_outstanding() -> None:
    store, blocks = stored(40)
    async with open_place(store) as place:
        client = await place.join("client")
        await client.fetch(list(blocks))
        assert [(block.cid, block.data) for block in client.blocks] == list(blocks.items())
        await wait_all_tasks_blocked()
        statistics = place.server.statistics()
        assert (statistics.blocks, statistics.bytes) == (40, 40 * 64 * KIB)
        assert statistics.outstanding_by_peer == {}
        assert statistics.rate > 0


async def test_small_blocks_are_read_several_at_a_time() -> None:
    store, blocks = stored(32)
    async with open_place(store) as place:
        hops = 0
        offload = place.provider.context.offload

        async def counting(work: Callable[[], T]) -> T:
            nonlocal hops
            hops += 1
            return await offload(work)

        place.provider.context.offload = counting
        await (await place.join("client")).fetch(list(blocks))
        assert hops <= 4


async def test_a_damaged_block_is_denied_and_never_served() -> None:
    store, blocks = stored(3)
    bad = list(blocks)[1]
    store.damage(bad, b"wrong" + blocks[bad][5:])
    async with open_place(store) as place:
        client = await place.join("client")
        await client.want(list(blocks))
        await client.read_until(lambda messages: len(client.blocks) == 2 and DontHave((bad,)) in messages)
        assert all(block.data == blocks[block.cid] for block in client.blocks)
        assert place.outstanding("client") == 0
        # It comes back, and the one who asked in vain hears of it.
        store.write(bad, blocks[bad])
        place.server.gained([bad])
        await client.read_until(lambda messages: Have((bad,)) in messages)


@pytest.mark.parametrize("cid", [Cid.of_block(b""), CIDS[0]], ids=["intact", "damaged"])
async def test_an_empty_block_is_none(cid: Cid) -> None:
    store = MemoryBlockStore()
    store.damage(cid, b"")
    async with open_place(store) as place:
        client = await place.join("client")
        await client.want([cid])
        await client.read_until(lambda messages: DontHave((cid,)) in messages)


async def test_a_disk_that_fails_denies_what_it_cannot_read() -> None:
    class Failing(EndlessStore):
        def read_into(self, cid: Cid, buffer: memoryview) -> int:
            raise StoreError("made up")

    async with open_place(Failing()) as place:
        client = await place.join("client")
        await client.want(CIDS[:1])
        await client.read_until(lambda messages: DontHave((CIDS[0],)) in messages)


async def test_a_block_that_goes_between_two_look_ups_is_denied() -> None:
    class Going(EndlessStore):
        def size(self, cid: Cid) -> int:
            raise NotFoundError("gone just now")

    async with open_place(Going()) as place:
        client = await place.join("client")
        await client.want(CIDS[:1])
        await client.read_until(lambda messages: DontHave((CIDS[0],)) in messages)


async def test_what_is_cancelled_is_not_read(endless: Place) -> None:
    client = await endless.join("client")
    await client.want(CIDS[:100])
    await wait_all_tasks_blocked()
    await client.cancel(CIDS[:100])
    await client.want([CIDS[200]])
    await client.read_until(lambda _: any(block.cid == CIDS[200] for block in client.blocks))
    store = endless.provider.store
    assert isinstance(store, EndlessStore)
    assert store.reads <= _AT_ONCE + 4


async def test_a_channel_that_ends_in_the_middle_leaves_nothing(endless: Place) -> None:
    client = await endless.join("client")
    await client.want(CIDS[:100])
    await wait_all_tasks_blocked()
    assert 0 < endless.outstanding("client") <= MAX_UPLOAD_BYTES_PER_PEER
    await client.channel.aclose()
    await wait_all_tasks_blocked()
    statistics = endless.server.statistics()
    assert (statistics.channels, statistics.outstanding_by_peer) == (0, {})


# --- limits of the rate --------------------------------------------------------------------------------------------------


async def test_the_limit_holds_and_a_newcomer_is_served_within_a_second_behind_a_hundred_greedy_peers(
    autojump_clock: MockClock,
) -> None:
    rate = 8 * MIB
    async with open_place(EndlessStore(), limit=rate) as place, trio.open_nursery() as nursery:
        greedy = [await place.join(f"greedy {number}") for number in range(100)]
        for client in greedy:
            await client.want(CIDS[:50])
            nursery.start_soon(client.read_to_the_end)
        await trio.sleep(40)
        assert 39 * rate <= place.server.bytes <= 40 * rate + MAX_CODED_BLOCK_BYTES
        assert place.server.statistics().rate == pytest.approx(rate, rel=0.2)
        newcomer = await place.join("newcomer")
        start = trio.current_time()
        await newcomer.fetch(CIDS[:1])
        assert trio.current_time() - start < 1.0
        nursery.cancel_scope.cancel()


# --- lanes ---------------------------------------------------------------------------------------------------------------


class FakeLane:
    """A ``BulkLane`` whose consumers are always connected, and its one open end (``BulkSender``)."""

    def __init__(self) -> None:
        self.source: BulkSource | None = None
        self.want_sender: Callable[[BulkSender], None] = lambda sender: None
        self.queue: list[Cid] = []
        self.received: list[tuple[Cid, bytes]] = []
        self.closed = False

    def offer(self, peer_id: str, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        self.source, self.want_sender = source, want_sender
        return BulkOffer(4002, bytes(32), bytes(32))

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        raise PeerUnreachableError("nobody connects here")

    def send_blocks(self, cids: Sequence[Cid]) -> None:
        self.queue += cids

    def close(self) -> None:
        self.closed = True

    def pump(self, count: int = 1) -> None:
        """Send blocks, as the lane's thread would."""
        assert self.source is not None
        sizes: list[int] = []
        for cid in self.queue[:count]:
            buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
            size = self.source.read_block(cid, buffer)
            if size:
                self.received.append((cid, bytes(buffer[:size])))
            sizes.append(size)
        del self.queue[:count]
        self.source.blocks_sent(sizes)

    def end(self) -> None:
        assert self.source is not None
        self.queue.clear()
        self.source.lane_closed()


async def open_lane(place: Place, lane: FakeLane) -> Client:
    place.provider.context.bulk = lane
    client = await place.join("client")
    client.connection.request_bulk()
    await client.flush()
    await client.read_until(lambda messages: any(isinstance(message, BulkOffered) for message in messages))
    lane.want_sender(lane)
    return client


async def test_blocks_go_over_the_lane_as_it_takes_them_and_nodes_over_the_stream() -> None:
    store, blocks = stored(2 * _AT_ONCE, MIB)
    node = Cid.of_node(b"a node")
    store.write(node, b"a node")
    async with open_place(store) as place:
        lane = FakeLane()
        client = await open_lane(place, lane)
        await client.want([*blocks, node])
        await client.read_until(lambda _: len(client.blocks) == 0)
        await wait_all_tasks_blocked()
        assert lane.queue == list(blocks)[:_AT_ONCE]  # so much may be outstanding
        assert place.outstanding("client") == _AT_ONCE * MIB
        for _ in blocks:
            lane.pump()
        assert lane.received == list(blocks.items())
        await client.read_until(lambda _: bool(client.blocks))
        assert [(block.cid, block.data) for block in client.blocks] == [(node, b"a node")]
        await wait_all_tasks_blocked()
        assert place.outstanding("client") == 0
        assert (place.server.blocks, place.server.bytes) == (len(blocks) + 1, len(blocks) * MIB + 6)


async def test_a_block_that_the_lane_cannot_read_is_denied_on_the_stream() -> None:
    store, blocks = stored(2)
    bad, good = blocks
    store.damage(bad, b"wrong")
    async with open_place(store) as place:
        lane = FakeLane()
        client = await open_lane(place, lane)
        await client.want([bad, good])
        await wait_all_tasks_blocked()
        lane.pump(2)
        await client.read_until(lambda messages: DontHave((bad,)) in messages)
        assert lane.received == [(good, blocks[good])]
        assert place.outstanding("client") == 0


async def test_where_the_lane_ends_blocks_come_over_the_stream() -> None:
    store, blocks = stored(4, MIB)
    cids = list(blocks)
    async with open_place(store) as place:
        lane = FakeLane()
        client = await open_lane(place, lane)
        await client.want(cids)
        await wait_all_tasks_blocked()
        lane.pump()
        lost = list(lane.queue)
        lane.end()
        assert [cid for cid, _ in lane.received] == cids[:1]
        await client.read_until(lambda _: len(client.blocks) == 3 - len(lost))
        await client.fetch(lost)
        assert {block.cid for block in client.blocks} == set(cids[1:])
        await wait_all_tasks_blocked()
        assert place.outstanding("client") == 0


async def test_what_is_wanted_behind_bulk_closed_comes_over_the_stream() -> None:
    """The consumer may see the end of a lane first: what it wants again must not go the same way."""
    store, blocks = stored(3, MIB)
    async with open_place(store) as place:
        lane = FakeLane()
        client = await open_lane(place, lane)
        await client.want(list(blocks))
        await wait_all_tasks_blocked()
        assert lane.queue == list(blocks)
        client.connection.close_bulk()
        await client.fetch(list(blocks))
        assert {block.cid: block.data for block in client.blocks} == blocks
        assert lane.closed
        lane.pump(3)  # its thread had them
        lane.end()
        await wait_all_tasks_blocked()
        assert place.outstanding("client") == 0
        assert place.server.blocks == 3


async def test_behind_bulk_closed_no_lane_opens_and_none_is_offered() -> None:
    store, blocks = stored(1)
    async with open_place(store) as place:
        place.provider.context.bulk = lane = FakeLane()
        client = await place.join("client")
        client.connection.request_bulk()
        client.connection.close_bulk()
        client.connection.request_bulk()
        await client.flush()
        await client.read_until(lambda messages: BulkOffered(0, bytes(32), bytes(32)) in messages)
        lane.want_sender(lane)  # it had redeemed its token
        assert lane.closed
        await client.fetch(list(blocks))
        assert lane.queue == []


async def test_a_lane_ends_with_its_stream_and_one_that_comes_too_late_at_once() -> None:
    async with open_place(EndlessStore()) as place:
        lane = FakeLane()
        client = await open_lane(place, lane)
        await client.want(CIDS[:5])
        await wait_all_tasks_blocked()
        await client.channel.aclose()
        await wait_all_tasks_blocked()
        assert lane.closed
        lane.end()  # the lane's task ends a little later
        assert place.server.statistics().outstanding_by_peer == {}
        late = FakeLane()
        lane.want_sender(late)
        assert late.closed


async def test_a_lane_that_stands_still_holds_little_and_delays_nobody(endless: Place) -> None:
    lane = FakeLane()
    client = await open_lane(endless, lane)
    endless.provider.context.bulk = None
    await client.want(CIDS[:1000])
    await (await endless.join("other")).fetch(CIDS[:50])
    assert endless.outstanding("client") == _AT_ONCE * MIB
    assert len(lane.queue) == _AT_ONCE
