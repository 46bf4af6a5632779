"""Whoever was greeted and has nothing is let go, as if never met, and gets no lane."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from p2pkv.errors import FetchIncompleteError, NotFoundError
from p2pkv.exchange.connection import ProviderConnection
from p2pkv.exchange.messages import Query
from p2pkv.formats.cid import Codec
from p2pkv.ports import (
    Channel,
)
from p2pkv.swarm.report import FetchEvent, Matched
from p2pkv.swarm.target import ManifestTarget, Target
from sims.network import Link, open_world
from tests.support.artifacts import make_sample
from tests.support.greeting import FAR, SAMPLE, SLOW, TARGETS, Lanes, Place, SlowlyClosing
from tests.support.sim_town import TOKENS, prompt


@pytest.fixture
async def place(autojump_clock: MockClock) -> AsyncIterator[Place]:
    async with open_world() as world:
        yield Place(world)


@pytest.mark.parametrize("target", TARGETS)
async def test_whoever_has_nothing_is_let_go_at_once_and_is_neither_found_nor_lost(
    autojump_clock: MockClock, place: Place, target: Target
) -> None:
    stranger = place.town.node("stranger")
    await place.town.provider("a", SAMPLE, link=SLOW)
    consumer = place.consumer("stranger")
    streams: list[int] = []

    def watch(event: FetchEvent) -> None:
        if isinstance(event, Matched):
            streams.append(len(stranger.network.channels))
        place.events.append((trio.current_time(), event))

    report = await consumer.fetch(target, emit=watch)
    assert report.hit_tokens == 600
    assert place.network.opened[0] == "stranger"
    assert streams == [0]
    assert report.peers_lost == 0
    assert "of 2 peers" not in place.told


async def test_a_miss_among_connected_peers_is_a_miss_of_nobody(autojump_clock: MockClock, place: Place) -> None:
    place.town.node("stranger")
    report = await place.fetch(place.consumer("stranger", "ghost"))
    assert set(place.network.opened) == {"stranger", "ghost"}
    assert report.hit_tokens == report.peers_lost == 0
    assert "0 found" in place.told
    assert "1 found" not in place.told
    with pytest.raises(NotFoundError):
        await place.fetch(place.consumer("stranger", "ghost"), ManifestTarget(SAMPLE.cid))


@pytest.mark.parametrize("announced", [False, True])
async def test_whoever_closes_its_stream_is_lost_only_where_it_was_found(
    autojump_clock: MockClock, place: Place, announced: bool
) -> None:
    node = await place.town.provider("a", SAMPLE) if announced else place.town.node("a")

    async def close(channel: Channel) -> None:
        await channel.send(ProviderConnection("peer").data_to_send())
        await trio.sleep(0.005)

    node.network.set_channel_handler(close)
    assert (await place.fetch(place.consumer("a"))).peers_lost == (1 if announced else 0)
    assert place.network.opened == ["a"] * (2 if announced else 1)


async def test_whoever_matched_was_found(autojump_clock: MockClock, place: Place) -> None:
    place.holder("a", make_sample(TOKENS[:512]))
    await place.fetch(place.consumer("a"), prompt())
    assert "1 found" in place.told


@pytest.mark.parametrize("target", TARGETS)
async def test_whoever_gets_something_meanwhile_is_met_anew_when_a_look_up_finds_it(
    autojump_clock: MockClock, place: Place, target: Target
) -> None:
    """Also while its first stream is not quite closed."""
    late = place.town.node("late", link=SLOW)
    consumer = place.consumer("late")
    place.network.closing = SlowlyClosing
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            await trio.sleep(0.01)
            late.hold(SAMPLE.artifact, SAMPLE.blocks)
            await late.announce(SAMPLE.artifact)

        report = await place.fetch(consumer, target)
    assert place.network.opened == ["late", "late"]
    assert report.hit_tokens == 600
    assert report.peers_lost == 0


@pytest.mark.parametrize("target", TARGETS)
async def test_whoever_was_let_go_is_not_asked_while_its_stream_is_closed(
    autojump_clock: MockClock, place: Place, target: Target
) -> None:
    place.town.node("stranger")
    await place.town.provider("a", SAMPLE, link=SLOW)
    consumer = place.consumer("stranger")
    place.network.closing = SlowlyClosing
    assert (await place.fetch(consumer, target)).hit_tokens == 600


async def test_an_answer_in_one_piece_with_the_hello_lets_go_too(autojump_clock: MockClock, place: Place) -> None:
    closed_at: list[float] = []

    async def answer_at_once(channel: Channel) -> None:
        connection = ProviderConnection("peer")
        hello = connection.data_to_send()
        while data := await channel.receive():
            for message in connection.receive_data(data):
                if isinstance(message, Query):
                    connection.answer(message.request, [])
                    await channel.send(hello + connection.data_to_send())
        closed_at.append(trio.current_time())

    place.town.node("quick").network.set_channel_handler(answer_at_once)
    await place.town.provider("a", SAMPLE, link=SLOW)
    assert (await place.fetch(place.consumer("quick"))).hit_tokens == 600
    assert closed_at[0] < place.matched_at


async def test_a_connected_peer_that_hangs_is_let_go(autojump_clock: MockClock, place: Place) -> None:
    closed_at: list[float] = []

    async def hang(channel: Channel) -> None:
        while await channel.receive():
            pass
        closed_at.append(trio.current_time() - place.started)

    place.town.node("hanging").network.set_channel_handler(hang)
    await place.town.provider("a", SAMPLE, link=Link(up=50_000))
    assert (await place.fetch(place.consumer("hanging"))).hit_tokens == 600
    assert closed_at == pytest.approx([0.5])


async def test_whoever_gave_something_may_deny_something(autojump_clock: MockClock, place: Place) -> None:
    """It is not let go: all that it has is fetched."""
    raw = [cid for cid in SAMPLE.blocks if cid.codec is Codec.RAW]
    node = place.town.node("a")
    node.hold(SAMPLE.artifact, {cid: data for cid, data in SAMPLE.blocks.items() if cid != raw[-1]})
    with pytest.raises(FetchIncompleteError, match="2 of 3 segments"):
        await place.fetch(place.consumer("a"), ManifestTarget(SAMPLE.cid))
    assert place.network.opened == ["a"]


async def test_a_miss_does_not_wait_long_for_a_connected_peer_that_hangs(autojump_clock: MockClock, place: Place) -> None:
    hanging = place.town.node("hanging")
    hanging.network.freeze()
    report = await place.fetch(place.consumer("hanging"))
    assert report.peers_lost == 0
    assert trio.current_time() - place.started == pytest.approx(0.5)


async def test_a_connected_peer_that_is_slow_is_waited_for_where_a_look_up_finds_it(
    autojump_clock: MockClock, place: Place
) -> None:
    await place.town.provider("a", SAMPLE, link=Link(latency_s=0.4))
    report = await place.fetch(place.consumer("a"))
    assert report.hit_tokens == 600


# --- lanes ---------------------------------------------------------------------------------------------------------------


async def test_whoever_has_nothing_gets_no_lane(autojump_clock: MockClock, place: Place) -> None:
    stranger = place.town.node("stranger", link=FAR)
    provider = await place.town.provider("a", SAMPLE, link=FAR)
    consumer = place.consumer("stranger")
    for node in (stranger, provider, consumer):
        node.context.bulk = Lanes(node.network.peer_id)
    assert (await place.fetch(consumer)).hit_tokens == 600
    assert isinstance(consumer.context.bulk, Lanes)
    assert set(consumer.context.bulk.taken_up) == {"a"}


@pytest.mark.parametrize("greeted", [True, False])
async def test_a_lane_is_opened_at_hello_or_where_it_was_greeted_when_the_manifest_is_chosen(
    autojump_clock: MockClock, place: Place, greeted: bool
) -> None:
    names = ["a", "b"]
    nodes = [place.holder(name, link=FAR) for name in names]
    if not greeted:
        for node in nodes:
            await node.announce(SAMPLE.artifact)
    consumer = place.consumer(*(names if greeted else ()))
    for node in (*nodes, consumer):
        node.context.bulk = Lanes(node.network.peer_id)
    assert (await place.fetch(consumer)).hit_tokens == 600
    assert isinstance(consumer.context.bulk, Lanes)
    assert set(consumer.context.bulk.taken_up) == set(names)
    late = [time > place.matched_at for time in consumer.context.bulk.taken_up.values()]
    assert late == [greeted] * 2
