"""Peers that are connected already are asked before anybody is looked up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from p2pkv.artifact.build import ModelDescription
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.limits import MAX_SOURCES
from p2pkv.ports import (
    PeerId,
)
from p2pkv.swarm import pool
from p2pkv.swarm.report import FetchEvent, Progress
from p2pkv.swarm.target import ManifestTarget
from p2pkv.units import MIB
from sims.network import Link, open_world
from tests.support.artifacts import KEY, Sample, make_sample
from tests.support.greeting import FAR, SAMPLE, SLOW, Place
from tests.support.sim_town import prompt


@pytest.fixture
async def place(autojump_clock: MockClock) -> AsyncIterator[Place]:
    async with open_world() as world:
        yield Place(world)


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
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.05, 0.05])
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
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.075, 0.075])
    assert len(report.bytes_by_peer) == 3


async def test_a_first_that_is_faster_than_a_gigabit_is_looked_at_a_little_longer(
    autojump_clock: MockClock, place: Place, large: Sample
) -> None:
    names = [place.holder(name, large, Link(up=300 * MIB)).context.network.peer_id for name in ("p1", "p2")]
    await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.1])


async def test_a_first_that_begins_late_has_another_look(autojump_clock: MockClock, place: Place, large: Sample) -> None:
    """Hello and manifest take until after its head start, and it brings enough then."""
    link = Link(up=600 * MIB, latency_s=0.002)
    names = [place.holder(name, large, link).context.network.peer_id for name in ("p1", "p2")]
    await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert place.network.opened == ["p1"]


@pytest.mark.parametrize(("seconds", "asked"), [(0.06, False), (0.3, True)])
async def test_the_others_are_asked_when_the_first_does_not_stay_fast(
    autojump_clock: MockClock, place: Place, large: Sample, nursery: trio.Nursery, seconds: float, asked: bool
) -> None:
    """And not for one poor moment: of 0.1 s it sends nothing for half and more."""
    first, other = (place.holder(name, large, Link(up=600 * MIB)) for name in ("p1", "p2"))

    async def be_slow() -> None:
        first.network.up.rate = 40 * MIB
        await trio.sleep(seconds)
        first.network.up.rate = 600 * MIB

    def slow_down(event: FetchEvent) -> None:
        if isinstance(event, Progress) and event.done_bytes > 24 * MIB and first.network.up.rate == 600 * MIB and not slowed:
            slowed.append(True)
            nursery.start_soon(be_slow)

    slowed: list[bool] = []
    consumer = place.consumer(*(node.context.network.peer_id for node in (first, other)))
    report = await consumer.fetch(ManifestTarget(large.cid), emit=slow_down)
    assert report.complete
    assert slowed
    assert ("p2" in place.network.opened) is asked


async def test_the_others_are_asked_when_much_is_left(
    autojump_clock: MockClock, place: Place, large: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LOOK_S", 0.02)
    monkeypatch.setattr(pool, "_SOON_S", 0.02)  # so that the sample counts as large
    names = [place.holder(name, large, Link(up=600 * MIB)).context.network.peer_id for name in ("p1", "p2")]
    await place.fetch(place.consumer(*names), ManifestTarget(large.cid))
    assert list(place.network.opened_at.values()) == pytest.approx([0.0, 0.045])


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
