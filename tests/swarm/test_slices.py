"""Slices of an artifact, and segments in order, over simulated nodes in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import pytest
import trio
from trio.testing import MockClock

from p2pkv.artifact.slice import WHOLE, Slice
from p2pkv.errors import FetchIncompleteError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, Progress, SegmentReady
from p2pkv.swarm.target import ManifestTarget, PromptTarget, Target
from sims.content import Content, make_content
from sims.network import Link, World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from tests.support.artifacts import PUBLISHER, Sample, make_sample, model

LAYERS = 4
SAMPLE = make_sample(list(range(600)), description=model(layers=LAYERS))
NODES = SAMPLE.artifact.manifest.segments
WHOLE_LAYERS = range(LAYERS)


def blocks_of(index: int, layers: range = WHOLE_LAYERS) -> list[Cid]:
    segment = SAMPLE.artifact.open_segment(index, SAMPLE.blocks[NODES[index]])
    return [ref.cid for layer in layers for ref in segment.layers[layer]]


def size_of(cids: Collection[Cid]) -> int:
    return sum(len(SAMPLE.blocks[cid]) for cid in cids)


class Town:
    def __init__(self, world: World) -> None:
        self.world, self.records = world, ProviderRecords()

    def consumer(self, *, here: Collection[Cid] = ()) -> SimNode:
        """A node that trusts the publisher and has the blocks that are ``here``, without knowing of what they are."""
        node = SimNode(self.world, self.records, "c", trusted=[PUBLISHER])
        for cid in here:
            node.store.write(cid, SAMPLE.blocks[cid])
        return node

    async def provider(self, sample: Sample | Content, *, without: Collection[Cid] = (), link: Link | None = None) -> SimNode:
        node = SimNode(self.world, self.records, "p", link=link)
        node.hold(sample.artifact, {cid: data for cid, data in sample.blocks.items() if cid not in without})
        await node.announce(sample.artifact)
        return node


@pytest.fixture
async def town(autojump_clock: MockClock) -> AsyncIterator[Town]:
    async with open_world() as world:
        yield Town(world)


def slice_of(segments: int | None = None, layers: range | None = None) -> ManifestTarget:
    return ManifestTarget(SAMPLE.cid, Slice(segments, layers))


def held(node: SimNode) -> set[int]:
    """Which segments a node says that it holds."""
    (match,) = node.catalog.match(list(SAMPLE.artifact.chain_keys))
    return {index for index in range(3) if match.holds(index)}


def reach(report: FetchReport) -> tuple[int, int, range | None, bool]:
    return report.segments, report.hit_tokens, report.layers, report.complete


async def test_some_layers_and_nothing_else_are_fetched(autojump_clock: MockClock, town: Town) -> None:
    await town.provider(SAMPLE)
    consumer, events, layers = town.consumer(), list[FetchEvent](), range(1, 3)
    report = await consumer.fetch(slice_of(layers=layers), emit=events.append)
    assert reach(report) == (3, 600, layers, False)
    wanted = [cid for index in range(3) for cid in blocks_of(index, layers)]
    assert report.bytes_by_peer == {"p": size_of([SAMPLE.cid, *NODES, *wanted])}
    told = {event.index: event.blocks for event in events if isinstance(event, SegmentReady)}
    assert told == {index: (NODES[index], *blocks_of(index, layers)) for index in range(3)}
    (*_, done) = [event for event in events if isinstance(event, Progress)]
    assert (done.done_bytes, done.total_bytes) == (size_of(wanted), size_of(wanted))
    assert {cid for cid in SAMPLE.blocks if consumer.store.has(cid)} == {SAMPLE.cid, *NODES, *wanted}


async def test_the_first_segments_and_nothing_else_are_fetched(autojump_clock: MockClock, town: Town) -> None:
    await town.provider(SAMPLE)
    consumer, events = town.consumer(), list[FetchEvent]()
    report = await consumer.fetch(slice_of(segments=2), emit=events.append)
    assert reach(report) == (2, 512, WHOLE_LAYERS, False)
    assert [(event.hit_tokens, event.segments) for event in events if isinstance(event, Matched)] == [(512, 2)]
    fetched = [SAMPLE.cid, *NODES[:2], *blocks_of(0), *blocks_of(1)]
    assert report.bytes_by_peer == {"p": size_of(fetched)}
    assert held(consumer) == {0, 1}


async def test_a_segment_of_which_some_layers_are_here_is_not_held(autojump_clock: MockClock, town: Town) -> None:
    """To claim it would let others ask for what is not here, and match prompts that it cannot serve."""
    await town.provider(SAMPLE)
    consumer = town.consumer()
    await consumer.fetch(slice_of(layers=range(3)))
    assert held(consumer) == set()
    await consumer.fetch(slice_of(segments=1, layers=range(3, 4)))
    assert held(consumer) == {0}


async def test_what_is_held_stays_held(autojump_clock: MockClock, town: Town) -> None:
    await town.provider(SAMPLE)
    consumer = town.consumer()
    assert reach(await consumer.fetch(slice_of())) == (3, 600, WHOLE_LAYERS, True)
    assert reach(await consumer.fetch(slice_of(1, range(1)))) == (1, 256, range(1), False)
    assert held(consumer) == {0, 1, 2}


async def test_the_rest_is_fetched_later_and_makes_it_whole(autojump_clock: MockClock, town: Town) -> None:
    await town.provider(SAMPLE)
    consumer = town.consumer()
    first = await consumer.fetch(slice_of(2, range(2)))
    here = [cid for index in range(2) for cid in blocks_of(index, range(2))]
    second = await consumer.fetch(slice_of())
    assert reach(second) == (3, 600, WHOLE_LAYERS, True)
    assert second.local_bytes == size_of(here)
    assert sum(first.bytes_by_peer.values()) + sum(second.bytes_by_peer.values()) == size_of(SAMPLE.blocks)
    assert held(consumer) == {0, 1, 2}


async def test_the_last_layers_make_an_artifact_whole_too(autojump_clock: MockClock, town: Town) -> None:
    await town.provider(SAMPLE)
    consumer = town.consumer()
    whole = [(await consumer.fetch(slice_of(layers=range(layer, layer + 1)))).complete for layer in WHOLE_LAYERS]
    assert whole == [False, False, False, True]
    assert held(consumer) == {0, 1, 2}


@pytest.mark.parametrize("wanted", [Slice(layers=range(2)), Slice(segments=2)])
async def test_a_slice_that_stays_incomplete_is_an_error(autojump_clock: MockClock, town: Town, wanted: Slice) -> None:
    await town.provider(SAMPLE, without=blocks_of(1, range(1, 2)))
    consumer = town.consumer()
    with pytest.raises(FetchIncompleteError, match=f"1 of {wanted.segments or 3} segments"):
        await consumer.fetch(ManifestTarget(SAMPLE.cid, wanted))
    assert held(consumer) == ({0} if wanted.layers is None else set())


@pytest.mark.parametrize("wanted", [Slice(layers=range(1)), Slice(segments=1)])
async def test_what_lacks_outside_of_the_slice_is_no_matter(autojump_clock: MockClock, town: Town, wanted: Slice) -> None:
    await town.provider(SAMPLE, without=blocks_of(1, range(1, 2)))
    assert (await town.consumer().fetch(ManifestTarget(SAMPLE.cid, wanted))).segments == (wanted.segments or 3)


@pytest.mark.parametrize("wanted", [Slice(segments=4), Slice(layers=range(3, 5))])
async def test_a_slice_that_the_artifact_has_not_is_the_callers_doing(
    autojump_clock: MockClock, town: Town, wanted: Slice
) -> None:
    await town.provider(SAMPLE)
    with pytest.raises(UsageError):
        await town.consumer().fetch(ManifestTarget(SAMPLE.cid, wanted))


@pytest.mark.parametrize("layers", [None, range(8)])
async def test_a_long_fetch_of_some_layers_is_not_shared(autojump_clock: MockClock, town: Town, layers: range | None) -> None:
    """Nobody is sent for an artifact to a node that will have parts of its segments alone."""
    content = make_content(32, seed=1)
    await town.provider(content, link=Link(up=1_000_000))
    consumer = town.consumer()
    shared: list[object] = []
    consumer.context.share = shared.append
    await consumer.fetch(ManifestTarget(content.artifact.cid, Slice(layers=layers)))
    assert bool(shared) is (layers is None)


# --- order ----------------------------------------------------------------------------------------------------------------


PROMPT = (*range(600), 7, 7)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("by_manifest", [False, True])
async def test_segments_are_handed_over_at_once_or_in_order(
    autojump_clock: MockClock, town: Town, by_manifest: bool, in_order: bool
) -> None:
    """The last segment is here; the first one comes slowly."""
    await town.provider(SAMPLE, link=Link(up=20_000))
    consumer = town.consumer(here=[SAMPLE.cid, *NODES, *blocks_of(1), *blocks_of(2)])
    prompt = PromptTarget(model().model_id, model().dtype, PROMPT, in_order=in_order)
    target: Target = ManifestTarget(SAMPLE.cid, WHOLE, in_order) if by_manifest else prompt
    handed: list[int] = []
    arrived: list[bool] = []

    def hear(event: FetchEvent) -> None:
        if isinstance(event, SegmentReady):
            handed.append(event.index)
            arrived.append(all(consumer.store.has(cid) for cid in blocks_of(0)))

    assert (await consumer.fetch(target, emit=hear)).hit_tokens == 600
    assert handed == ([0, 1, 2] if in_order else [1, 2, 0])
    assert arrived == ([True] * 3 if in_order else [False, False, True])


@pytest.mark.parametrize("in_order", [False, True])
async def test_what_is_handed_over_in_order_is_fetched_in_order(autojump_clock: MockClock, town: Town, in_order: bool) -> None:
    """Otherwise the first segment is there when nearly all of the artifact is."""
    content = make_content(64, seed=1)
    await town.provider(content, link=Link(up=4_000_000))
    times: list[float] = []

    def hear(event: FetchEvent) -> None:
        if isinstance(event, SegmentReady):
            times.append(trio.current_time())

    started = trio.current_time()
    await town.consumer().fetch(ManifestTarget(content.artifact.cid, WHOLE, in_order), emit=hear)
    share = (times[0] - started) / (times[-1] - started)
    assert (share < 0.4) if in_order else (share > 0.6)
