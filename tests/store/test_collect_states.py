"""Downloads, publications, readers, pins, kills and collecting in any order: nothing that is held ever goes, no wrong byte.

Steps also happen in the middle of a collection, between its marking, its decision and its sweep.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pkv.errors import NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.collect import Collector
from p2pkv.store.database import Database
from p2pkv.store.files import Reserve
from p2pkv.store.holds import Holds
from p2pkv.store.home import HomeLayout
from p2pkv.store.index import ArtifactIndex
from p2pkv.store.location import Location, read_located
from tests.support.artifacts import Sample, make_sample

TOKENS = list(range(600))
SAMPLES = [
    make_sample(TOKENS),
    make_sample([*TOKENS[:512], *range(100, 300)]),  # shares two segments with the first
    make_sample(TOKENS[:100], seed=2),
    make_sample(TOKENS[::-1], seed=3),
]
PACK_BYTES = 12_000
LEASE_S = 100
a_sample = st.sampled_from(SAMPLES)


class Stepping(Collector):
    """Lets something happen before and after the decision."""

    before: Callable[[], None]
    after: Callable[[], None]

    def _decide(self, *arguments: Any) -> Any:
        self.before()
        plan = super()._decide(*arguments)
        self.after()
        return plan


class Download:
    """A fetch that goes one block at a time, as the swarm's does: leased first, nodes before blocks, listed at the end."""

    def __init__(self, sample: Sample, lease: int) -> None:
        self.sample = sample
        self.lease = lease
        nodes = [sample.cid, *sample.artifact.manifest.segments]
        self.missing = [*nodes, *(cid for cid in sample.blocks if cid not in nodes)]


@dataclass(frozen=True)
class Reader:
    """A program that was told where the blocks of a whole artifact lie, and reads them there under a lease."""

    sample: Sample
    lease: int
    places: dict[Cid, Location]


class CollectStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.layout = HomeLayout(Path(self.stack.enter_context(tempfile.TemporaryDirectory())))
        self.layout.create()
        self.now = 1000.0
        self.downloads: list[Download] = []
        self.readers: list[Reader] = []
        self.pinned: set[Cid] = set()
        self.whole: dict[Cid, Sample] = {}  # listed as held, and not removed or collected since
        self.open()

    def open(self) -> None:
        self.blocks = BlockPacks(self.layout.blocks, max_pack_bytes=PACK_BYTES)
        self.database = Database(self.layout.index)
        self.index = ArtifactIndex(self.database, clock=lambda: self.now)
        self.holds = Holds(self.database, clock=lambda: self.now)

    @rule()
    def restart(self) -> None:
        """Killed: what the collector or a download had in memory is gone, the packs have no table, and readers read on."""
        if self.blocks._current is not None:
            self.blocks._current.close()
        self.database.close()
        self.downloads.clear()
        self.open()

    @rule(seconds=st.integers(1, 2 * LEASE_S))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        if seconds >= LEASE_S:
            self.downloads.clear()
            self.readers.clear()
        for _, lease in self.leases:
            self.holds.renew(lease, LEASE_S)

    @rule(sample=a_sample)
    def begin_download(self, sample: Sample) -> None:
        self.downloads.append(Download(sample, self.holds.lease(sample.cid, LEASE_S)))

    @precondition(lambda self: self.downloads)
    @rule(which=st.integers(0, 9), steps=st.integers(1, 6))
    def go_on(self, which: int, steps: int) -> None:
        download = self.downloads[which % len(self.downloads)]
        for cid in download.missing[:steps]:
            if not self.is_here(cid):
                self.blocks.write(cid, download.sample.blocks[cid])
        del download.missing[:steps]
        if not download.missing:
            self.downloads.remove(download)
            assert self.all_here(download.sample)
            self.list_as_held(download.sample)
            self.holds.release(download.lease)

    @rule(sample=a_sample)
    def publish(self, sample: Sample) -> None:
        lease = self.holds.lease(sample.cid, LEASE_S)
        for cid, data in sample.blocks.items():
            self.blocks.write(cid, data)
        self.list_as_held(sample)
        self.holds.release(lease)

    @property
    def leases(self) -> list[tuple[Cid, int]]:
        """The leases of those who are at work, with their manifests."""
        downloads = [(download.sample.cid, download.lease) for download in self.downloads]
        return downloads + [(reader.sample.cid, reader.lease) for reader in self.readers]

    def list_as_held(self, sample: Sample) -> None:
        self.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)))
        self.whole[sample.cid] = sample

    @rule(sample=a_sample)
    def begin_reading(self, sample: Sample) -> None:
        if sample.cid in self.whole:
            lease = self.holds.lease(sample.cid, LEASE_S)
            places = {cid: self.blocks.locate(cid) for cid in sample.blocks}
            self.readers.append(Reader(sample, lease, {cid: place for cid, place in places.items() if place is not None}))
            assert len(self.readers[-1].places) == len(sample.blocks)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9))
    def end_reading(self, which: int) -> None:
        self.holds.release(self.readers.pop(which % len(self.readers)).lease)

    @rule(sample=a_sample)
    def pin(self, sample: Sample) -> None:
        if sample.cid in self.whole:
            self.holds.pin("test", sample.cid)
            self.pinned.add(sample.cid)

    @rule(sample=a_sample)
    def unpin(self, sample: Sample) -> None:
        assert self.holds.unpin("test", sample.cid) == (sample.cid in self.pinned)
        self.pinned.discard(sample.cid)

    @rule(sample=a_sample)
    def remove(self, sample: Sample) -> None:
        if sample.cid not in self.pinned:
            assert self.index.remove_artifact(sample.cid) == (self.whole.pop(sample.cid, None) is not None)

    @rule(sample=a_sample)
    def use(self, sample: Sample) -> None:
        self.index.touch(sample.cid)

    @rule(share=st.floats(0, 1.2), before=st.integers(0, 6), after=st.integers(0, 6), sample=a_sample)
    def collect(self, share: float, before: int, after: int, sample: Sample) -> None:
        quota = max(int(share * sum(map(len, {c: d for s in SAMPLES for c, d in s.blocks.items()}.values()))), 1)
        collector = Stepping(
            self.database, self.blocks, Reserve(self.layout.reserve, 4096), quota=quota, clock=lambda: self.now
        )
        steps: dict[int, Callable[[], None]] = {
            1: lambda: self.begin_download(sample),
            2: lambda: self.go_on(0, 4) if self.downloads else None,
            3: lambda: self.publish(sample),
            4: lambda: self.pin(sample),
            5: lambda: self.read(sample),
            6: lambda: self.begin_reading(sample),
        }
        added: set[Cid] = set()
        held: set[Cid] = set()

        def step(number: int) -> None:
            known = set(self.whole)
            steps.get(number, lambda: None)()
            added.update(set(self.whole) - known)

        def step_before() -> None:
            step(before)
            held.update(self.pinned, (cid for cid, _ in self.leases))

        collector.before = step_before
        # What is decided is not asked again: it is listed no longer, and so neither pinned nor read.
        collector.after = lambda: step(after if after not in (4, 6) else 0)
        listed_after = {row.manifest_cid for row in self.index.artifacts()}
        collected = collector.collect()
        gone = {evicted.manifest_cid for evicted in collected.evicted}
        assert gone <= listed_after | added
        assert not gone & held
        listed = {row.manifest_cid for row in self.index.artifacts()}
        self.whole = {cid: sample for cid, sample in self.whole.items() if cid in listed}
        if not (before or after):
            assert collected.over_quota or self.blocks.totals().bytes <= quota

    @rule(sample=a_sample)
    def read(self, sample: Sample) -> None:
        for cid in sample.blocks:
            self.is_here(cid)

    def is_here(self, cid: Cid) -> bool:
        data = next(sample.blocks[cid] for sample in SAMPLES if cid in sample.blocks)
        buffer = bytearray(len(data))
        try:
            assert self.blocks.read(cid) == data
            assert self.blocks.read_into(cid, buffer) == len(data)
            assert buffer == data
        except NotFoundError:
            return False
        return True

    def all_here(self, sample: Sample) -> bool:
        return all(map(self.is_here, sample.blocks))

    @invariant()
    def what_is_listed_is_here(self) -> None:
        assert all(map(self.all_here, self.whole.values()))
        assert self.pinned <= set(self.whole)

    @invariant()
    def what_a_download_has_is_here(self) -> None:
        for download in self.downloads:
            assert all(self.is_here(cid) for cid in download.sample.blocks if cid not in download.missing)

    @invariant()
    def what_a_reader_knows_lies_where_it_did(self) -> None:
        buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
        for reader in self.readers:
            for cid, place in reader.places.items():
                assert read_located(self.layout.blocks, place, buffer) == reader.sample.blocks[cid]

    @invariant()
    def no_block_was_damaged(self) -> None:
        assert self.blocks.totals().damaged == 0

    def teardown(self) -> None:
        self.blocks.close()
        self.database.close()
        self.stack.close()


CollectStates.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestCollectStates = CollectStates.TestCase
