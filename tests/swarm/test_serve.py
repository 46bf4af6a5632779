"""The provider's driver over memory channels in virtual time: who is served what, and what hostile peers can do to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pkv.artifact.match import Match
from p2pkv.errors import NotFoundError, PeerUnreachableError, StoreError
from p2pkv.exchange.connection import BULK, ConsumerConnection
from p2pkv.exchange.messages import (
    Block,
    BulkOffered,
    Cancel,
    DontHave,
    ErrorMessage,
    Have,
    Matches,
    Message,
    Query,
    WantBlocks,
    encode,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    MAX_CODED_BLOCK_BYTES,
    MAX_QUERIES_AT_ONCE,
    MAX_STREAMS_PER_PEER,
    MAX_UPLOAD_BYTES_PER_PEER,
    MAX_WANTS_PER_PEER,
)
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender, BulkSink, BulkSource, Channel, PeerAddress
from p2pkv.swarm.serve import Server
from p2pkv.units import KIB, MIB
from sims.network import World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from sims.store import MemoryBlockStore

T = TypeVar("T")

DEADLINE_S = 100.0  # of virtual time
CIDS = [Cid.of_block(number.to_bytes(2, "big")) for number in range(MAX_WANTS_PER_PEER + 1)]


class EndlessStore(MemoryBlockStore):
    """Holds every CID that anybody asks for, as ``block_bytes`` zeros, and counts what is read."""

    def __init__(self, block_bytes: int = MIB) -> None:
        super().__init__()
        self.block_bytes = block_bytes
        self.reads = 0

    def has(self, cid: Cid) -> bool:
        return True

    def size(self, cid: Cid) -> int:
        return self.block_bytes

    def read_into(self, cid: Cid, buffer: memoryview) -> int:
        self.reads += 1
        return self.block_bytes


class Place:
    """A provider and whoever connects to it."""

    def __init__(self, world: World, provider: SimNode) -> None:
        self.world = world
        self.provider = provider

    @property
    def server(self) -> Server:
        return self.provider.server

    async def channel(self, peer: str) -> Channel:
        """Open one more channel of ``peer``."""
        node = self.world.nodes.get(peer) or self.world.add_node(peer)
        return await node.open_channel(PeerAddress("provider"))

    async def join(self, peer: str) -> Client:
        client = Client(await self.channel(peer))
        await client.flush()
        return client

    def outstanding(self, peer: str) -> int:
        return self.server.statistics().outstanding_by_peer.get(peer, 0)


class Client:
    """An honest end of a channel, unless a test sends bytes of its own."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.connection = ConsumerConnection("client", frozenset({BULK}))
        self.messages: list[Message] = []

    async def flush(self) -> None:
        await self.channel.send(self.connection.data_to_send())

    async def want(self, cids: Sequence[Cid]) -> None:
        self.connection.want(cids)
        await self.flush()

    async def cancel(self, cids: Sequence[Cid]) -> None:
        self.connection.cancel(cids)
        await self.flush()

    async def read_until(self, condition: Callable[[list[Message]], bool]) -> None:
        """Read until ``condition`` holds of all messages so far."""
        with trio.fail_after(DEADLINE_S):
            while not condition(self.messages):
                data = await self.channel.receive()
                assert data, "the provider closed the channel"
                self.messages += self.connection.receive_data(data)

    async def fetch(self, cids: Sequence[Cid]) -> None:
        """Want blocks and read until all of them are here."""
        count = len(self.blocks) + len(cids)
        await self.want(cids)
        await self.read_until(lambda _: len(self.blocks) >= count)

    async def read_to_the_end(self) -> list[Message]:
        with trio.fail_after(DEADLINE_S):
            while data := await self.channel.receive():
                self.messages += self.connection.receive_data(data)
        return self.messages

    @property
    def blocks(self) -> list[Block]:
        return [message for message in self.messages if isinstance(message, Block)]


@asynccontextmanager
async def open_place(store: MemoryBlockStore | None = None, *, limit: float | None = None) -> AsyncIterator[Place]:
    async with open_world() as world:
        provider = SimNode(world, ProviderRecords(), "provider", store=store)
        if limit is not None:
            provider.server = Server(provider.context, limit=limit)
            provider.network.set_channel_handler(provider.server.serve)
        world.nursery.start_soon(provider.server.run)
        yield Place(world, provider)


@pytest.fixture
async def endless() -> AsyncIterator[Place]:
    async with open_place(EndlessStore()) as place:
        yield place


def stored(count: int, size: int = 64 * KIB) -> tuple[MemoryBlockStore, dict[Cid, bytes]]:
    store = MemoryBlockStore()
    blocks = {Cid.of_block(data): data for data in (bytes([number]) * size for number in range(count))}
    for cid, data in blocks.items():
        store.write(cid, data)
    return store, blocks


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
    assert store.reads <= 6


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
    store, blocks = stored(8, MIB)
    node = Cid.of_node(b"a node")
    store.write(node, b"a node")
    async with open_place(store) as place:
        lane = FakeLane()
        client = await open_lane(place, lane)
        await client.want([*blocks, node])
        await client.read_until(lambda _: len(client.blocks) == 0)
        await wait_all_tasks_blocked()
        assert lane.queue == list(blocks)[:2]  # so much may be outstanding
        assert place.outstanding("client") == 2 * MIB
        for _ in blocks:
            lane.pump()
        assert lane.received == list(blocks.items())
        await client.read_until(lambda _: bool(client.blocks))
        assert [(block.cid, block.data) for block in client.blocks] == [(node, b"a node")]
        await wait_all_tasks_blocked()
        assert place.outstanding("client") == 0
        assert (place.server.blocks, place.server.bytes) == (9, 8 * MIB + 6)


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
    assert endless.outstanding("client") == 2 * MIB
    assert len(lane.queue) == 2


# --- hostile peers -------------------------------------------------------------------------------------------------------


async def rage(client: Client, data: bytes) -> None:
    """Send ``data`` again and again, and read nothing, until the provider has had enough."""
    while True:
        try:
            await client.channel.send(data)
        except PeerUnreachableError:
            return


async def serves_on(place: Place, peer: str = "honest") -> None:
    """An honest peer gets fifty blocks."""
    client = await place.join(peer)
    await client.fetch(CIDS[:50])
    await client.channel.aclose()


async def test_an_endless_want_list_is_refused_with_a_code(endless: Place) -> None:
    hostile = await endless.join("hostile")
    for start in range(0, 2 * len(CIDS), 256):
        await hostile.want([Cid.of_block(number.to_bytes(4, "big")) for number in range(start, start + 256)])
    messages = await hostile.read_to_the_end()
    assert isinstance(messages[-1], ErrorMessage)
    assert messages[-1].code == "wire.protocol"
    assert endless.server.refused == 1
    assert endless.server.statistics().outstanding_by_peer == {}
    await serves_on(endless)


async def test_want_lists_are_bounded_over_all_streams_of_a_peer(endless: Place) -> None:
    for _ in range(4):
        client = await endless.join("hostile")
        await client.want(CIDS[:1000])
    await wait_all_tasks_blocked()
    assert endless.server.refused == 0
    one_more = await endless.join("hostile")
    await one_more.want(CIDS[:1000])
    assert (await one_more.read_to_the_end())[-1] == ErrorMessage("wire.protocol", "more than 4096 wants outstanding")
    await serves_on(endless)


async def test_wants_sent_again_for_ever_are_one_want_each(endless: Place) -> None:
    hostile = await endless.join("hostile")
    for _ in range(2000):
        await hostile.channel.send(encode(WantBlocks(tuple(CIDS[:10]))))
    await wait_all_tasks_blocked()
    store = endless.provider.store
    assert isinstance(store, EndlessStore)
    assert store.reads <= 4  # the transport's window holds one, two are outstanding
    assert endless.outstanding("hostile") <= MAX_UPLOAD_BYTES_PER_PEER
    await serves_on(endless)


async def test_wants_for_what_is_not_here_are_answered_as_long_as_answers_are_read() -> None:
    async with open_place() as place:
        hostile = await place.join("hostile")
        await rage(hostile, encode(WantBlocks(tuple(CIDS[:1000]))))
        assert place.server.refused == 1
        reader = await place.join("reader")
        for _ in range(100):
            count = len(reader.messages)
            await reader.want(CIDS[:1000])
            await reader.read_until(lambda messages, count=count: len(messages) > count)  # type: ignore[misc]
        assert place.server.refused == 1


@pytest.mark.parametrize(
    "storm",
    [
        pytest.param(encode(Cancel(())) * 10_000, id="of nothing"),
        pytest.param(encode(Cancel(tuple(CIDS[:1000]))) * 2, id="of what was not wanted"),
        pytest.param((encode(WantBlocks(tuple(CIDS[:20]))) + encode(Cancel(tuple(CIDS[:20])))) * 50, id="of what was"),
    ],
)
async def test_a_storm_of_cancels_is_weathered(endless: Place, storm: bytes) -> None:
    hostile = await endless.join("hostile")

    async def blow() -> None:
        for _ in range(20):
            await hostile.channel.send(storm)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(blow)
        await serves_on(endless)
    await wait_all_tasks_blocked()
    store = endless.provider.store
    assert isinstance(store, EndlessStore)
    assert store.reads <= 50 + 4
    assert endless.outstanding("hostile") <= MAX_UPLOAD_BYTES_PER_PEER


async def test_much_that_arrives_at_once_is_taken_in_pieces(endless: Place) -> None:
    """Others get a turn in between, however many messages it is."""
    hostile = await endless.join("hostile")
    await wait_all_tasks_blocked()
    turns = 0

    async def look() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    storm = encode(Cancel(())) * 130_000  # 10 pieces of the twin
    await hostile.channel.send(storm)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await hostile.want(CIDS[:1])
        await hostile.read_until(lambda _: bool(hostile.blocks))
        nursery.cancel_scope.cancel()
    assert turns >= 40


async def test_a_peer_that_reads_nothing_holds_little_and_delays_nobody(endless: Place) -> None:
    slow = [await endless.join(f"slow {number}") for number in range(50)]
    for client in slow:
        await client.want(CIDS[:50])
    await wait_all_tasks_blocked()
    store = endless.provider.store
    assert isinstance(store, EndlessStore)
    assert store.reads <= 50 * 3
    await serves_on(endless)
    assert all(endless.outstanding(f"slow {number}") <= MAX_UPLOAD_BYTES_PER_PEER for number in range(50))


async def test_two_hundred_connections_of_one_peer_are_eight_and_one_share(autojump_clock: MockClock) -> None:
    async with open_place(EndlessStore(), limit=8 * MIB) as place, trio.open_nursery() as nursery:
        clients = [Client(await place.channel("many")) for _ in range(200)]
        await wait_all_tasks_blocked()
        statistics = place.server.statistics()
        assert (statistics.channels, statistics.refused) == (MAX_STREAMS_PER_PEER, 200 - MAX_STREAMS_PER_PEER)
        for client in clients[:MAX_STREAMS_PER_PEER]:
            await client.want(CIDS[:400])
            nursery.start_soon(client.read_to_the_end)
        one = await place.join("one")
        await one.want(CIDS[:400])
        nursery.start_soon(one.read_to_the_end)
        await trio.sleep(20)
        many = sum(len(client.blocks) for client in clients)
        assert abs(many - len(one.blocks)) <= 4
        await serves_on(place)
        nursery.cancel_scope.cancel()


class SlowCatalog:
    """Counts how many look-ups run at once; each takes a while."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    async def offload(self, work: Callable[[], T]) -> T:
        self.running += 1
        self.most = max(self.most, self.running)
        await trio.sleep(0.01)
        self.running -= 1
        return work()


async def test_a_storm_of_queries_is_looked_up_one_by_one_and_ends_where_answers_are_not_read(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_place(EndlessStore()) as place:
        catalog = SlowCatalog()
        place.provider.context.offload = catalog.offload
        matches = [Match(CIDS[0], 1, 1, b"\x01")] * 16
        monkeypatch.setattr(place.provider.catalog, "match", lambda keys: matches)
        hostile = [await place.join("hostile") for _ in range(MAX_STREAMS_PER_PEER)]
        async with trio.open_nursery() as nursery:
            for client in hostile:
                nursery.start_soon(rage, client, encode(Query(1, (bytes(32),))) * 100)
            await trio.sleep(1)
            assert catalog.most == 1
            others = [await place.join(f"honest {number}") for number in range(20)]
            for other in others:
                other.connection.query([bytes(32)])
                await other.flush()
            for other in others:
                await other.read_until(lambda messages: any(isinstance(message, Matches) for message in messages))
            assert catalog.most == MAX_QUERIES_AT_ONCE
        assert place.server.refused == len(hostile)


async def test_a_peer_of_another_protocol_is_refused_with_a_code(endless: Place) -> None:
    hostile = Client(await endless.channel("hostile"))
    await hostile.channel.send(b"GET / HTTP/1.1\r\n\r\n")
    (_, error) = await hostile.read_to_the_end()
    assert isinstance(error, ErrorMessage)
    assert error.code == "wire.protocol"
    assert endless.server.refused == 1
