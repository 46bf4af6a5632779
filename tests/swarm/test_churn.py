"""A thousand fetches among peers that die, freeze, leave, come back, lie and join at random moments, in virtual time.

A third of the fetches are cancelled at a random moment themselves. However it goes: each ends in time, with the right bytes or
the right error, and nothing of it stays behind, neither with the consumer nor with those who served it. A seed gives one
course of events: what failed is run again with ``course(seed)``.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pkv.errors import DiskFullError, FetchIncompleteError, NotFoundError, P2pkvError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.swarm.fetch import Fetch
from p2pkv.swarm.report import FetchReport
from p2pkv.swarm.target import ManifestTarget, PromptTarget, Target
from p2pkv.units import MINUTE
from sims.network import Link, World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from sims.run import in_virtual_time
from sims.store import MemoryBlockStore
from tests.support.artifacts import PUBLISHER, make_sample, model

SEGMENTS: Final = 5
TOKENS: Final = list(range(256 * SEGMENTS))
SAMPLE: Final = make_sample(TOKENS, description=model(layers=3))
BYTES: Final = sum(map(len, SAMPLE.blocks.values()))
CONSUMER: Final = "consumer"
# Bytes per second at which everything takes 40 s: longer than most have patience.
SLOW: Final = 3_000.0
# Within this all but the slowest courses are over, so that most of what happens strikes in the middle.
EVENTFUL_S: Final = 4.0
LINGER_S: Final = 1.0
# Longer than the exchange waits for anything: after it, a task or channel that is still here stays for ever.
SETTLING_S: Final = 1.0 * MINUTE


class Liar(MemoryBlockStore):
    """Gives out blocks with one bit wrong, as if they were good."""

    def read(self, cid: Cid) -> bytes:
        data = super().read(cid)
        return bytes([data[0] ^ 1]) + data[1:] if cid.codec is Codec.RAW else data


@dataclass
class Course:
    """What a seed stands for: a world, the fate of each provider, and one fetch."""

    world: World
    rng: random.Random
    records: ProviderRecords = field(default_factory=ProviderRecords)
    nodes: list[SimNode] = field(default_factory=list)  # all that ever were
    steady: int = 0  # announced providers that have everything, tell the truth, are not too slow and stay

    def moment(self) -> float:
        return self.rng.uniform(0.0, EVENTFUL_S)

    def node(self, name: str, *, store: MemoryBlockStore | None = None, trusted: tuple[str, ...] = ()) -> SimNode:
        up = self.rng.choice([SLOW, 30_000.0, 100_000.0, 500_000.0])
        link = Link(up=None if name == CONSUMER else up, latency_s=self.rng.choice([0.0, 0.01, 0.1]))
        seed, mirror = self.rng.getrandbits(64), name == CONSUMER
        node = SimNode(self.world, self.records, name, seed=seed, store=store, trusted=trusted, link=link, mirror=mirror)
        self.nodes.append(node)
        return node

    def provider(self, name: str, *, without: int = 0, store: MemoryBlockStore | None = None) -> SimNode:
        """A node with all blocks but ``without``, drawn by lot."""
        node = self.node(name, store=store)
        cids = list(SAMPLE.blocks)
        node.hold(SAMPLE.artifact, {cid: SAMPLE.blocks[cid] for cid in self.rng.sample(cids, len(cids) - without)})
        return node

    async def live(self, name: str) -> None:
        """The life of one provider."""
        fate = self.rng.choice(FATES)
        await fate(self, name)


async def stays(course: Course, name: str) -> None:
    node = course.provider(name)
    await node.announce(SAMPLE.artifact)
    course.steady += node.network.link.up != SLOW


async def has_a_part(course: Course, name: str) -> None:
    await course.provider(name, without=course.rng.randrange(1, len(SAMPLE.blocks))).announce(SAMPLE.artifact)


async def lies(course: Course, name: str) -> None:
    await course.provider(name, store=Liar()).announce(SAMPLE.artifact)


async def rots(course: Course, name: str) -> None:
    node = course.provider(name)
    await node.announce(SAMPLE.artifact)
    await trio.sleep(course.moment())
    for cid in course.rng.sample(list(SAMPLE.blocks), 4):
        node.store.damage(cid, b"rotten")


async def dies(course: Course, name: str) -> None:
    await course.provider(name).announce(SAMPLE.artifact)
    await trio.sleep(course.moment())
    course.world.kill(name)


async def comes_back(course: Course, name: str) -> None:
    await dies(course, name)
    await trio.sleep(course.moment())
    await course.provider(name).announce(SAMPLE.artifact)


async def joins_late(course: Course, name: str) -> None:
    await trio.sleep(course.moment())
    await course.provider(name).announce(SAMPLE.artifact)


async def freezes(course: Course, name: str) -> None:
    node = course.provider(name)
    await node.announce(SAMPLE.artifact)
    await trio.sleep(course.moment())
    node.network.freeze()


async def pauses(course: Course, name: str) -> None:
    node = course.provider(name)
    await node.announce(SAMPLE.artifact)
    await trio.sleep(course.moment())
    node.network.freeze()
    await trio.sleep(course.moment())
    node.network.thaw()


async def loses_connections(course: Course, name: str) -> None:
    node = course.provider(name)
    await node.announce(SAMPLE.artifact)
    for _ in range(3):
        await trio.sleep(course.moment())
        for channel in tuple(node.network.channels):
            channel.break_off()


FATES: Final = (stays, has_a_part, lies, rots, dies, comes_back, joins_late, freezes, pauses, loses_connections)


def course(seed: int) -> str:
    """Run one course of events and say how the fetch ended. Raises AssertionError for what went wrong."""
    here: list[str] = []

    async def run() -> None:
        here.append(await _run(random.Random(seed)))

    in_virtual_time(run, seed)
    return here[0]


async def _run(rng: random.Random) -> str:
    async with open_world() as world:
        tasks = trio.lowlevel.current_statistics().tasks_living
        here = Course(world, rng)
        with trio.fail_after(5 * MINUTE):
            async with trio.open_nursery() as nursery:
                for number in range(rng.randint(0, 6)):
                    nursery.start_soon(here.live, f"provider{number}")
                await trio.sleep(rng.choice([0.0, 0.5, 0.8]))  # the first announcements take as long
                end = await _fetch(here)
                nursery.cancel_scope.cancel()
        for node in here.nodes:
            node.network.thaw()  # a machine that hangs holds what it holds
        await trio.sleep(SETTLING_S)
        await wait_all_tasks_blocked()
        assert not world.nursery.child_tasks
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        for node in here.nodes:
            _check_nothing_left(node)
    return end


async def _fetch(course: Course) -> str:
    """Fetch once, to the end or cancelled in the middle, check what came of it, and name it."""
    rng = course.rng
    capacity = BYTES // 2 if rng.random() < 0.05 else None
    consumer = course.node(CONSUMER, store=MemoryBlockStore(capacity), trusted=(PUBLISHER,))
    prompt = PromptTarget(model().model_id, model().dtype, (*TOKENS, 1, 2), len(TOKENS))
    target: Target = prompt if rng.random() < 1 / 2 else ManifestTarget(SAMPLE.cid)
    patience_s = rng.choice([2.0, 15.0, 60.0])
    fetch = Fetch(consumer.context, target, lambda event: None)
    can_be_had = course.steady > 0
    report: FetchReport | None = None
    failure: P2pkvError | None = None
    cut_off = rng.random() < 1 / 3
    with trio.move_on_after(course.moment() / 2 if cut_off else patience_s + LINGER_S + 1.0) as scope:
        try:
            report = await fetch.run(patience_s, linger_s=rng.choice([0.0, LINGER_S]))
        except P2pkvError as error:
            failure = error
    assert trio.current_time() < scope.deadline + 1.0, "the fetch does not let itself be cancelled"
    assert cut_off or not scope.cancelled_caught, "the fetch hangs"
    stored = consumer.store._blocks
    assert all(SAMPLE.blocks[cid] == data for cid, data in stored.items()), "a wrong byte is stored"
    if report is not None:
        _check_report(report, target, consumer)
    if failure is not None:
        expected: list[type[P2pkvError]] = [DiskFullError] if capacity is not None else []
        if isinstance(target, ManifestTarget):
            expected += [NotFoundError, FetchIncompleteError]
        assert isinstance(failure, tuple(expected)), failure
    if can_be_had and capacity is None and patience_s > 10.0 and not scope.cancelled_caught:
        assert report is not None, failure
        assert report.hit_tokens == len(TOKENS), "a provider had everything all the time"
    if scope.cancelled_caught:
        return "cancelled"
    if report is None:
        return "failed"
    return "whole" if report.hit_tokens == len(TOKENS) else "shorter"


def _check_report(report: FetchReport, target: Target, consumer: SimNode) -> None:
    """What the report says is here is here."""
    assert report.hit_tokens == 256 * report.segments
    artifact = SAMPLE.artifact
    for index, cid in enumerate(artifact.manifest.segments[: report.segments]):
        node = consumer.store.read(cid)
        assert all(consumer.store.has(ref.cid) for ref in artifact.open_segment(index, node).blocks())
    if isinstance(target, ManifestTarget):
        assert report.hit_tokens == len(TOKENS), "a manifest is fetched whole, or an error says that it is not"


def _check_nothing_left(node: SimNode) -> None:
    assert not node.network.channels
    assert not node.context.asked
    statistics = node.server.statistics()
    assert statistics.channels == 0
    assert statistics.outstanding_by_peer == {}
    assert node.server.scheduler.outstanding == 0
    assert node.server.scheduler.get_timer() is None


@pytest.mark.parametrize("batch", [0, 1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(2, 10))])
def test_a_fetch_ends_and_leaves_nothing_behind_whatever_becomes_of_its_peers(batch: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(100 * batch, 100 * (batch + 1)):
        try:
            ends[course(seed)] += 1
        except BaseException as error:
            error.add_note(f"in course({seed})")
            raise
    assert all(ends[end] >= 10 for end in ("whole", "shorter", "failed", "cancelled")), f"too little happens: {ends}"
