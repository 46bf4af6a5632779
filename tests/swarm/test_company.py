"""Fetches that take long find more providers while they run, and are found; partial providers are used for what they have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import trio
from trio.testing import MockClock

from p2pkv.errors import FetchIncompleteError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched
from p2pkv.swarm.target import ManifestTarget, PromptTarget
from sims.content import MODEL, PUBLISHER, Content, make_content
from sims.network import Link, World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from tests.support.sim_town import WatchedRouting

LINK = Link(up=4_000_000, latency_s=0.005)
SLOW = Link(up=1_000_000, latency_s=0.005)


@pytest.fixture(scope="module")
def content() -> Content:
    return make_content(64, seed=3)


class Town:
    def __init__(self, world: World, content: Content) -> None:
        self.world, self.content, self.records = world, content, ProviderRecords()
        self.reports: dict[str, FetchReport] = {}

    def node(self, name: str, *, link: Link = LINK, mirror: bool = True, seed: int = 0) -> SimNode:
        return SimNode(self.world, self.records, name, seed=seed, trusted=[PUBLISHER], link=link, mirror=mirror)

    def holder(self, name: str, *, segments: int = 4, link: Link = LINK) -> SimNode:
        """A node that holds the first ``segments`` of four segments, and all nodes."""
        node, artifact = self.node(name, link=link), self.content.artifact
        kept = {
            ref.cid
            for index in range(segments)
            for ref in artifact.open_segment(index, self.content.blocks[artifact.manifest.segments[index]]).blocks()
        }
        here = {cid: data for cid, data in self.content.blocks.items() if cid.codec is not Codec.RAW or cid in kept}
        node.hold(artifact, here, segments=segments)
        return node

    async def fetch(self, node: SimNode) -> None:
        """Let ``node`` fetch the whole artifact as a prompt's."""
        tokens = self.content.token_ids
        target = PromptTarget(MODEL.model_id, MODEL.dtype, (*tokens, 0), len(tokens))
        self.reports[node.network.peer_id] = await node.fetch(target)


@pytest.fixture
async def town(autojump_clock: MockClock, content: Content) -> AsyncIterator[Town]:
    async with open_world() as world:
        yield Town(world, content)


async def test_a_provider_that_appears_is_used(autojump_clock: MockClock, town: Town) -> None:
    await town.holder("a").announce(town.content.artifact)
    late = town.holder("late")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(town.fetch, town.node("c"))
        await trio.sleep(1.2)
        await late.announce(town.content.artifact)
    assert town.reports["c"].bytes_by_peer["late"] > town.content.data_bytes / 5


@pytest.mark.parametrize("mirror", [True, False])
async def test_mirrors_that_fetch_at_the_same_time_help_each_other(
    autojump_clock: MockClock, town: Town, mirror: bool
) -> None:
    """Where neither is announced, neither asks the other first."""
    publisher = town.holder("publisher", link=SLOW)
    await publisher.announce(town.content.artifact)
    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(town.fetch, town.node(f"c{number}", mirror=mirror, seed=number))
    sent = publisher.network.sent_bytes / town.content.data_bytes
    assert (sent < 1.4) if mirror else (sent > 1.9)


async def test_whoever_asks_us_for_what_we_fetch_is_asked_too(autojump_clock: MockClock, town: Town) -> None:
    """Nobody announces the second: the first knows it by its wants alone."""
    await town.holder("publisher", link=SLOW).announce(town.content.artifact)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(town.fetch, town.node("first", seed=1))
        nursery.start_soon(town.fetch, town.node("second", mirror=False, seed=2))
    assert town.reports["first"].bytes_by_peer["second"] > 0
    assert town.reports["second"].bytes_by_peer["first"] > 0


async def test_consumers_that_start_together_begin_with_different_segments(autojump_clock: MockClock, town: Town) -> None:
    publisher, artifact = town.holder("publisher", link=SLOW), town.content.artifact
    await publisher.announce(artifact)
    segment_of = {
        ref.cid: index
        for index, node in enumerate(artifact.manifest.segments)
        for ref in artifact.open_segment(index, town.content.blocks[node]).blocks()
    }
    first: dict[str, int] = {}

    def note(peer: str, cids: Sequence[Cid]) -> None:
        for cid in cids:
            if cid in segment_of:
                first.setdefault(peer, segment_of[cid])

    publisher.context.asked[note] = None
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(town.fetch, town.node(f"c{number}", seed=number))
    assert len(first) == 8
    assert len(set(first.values())) > 2


async def test_a_short_fetch_is_not_shared(autojump_clock: MockClock, town: Town) -> None:
    await town.holder("a", link=Link()).announce(town.content.artifact)
    shared: list[object] = []
    consumer = town.node("c", link=Link())
    consumer.context.share = shared.append
    await town.fetch(consumer)
    await trio.sleep(10)
    assert not shared


async def test_no_want_is_wasted_on_what_a_partial_provider_said_it_lacks(autojump_clock: MockClock, town: Town) -> None:
    partial = town.holder("partial", segments=2)
    await partial.announce(town.content.artifact)
    await town.holder("whole").announce(town.content.artifact)
    wanted: list[Cid] = []
    partial.context.asked[lambda peer, cids: wanted.extend(cids)] = None
    await town.fetch(town.node("c"))
    assert town.reports["c"].hit_tokens == len(town.content.token_ids)
    assert town.reports["c"].bytes_by_peer["partial"] > 0
    assert wanted
    assert all(partial.store.has(cid) for cid in wanted)


async def test_a_partial_provider_alone_gives_what_it_has(autojump_clock: MockClock, town: Town) -> None:
    await town.holder("partial", segments=2).announce(town.content.artifact)
    await town.fetch(town.node("c"))
    assert town.reports["c"].hit_tokens == 512
    with pytest.raises(FetchIncompleteError):
        await town.node("m").fetch(ManifestTarget(town.content.artifact.cid))


@pytest.mark.parametrize(("providers", "expected"), [(1, 0.05), (2, 0.05), (3, 0.55)])
async def test_company_is_sought_the_sooner_the_fewer_there_are(
    autojump_clock: MockClock, town: Town, providers: int, expected: float
) -> None:
    """As soon as the first blocks are under way with two or fewer, else when the fetch turns out to be long."""
    artifact = town.content.artifact
    for number in range(providers):
        await town.holder(f"p{number}", link=SLOW).announce(artifact)
    consumer = town.node("c")
    started = trio.current_time()
    routing = consumer.context.routing = WatchedRouting(consumer.routing)
    matched: list[float] = []

    def note_match(event: FetchEvent) -> None:
        if isinstance(event, Matched):
            matched.append(trio.current_time() - started)

    tokens = town.content.token_ids
    await consumer.fetch(PromptTarget(MODEL.model_id, MODEL.dtype, (*tokens, 0), len(tokens)), emit=note_match)
    looked_up = routing.looked_up[artifact.cid.multihash]
    assert looked_up[0] - matched[0] == pytest.approx(expected, rel=0.25)  # spread by chance
