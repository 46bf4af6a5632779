"""What hostile peers can do to a provider: be refused with a code, or hold little, while others are served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pkv.artifact.match import Match
from p2pkv.errors import PeerUnreachableError
from p2pkv.exchange.messages import (
    Cancel,
    ErrorMessage,
    Matches,
    Query,
    WantBlocks,
    encode,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    MAX_QUERIES_AT_ONCE,
    MAX_STREAMS_PER_PEER,
    MAX_UPLOAD_BYTES_PER_PEER,
)
from p2pkv.units import MIB
from tests.support.serving import CIDS, Client, EndlessStore, Place, open_place, serves_on

T = TypeVar("T")


@pytest.fixture
async def endless() -> AsyncIterator[Place]:
    async with open_place(EndlessStore()) as place:
        yield place


async def rage(client: Client, data: bytes) -> None:
    """Send ``data`` again and again, and read nothing, until the provider has had enough."""
    while True:
        try:
            await client.channel.send(data)
        except PeerUnreachableError:
            return


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
