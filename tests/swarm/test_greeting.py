"""Peers that are connected already are asked before anybody is looked up; who has nothing is let go, as if never met."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from p2pkv.artifact.build import ModelDescription
from p2pkv.errors import FetchIncompleteError, NotFoundError, PeerUnreachableError
from p2pkv.exchange.connection import ProviderConnection
from p2pkv.exchange.messages import Query
from p2pkv.formats.cid import Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.limits import MAX_SOURCES
from p2pkv.ports import (
    Buffer,
    BulkOffer,
    BulkReceiver,
    BulkSender,
    BulkSink,
    BulkSource,
    Channel,
    Network,
    PeerAddress,
    PeerId,
)
from p2pkv.swarm import pool
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, Progress
from p2pkv.swarm.target import ManifestTarget, Target
from p2pkv.units import MIB
from sims.network import Link, World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from tests.support.artifacts import KEY, PUBLISHER, Sample, make_sample
from tests.support.sim_town import TOKENS, Town, WatchedRouting, prompt

SAMPLE = make_sample(TOKENS)
SLOW = Link(up=200_000)  # the whole sample takes 0.3 s
FAR = Link(latency_s=0.1)


class SlowlyClosing:
    """A channel whose end takes a while."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.peer_id, self.remote_host = channel.peer_id, channel.remote_host

    async def send(self, data: Buffer) -> None:
        await self._channel.send(data)

    async def receive(self) -> bytes:
        return await self._channel.receive()

    async def aclose(self) -> None:
        await trio.sleep(0.1)
        await self._channel.aclose()


class WatchedNetwork:
    """A node's network that names ``connected`` as its connected peers, and notes whom it opens channels to."""

    def __init__(self, network: Network, connected: Sequence[PeerId]) -> None:
        self._network = network
        self.peer_id = network.peer_id
        self.connected_peers = connected
        self.opened: list[PeerId] = []
        self.opened_at: dict[PeerId, float] = {}
        self.closing: Callable[[Channel], Channel] = lambda channel: channel

    async def open_channel(self, peer: PeerAddress) -> Channel:
        self.opened.append(peer.peer_id)
        self.opened_at.setdefault(peer.peer_id, trio.current_time())
        return self.closing(await self._network.open_channel(peer))

    def set_channel_handler(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        self._network.set_channel_handler(handler)


class Lanes:
    """A ``BulkLane`` that offers in its node's name, and notes whose offers it takes up; nobody gets a lane by it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.taken_up: dict[str, float] = {}

    def offer(self, peer_id: PeerId, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        return BulkOffer(1, self._name.encode().ljust(32), bytes(32))

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        self.taken_up[offer.token.decode().rstrip()] = trio.current_time()
        await trio.lowlevel.checkpoint()
        raise PeerUnreachableError("there is no lane")


class Place:
    """A consumer, whose network and routing are watched, among nodes that it may be connected to."""

    def __init__(self, world: World) -> None:
        self.town = Town(world)
        self.world = world
        self.events: list[tuple[float, FetchEvent]] = []

    @property
    def records(self) -> ProviderRecords:
        return self.town.records

    def holder(self, name: str, sample: Sample = SAMPLE, link: Link | None = None) -> SimNode:
        """A node that has the sample, and has announced nothing."""
        node = self.town.node(name, link=link)
        node.hold(sample.artifact, sample.blocks)
        return node

    def consumer(self, *connected: PeerId) -> SimNode:
        node = self.town.node("c", trusted=[PUBLISHER])
        self.network = node.context.network = WatchedNetwork(node.network, connected)
        self.routing = node.context.routing = WatchedRouting(node.routing)
        return node

    async def fetch(self, consumer: SimNode, target: Target | None = None) -> FetchReport:
        self.started = trio.current_time()
        return await consumer.fetch(target or prompt(), emit=lambda event: self.events.append((trio.current_time(), event)))

    @property
    def told(self) -> str:
        return "\n".join(event.detail for _, event in self.events if isinstance(event, Progress))

    @property
    def matched_at(self) -> float:
        return next(time for time, event in self.events if isinstance(event, Matched))


@pytest.fixture
async def place(autojump_clock: MockClock) -> AsyncIterator[Place]:
    async with open_world() as world:
        yield Place(world)


TARGETS = [pytest.param(prompt(), id="prompt"), pytest.param(ManifestTarget(SAMPLE.cid), id="manifest")]


# --- before look-ups -----------------------------------------------------------------------------------------------------


async def test_what_a_connected_peer_has_is_not_looked_up(autojump_clock: MockClock, place: Place) -> None:
    place.holder("a", link=SLOW)
    target = prompt(shared=600)
    assert (await place.fetch(place.consumer("a"), target)).hit_tokens == 600
    assert trio.current_time() - place.started > 0.2  # there was time for it
    assert not set(place.routing.looked_up) & set(target.lookup_keys)


@pytest.mark.parametrize(("connected", "expected"), [((), 0.0), (("stranger",), 0.03)])
async def test_look_ups_begin_a_little_later_where_somebody_was_greeted(
    autojump_clock: MockClock, place: Place, connected: Sequence[PeerId], expected: float
) -> None:
    place.town.node("stranger")
    await place.town.provider("a", SAMPLE)
    target = prompt()
    assert (await place.fetch(place.consumer(*connected), target)).hit_tokens == 600
    first = [place.routing.looked_up[key][0] for key in target.lookup_keys[: target.hopeful]]
    assert first == pytest.approx([expected] * target.hopeful)


async def test_four_are_greeted_and_rather_those_that_blocks_came_from_lately(autojump_clock: MockClock, place: Place) -> None:
    names = [f"p{number}" for number in range(6)]
    for name in names:
        place.town.node(name)
    consumer = place.consumer(*names)
    for source in ("p1", "p4", "gone", "p2", "p4"):
        consumer.context.note_source(source)
    await place.fetch(consumer)
    assert sorted(place.network.opened) == ["p0", "p1", "p2", "p4"]


async def test_the_first_has_a_head_start(autojump_clock: MockClock, place: Place) -> None:
    names = [place.holder(name, link=SLOW).context.network.peer_id for name in ("p1", "p2", "p3")]
    report = await place.fetch(place.consumer(*names))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.025, 0.025])
    assert len(report.bytes_by_peer) == 3


async def test_a_first_that_says_nothing_is_waited_for_no_longer(autojump_clock: MockClock, place: Place) -> None:
    names = [place.holder(name, link=FAR).context.network.peer_id for name in ("p1", "p2")]
    await place.fetch(place.consumer(*names))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.025])


@pytest.fixture(scope="module")
def large() -> Sample:
    """64 MiB in blocks of 1 MiB."""
    geometry = LayerGeometry(LayerKind.FULL, kv_heads=8, k_dim=128, v_dim=128)
    description = ModelDescription(b"\1" * 32, "large", (geometry,) * 32, Dtype.BF16)
    return make_sample(range(512), description=description)


async def test_the_others_are_not_asked_while_the_first_brings_enough_alone(
    autojump_clock: MockClock, place: Place, large: Sample
) -> None:
    names = [place.holder(name, large, Link(up=600 * MIB)).context.network.peer_id for name in ("p1", "p2", "p3")]
    report = await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert 0.1 < trio.current_time() - place.started < 0.2
    assert place.network.opened == ["p1"]
    assert list(report.bytes_by_peer) == ["p1"]


async def test_the_others_are_asked_when_the_first_is_not_as_fast(
    autojump_clock: MockClock, place: Place, large: Sample
) -> None:
    names = [place.holder(name, large, Link(up=100 * MIB)).context.network.peer_id for name in ("p1", "p2", "p3")]
    report = await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.05, 0.05])
    assert len(report.bytes_by_peer) == 3


async def test_the_others_are_asked_when_the_first_does_not_stay_fast(
    autojump_clock: MockClock, place: Place, large: Sample
) -> None:
    names = [place.holder(name, large, Link(up=200 * MIB)).context.network.peer_id for name in ("p1", "p2")]
    await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.15])


async def test_the_others_are_asked_when_much_is_left(
    autojump_clock: MockClock, place: Place, large: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LOOK_S", 0.02)
    monkeypatch.setattr(pool, "_SOON_S", 0.02)  # so that the sample counts as large
    names = [place.holder(name, large, Link(up=600 * MIB)).context.network.peer_id for name in ("p1", "p2")]
    await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.07])


async def test_the_others_are_asked_when_a_first_that_was_fast_leaves(
    autojump_clock: MockClock, place: Place, large: Sample
) -> None:
    first, *others = [place.holder(name, large, Link(up=600 * MIB)) for name in ("p1", "p2", "p3")]
    names = [node.context.network.peer_id for node in (first, *others)]

    def leave(event: FetchEvent) -> None:
        if isinstance(event, Progress) and event.done_bytes > 16 * MIB and "p1" in place.world.nodes:
            place.world.kill("p1")

    report = await place.consumer(*names).fetch(ManifestTarget(large.cid), emit=leave)
    assert report.complete
    assert set(report.bytes_by_peer) == {"p1", "p2", "p3"}


async def test_the_others_are_greeted_as_soon_as_the_first_has_nothing(autojump_clock: MockClock, place: Place) -> None:
    place.town.node("stranger", link=Link(latency_s=0.001))
    place.holder("a", link=Link(latency_s=0.001))
    await place.fetch(place.consumer("stranger", "a"))
    assert 0 < place.network.opened_at["a"] < 0.025


async def test_whoever_sent_blocks_is_remembered(autojump_clock: MockClock, place: Place) -> None:
    await place.town.provider("a", SAMPLE)
    place.town.node("stranger")
    consumer = place.consumer("stranger")
    await place.fetch(consumer)
    assert list(consumer.context.sources) == ["a"]


async def test_the_latest_sources_are_remembered_and_no_more(autojump_clock: MockClock, place: Place) -> None:
    context = place.consumer().context
    for number in range(MAX_SOURCES + 10):
        context.note_source(str(number))
    assert list(context.sources) == [str(number) for number in range(10, MAX_SOURCES + 10)]


async def test_a_banned_peer_is_not_greeted(autojump_clock: MockClock, place: Place) -> None:
    place.holder("a")
    consumer = place.consumer("a")
    consumer.context.bans.ban("a", trio.current_time())
    assert (await place.fetch(consumer)).hit_tokens == 0
    assert place.network.opened == []
    assert place.routing.looked_up[prompt().lookup_keys[0]] == [0.0]  # nobody is waited for


async def test_a_manifest_that_one_of_its_nodes_refutes_sends_the_look_ups_out_after_all(
    autojump_clock: MockClock, place: Place
) -> None:
    """They had not begun when it was chosen."""
    artifact = SAMPLE.artifact
    segments = artifact.manifest.segments
    envelope = Envelope.sign(replace(artifact.manifest, segments=(segments[1], segments[0], segments[2])), KEY)
    bad = replace(artifact, cid=envelope.cid)
    place.town.node("careless").hold(bad, {**SAMPLE.blocks, envelope.cid: envelope.encode()})
    await place.town.provider("a", SAMPLE)
    report = await place.fetch(place.consumer("careless"), prompt(shared=600))
    assert [refusal.manifest for refusal in report.refusals] == [str(envelope.cid)]
    assert report.hit_tokens == 600


# --- who has nothing -----------------------------------------------------------------------------------------------------


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
