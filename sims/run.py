"""Run scenarios in virtual time and measure them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import assert_never

import trio
import trio.testing
from blake3 import blake3

# Trio shuffles the order in which ready tasks run. Equal seeds have to give equal traces, so its chance is seeded here; there
# is no public way, and this is the one that Hypothesis uses.
from trio._core import _run as trio_scheduler

from p2pkv.download.engine import Ask, Completed, Download, Dropped, Event, Snubbed, Withdraw
from p2pkv.formats.cid import Cid, Codec
from p2pkv.swarm.report import FetchReport
from p2pkv.swarm.target import PromptTarget
from sims.content import MODEL, PUBLISHER, Content
from sims.network import World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from sims.scenarios import CONSUMER_LINK, Scenario, Seeder
from sims.store import MemoryBlockStore

# Longer than any scenario takes: a fetch that runs into it has failed.
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a scenario went. Times are virtual seconds, of the slowest consumer; ``time_ratio`` compares with ``base_s``.

    ``cost_s`` is what was lost against ``ideal_s``, the time that the uplinks alone allow. ``wire_ratio`` is all bytes that
    were received, by anybody, over those of the blocks that consumers got. ``publisher_copies`` is what the first seeder sent,
    in copies of the artifact. ``bad_blocks`` are those that consumers refused.
    """

    time_s: float
    ideal_s: float
    cost_s: float
    time_ratio: float
    wire_ratio: float
    duplicate_ratio: float
    publisher_copies: float
    bad_blocks: int
    wrongly_punished: int
    incomplete: int
    trace_hash: str

    def as_map(self) -> dict[str, float | int | str]:
        return asdict(self)


class Trace:
    """A hash over the events of all download engines, in order, each with its node and time."""

    def __init__(self) -> None:
        self._hash = blake3()
        self.lines: list[str] | None = None  # kept where somebody wants to read them

    def add(self, node: str, event: Event) -> None:
        match event:
            case Ask(peer, cids) | Withdraw(peer, cids):
                detail = f"{peer} {' '.join(map(_short, cids))}"
            case Completed(cid, peer):
                detail = f"{peer} {_short(cid)}"
            case Snubbed(peer, blocks):
                detail = f"{peer} {blocks}"
            case Dropped():
                detail = event.peer
            case _:
                assert_never(event)
        line = f"{trio.current_time():.6f} {node} {type(event).__name__} {detail}\n"
        self._hash.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _TracedDownload(Download):
    def __init__(self, rng: random.Random, note: Callable[[Event], None]) -> None:
        super().__init__(rng)
        self._note = note

    def next_event(self) -> Event | None:
        event = super().next_event()
        if event is not None:
            self._note(event)
        return event


class _LyingStore(MemoryBlockStore):
    """Gives out blocks with one bit wrong, as if they were good."""

    def read(self, cid: Cid) -> bytes:
        data = super().read(cid)
        return bytes([data[0] ^ 1]) + data[1:] if cid.codec is Codec.RAW else data


def run(scenario: Scenario, content: Content, seed: int, *, base_s: float | None = None, trace: Trace | None = None) -> Result:
    """Run ``scenario``; equal arguments give equal results, the trace included. ``base_s`` is the ideal if not given."""
    simulation = _Simulation(scenario, content, seed, trace or Trace())
    in_virtual_time(simulation.run, seed)
    return simulation.result(base_s)


def in_virtual_time(main: Callable[[], Awaitable[None]], seed: int) -> None:
    """Run ``main`` to its end in virtual time, its tasks in an order that ``seed`` decides."""
    trio_scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # declared Final, for others than its plugin
    trio_scheduler._r.seed(seed)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class _Simulation:
    def __init__(self, scenario: Scenario, content: Content, seed: int, trace: Trace) -> None:
        self._scenario = scenario
        self._content = content
        self._rng = random.Random(seed)
        self._trace = trace
        self._records = ProviderRecords()
        self._seeders: list[SimNode] = []
        self._consumers: list[SimNode] = []
        self._reports: dict[SimNode, FetchReport] = {}
        self._times: dict[SimNode, float] = {}

    async def run(self) -> None:
        async with open_world() as world:
            for number, seeder in enumerate(self._scenario.seeders):
                self._seeders.append(self._make_seeder(world, number, seeder))
                if not seeder.joins_at:
                    await self._seeders[-1].announce(self._content.artifact)
            for number in range(self._scenario.consumers):
                self._consumers.append(self._make_consumer(world, number))
            start = trio.current_time()
            for seeder, node in zip(self._scenario.seeders, self._seeders, strict=True):
                world.nursery.start_soon(self._happen, world, seeder, node)
            async with trio.open_nursery() as nursery:
                for node in self._consumers:
                    nursery.start_soon(self._fetch, node, start)

    def _make_seeder(self, world: World, number: int, seeder: Seeder) -> SimNode:
        store = (_LyingStore if seeder.lies else MemoryBlockStore)(shared=self._content.blocks)
        node = SimNode(world, self._records, f"seeder{number}", seed=self._rng.getrandbits(64), store=store, link=seeder.link)
        node.hold(self._content.artifact, self._content.blocks)
        return node

    def _make_consumer(self, world: World, number: int) -> SimNode:
        name = f"consumer{number}"
        return SimNode(
            world,
            self._records,
            name,
            seed=self._rng.getrandbits(64),
            trusted=[PUBLISHER],
            store=MemoryBlockStore(shared=self._content.blocks),
            link=CONSUMER_LINK,
            mirror=True,
            download=partial(_TracedDownload, note=partial(self._trace.add, name)),
        )

    async def _happen(self, world: World, seeder: Seeder, node: SimNode) -> None:
        """Let happen to ``node`` what the table says."""
        start = trio.current_time()
        if seeder.joins_at:
            await trio.sleep_until(start + seeder.joins_at)
            await node.announce(self._content.artifact)
        if seeder.stalls_at is not None:
            await trio.sleep_until(start + seeder.stalls_at)
            node.network.freeze()
        if seeder.leaves_at is not None:
            await trio.sleep_until(start + seeder.leaves_at)
            world.kill(node.network.peer_id)

    async def _fetch(self, node: SimNode, start: float) -> None:
        # One token more than was published: the prompt's last step is always computed.
        target = PromptTarget(MODEL.model_id, MODEL.dtype, (*self._content.token_ids, 0), len(self._content.token_ids))
        self._reports[node] = await node.fetch(target, patience_s=_PATIENCE_S)
        self._times[node] = trio.current_time() - start

    def result(self, base_s: float | None) -> Result:
        scenario, data_bytes = self._scenario, self._content.data_bytes
        time_s, ideal_s = max(self._times.values()), scenario.ideal_s(data_bytes)
        nodes = [*self._seeders, *self._consumers]
        liars = {node.network.peer_id for node, seeder in zip(self._seeders, scenario.seeders, strict=True) if seeder.lies}
        punished = [
            peer
            for node in self._consumers
            for peer in {*node.context.bans.active(0.0), *self._reports[node].peers_dropped}
            if peer not in liars
        ]
        return Result(
            time_s=round(time_s, 6),
            ideal_s=round(ideal_s, 6),
            cost_s=round(time_s - ideal_s, 6),
            time_ratio=round(time_s / (base_s or ideal_s), 4),
            wire_ratio=round(sum(node.network.received_bytes for node in nodes) / (len(self._consumers) * data_bytes), 5),
            duplicate_ratio=round(
                sum(report.duplicate_bytes for report in self._reports.values()) / (len(self._consumers) * data_bytes), 5
            ),
            publisher_copies=round(self._seeders[0].network.sent_bytes / data_bytes, 3),
            bad_blocks=sum(report.blocks_refused for report in self._reports.values()),
            wrongly_punished=len(punished),
            incomplete=sum(report.hit_tokens < len(self._content.token_ids) for report in self._reports.values()),
            trace_hash=self._trace.hexdigest(),
        )


def _short(cid: Cid) -> str:
    return cid.digest[:8].hex()
