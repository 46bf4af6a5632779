"""Other publishers of a text are looked for beside its fetch, in simulated nodes: who is heard, who is not, for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import trio
from nacl.signing import SigningKey
from trio.testing import MockClock

from p2pkv.errors import DiskFullError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.ports import Buffer
from p2pkv.swarm.fetch import Fetch
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, SegmentReady, Witnessed
from p2pkv.swarm.target import PromptTarget
from p2pkv.swarm.witnesses import Deliver, Emit, fetch_with_witnesses
from sims.network import Link, open_world
from sims.node import SimNode
from sims.store import MemoryBlockStore
from tests.support.artifacts import KEY, PUBLISHER, Sample, make_sample
from tests.support.sim_town import TOKENS, Town, prompt
from tests.support.statements import did_of, key, succession

OTHER, LIAR, THIRD = key(201), key(202), key(203)
ALL = [PUBLISHER, *map(did_of, (OTHER, LIAR, THIRD))]


@dataclass
class Told:
    """What a fetch that looks for witnesses told, and how many seconds it took."""

    events: list[FetchEvent] = field(default_factory=list)
    reports: list[FetchReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def report(self) -> FetchReport:
        (report,) = self.reports
        return report

    @property
    def matched(self) -> str:
        (found,) = [event.artifact.manifest.publisher for event in self.events if isinstance(event, Matched)]
        return found

    @property
    def witnesses(self) -> list[str]:
        return [event.artifact.manifest.publisher for event in self.events if isinstance(event, Witnessed)]

    def nodes(self, signer: SigningKey) -> int:
        """How many nodes of a witness were told."""
        (found,) = [e for e in self.events if isinstance(e, Witnessed) and e.artifact.manifest.publisher == did_of(signer)]
        return len(found.nodes)


async def fetch(
    node: SimNode,
    quorum: int = 2,
    *,
    target: PromptTarget | None = None,
    patience_s: float = 60.0,
    told: Told | None = None,
    hear: Emit = lambda event: None,
) -> Told:
    """Fetch, and return what was told, in ``told`` where it is given."""
    told, began, wanted = told or Told(), trio.current_time(), target or prompt(shared=600)

    def emit_and_hear(event: FetchEvent) -> None:
        told.events.append(event)
        hear(event)

    async def run(emit: Emit, conclude: Deliver) -> None:
        await Fetch(node.context, wanted, emit).run(patience_s, deliver=conclude)

    def deliver(report: FetchReport) -> None:
        told.reports.append(report)
        told.seconds = trio.current_time() - began

    await fetch_with_witnesses(node.context, wanted, quorum, run, emit_and_hear, deliver, patience_s)
    return told


@pytest.fixture
async def town(autojump_clock: MockClock) -> AsyncIterator[Town]:
    async with open_world() as world:
        yield Town(world)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(TOKENS)


@pytest.fixture(scope="module")
def same() -> Sample:
    """The same values, signed by another publisher."""
    return make_sample(TOKENS, key=OTHER)


@pytest.fixture(scope="module")
def lie() -> Sample:
    """Other values for the same text."""
    return make_sample(TOKENS, key=LIAR, seed=9)


def raw(sample: Sample) -> list[Cid]:
    return [cid for cid in sample.blocks if cid.codec is Codec.RAW]


async def test_one_that_signed_the_same_costs_its_manifest(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample
) -> None:
    await town.provider("a", sample)
    await town.provider("b", same)
    consumer = town.node("c", trusted=ALL)
    told = await fetch(consumer)
    assert {told.matched, *told.witnesses} == {PUBLISHER, did_of(OTHER)}
    assert (told.report.hit_tokens, len(told.witnesses)) == (600, 1)
    assert all(consumer.store.has(cid) for cid in sample.blocks.keys() | same.blocks.keys())
    assert same.blocks.keys() - sample.blocks.keys() == {same.cid}
    assert sum(told.report.bytes_by_peer.values()) <= sum(map(len, sample.blocks.values()))
    assert told.seconds < 3


async def test_a_liar_is_heard_and_does_not_end_the_search(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample, lie: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    await town.provider("liar", lie)
    assert (await fetch(consumer)).witnesses == [did_of(LIAR)]
    await town.provider("b", same)
    told = await fetch(consumer)
    assert (told.matched, told.report.bytes_by_peer) == (PUBLISHER, {})
    assert did_of(OTHER) in told.witnesses
    assert set(told.witnesses) <= {did_of(OTHER), did_of(LIAR)}
    assert told.nodes(OTHER) == 3
    assert not any(map(consumer.store.has, raw(lie))), "nothing of its values is fetched"


async def test_nodes_that_differ_are_fetched_and_the_artifact_is_not_listed(
    autojump_clock: MockClock, town: Town, sample: Sample, lie: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    await town.provider("liar", lie)
    told = await fetch(consumer)
    assert told.nodes(LIAR) == 3
    assert all(map(consumer.store.has, lie.artifact.manifest.segments))
    assert [match.manifest for match in consumer.catalog.match(prompt().query_keys)] == [sample.cid]


async def test_who_agrees_is_found_at_home_the_next_time(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    await town.provider("b", same)
    assert (await fetch(consumer)).witnesses == [did_of(OTHER)]
    town.world.kill("b")
    told = await fetch(consumer)
    assert (told.report.hit_tokens, {told.matched, *told.witnesses}) == (600, {PUBLISHER, did_of(OTHER)})


@pytest.mark.parametrize("quorum", [2, 3])
async def test_where_nobody_is_left_the_report_does_not_wait(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample, quorum: int
) -> None:
    """A miss is no reason to be patient: what can be known is known when nobody answers any more."""
    await town.provider("a", sample)
    if quorum == 3:
        await town.provider("b", same)
    told = await fetch(town.node("c", trusted=ALL), quorum)
    assert len(told.witnesses) == quorum - 2
    assert told.report.hit_tokens == 600
    assert told.seconds < 3


async def test_three_of_four(autojump_clock: MockClock, town: Town, sample: Sample, same: Sample, lie: Sample) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    for name, other in {"b": same, "liar": lie, "d": make_sample(TOKENS, key=THIRD)}.items():
        await town.provider(name, other)
    told = await fetch(consumer, 3)
    assert {did_of(OTHER), did_of(THIRD)} <= set(told.witnesses)


async def test_nothing_is_looked_for_once_there_are_enough(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    for name, signer in {"b": OTHER, "d": THIRD}.items():
        await town.provider(name, make_sample(TOKENS, key=signer))
    assert len((await fetch(consumer)).witnesses) == 1


async def test_who_is_not_accepted_is_not_heard(autojump_clock: MockClock, town: Town, sample: Sample, same: Sample) -> None:
    consumer = await town.provider("c", sample, trusted=[PUBLISHER])
    await town.provider("b", same)
    told = await fetch(consumer)
    assert (told.witnesses, told.report.hit_tokens) == ([], 600)


async def test_a_key_that_follows_another_is_no_second_publisher(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    consumer.records.hear(succession(KEY, OTHER))
    await town.provider("b", same)
    assert (await fetch(consumer)).witnesses == []
    await town.provider("d", make_sample(TOKENS, key=THIRD))
    assert (await fetch(consumer)).witnesses == [did_of(THIRD)]


async def test_another_artifact_of_the_same_publisher_is_not_heard(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    await town.provider("b", make_sample(TOKENS, created=sample.artifact.manifest.created - 5))
    assert (await fetch(consumer)).witnesses == []


async def test_a_longer_text_is_heard_as_far_as_it_is_the_same(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    await town.provider("b", make_sample([*TOKENS, *range(300)], key=OTHER))
    told = await fetch(consumer)
    assert told.nodes(OTHER) == 2


LONG = list(range(256 * 20))


async def test_a_publisher_who_appears_while_the_fetch_goes_on_is_heard(autojump_clock: MockClock, town: Town) -> None:
    await town.provider("a", make_sample(LONG), link=Link(up=20_000))
    consumer = town.node("c", trusted=ALL)

    async def later() -> None:
        await trio.sleep(8)
        await town.provider("b", make_sample(LONG, key=OTHER))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later)
        told = await fetch(consumer, target=prompt([*LONG, 1, 2], shared=len(LONG)))
    assert told.witnesses == [did_of(OTHER)]
    assert told.report.hit_tokens == len(LONG)
    assert 10 < told.seconds < 40


async def test_one_who_appears_just_before_the_end_is_heard(autojump_clock: MockClock, town: Town) -> None:
    """Between two looks: there is a last one when the fetch is over."""
    await town.provider("a", make_sample(LONG), link=Link(up=20_000))
    told, nearly = Told(), trio.Event()

    def hear(event: FetchEvent) -> None:
        if isinstance(event, SegmentReady) and sum(isinstance(e, SegmentReady) for e in told.events) == 19:
            nearly.set()

    async def later() -> None:
        await nearly.wait()
        await town.provider("b", make_sample(LONG, key=OTHER))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later)
        await fetch(town.node("c", trusted=ALL), target=prompt([*LONG, 1, 2], shared=len(LONG)), told=told, hear=hear)
    assert told.witnesses == [did_of(OTHER)]


async def test_a_publisher_who_appears_later_is_not_waited_for(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)

    async def later() -> None:
        await trio.sleep(20)
        await town.provider("b", same)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later)
        told = await fetch(consumer)
    assert (told.witnesses, told.report.hit_tokens) == ([], 600)
    assert told.seconds < 3


@pytest.mark.parametrize("patience_s", [1.5, 60.0])
async def test_a_silent_provider_holds_nothing_up_beyond_the_patience(
    autojump_clock: MockClock, town: Town, sample: Sample, same: Sample, patience_s: float
) -> None:
    consumer = await town.provider("c", sample, trusted=ALL)
    silent = await town.provider("silent", same)
    never = trio.Event()
    silent.context.offload = lambda work: never.wait()  # type: ignore[assignment]  # hears all, answers nothing
    told = await fetch(consumer, patience_s=patience_s)
    assert (told.witnesses, told.report.hit_tokens) == ([], 600)
    assert told.seconds <= min(patience_s + 0.1, 20)


async def test_without_a_match_nobody_is_looked_for(autojump_clock: MockClock, town: Town) -> None:
    told = await fetch(town.node("c", trusted=ALL))
    assert (told.witnesses, told.report.artifact) == ([], None)
    assert told.seconds < 3


async def test_what_the_fetch_raises_is_raised(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    class Full(MemoryBlockStore):
        def write(self, cid: Cid, data: Buffer) -> None:
            raise DiskFullError("no space left")

    await town.provider("a", sample)
    with pytest.raises(DiskFullError, match="no space left"):
        await fetch(town.node("c", trusted=ALL, store=Full()))
