"""Publishers, fetches, readers, pins, removals and collections in real threads on one store: nothing held goes, no wrong byte.

``test_collect_states`` knows every order of whole steps; here threads meet in the middle of them.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path

import pytest

from p2pkv.errors import NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.location import read_located
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import Sample, make_sample

TOKENS = list(range(600))
SAMPLES = [
    make_sample(TOKENS),
    make_sample([*TOKENS[:512], *range(100, 300)]),  # shares two segments with the first
    make_sample(TOKENS[:100], seed=2),
    make_sample(TOKENS[::-1], seed=3),
]
BLOCKS = {cid: data for sample in SAMPLES for cid, data in sample.blocks.items()}
PACK_BYTES = 20_000
LEASE_S = 60.0
TURNS = 120
QUOTAS = (1, 15_000, 40_000, 200_000)


class Threads:
    """What each of the threads does, again and again."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.done: Counter[str] = Counter()
        self.others_work = threading.Event()
        self.others_work.set()

    # --- who adds ------------------------------------------------------------------------------------------------------

    def publish(self, rng: random.Random) -> None:
        """As a publisher and its daemon do."""
        sample = rng.choice(SAMPLES)
        lease = self.store.lease(sample.cid, LEASE_S)
        with open_staging(self.store.layout.home) as staging:
            for cid, data in sample.blocks.items():
                staging.write(cid, data)
            self.store.adopt(staging.name, staging.cids)
        self.store.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)))
        self.check_whole(sample, rng)
        self.store.holds.release(lease)

    def fetch(self, rng: random.Random) -> None:
        """As a fetch does: nodes first, what is here is not fetched again, and what is here in the end is listed."""
        sample = rng.choice(SAMPLES)
        lease = self.store.lease(sample.cid, LEASE_S)
        nodes = [sample.cid, *sample.artifact.manifest.segments]
        for cid in [*nodes, *(cid for cid in sample.blocks if cid not in nodes)]:
            try:
                assert self.store.read(cid) == sample.blocks[cid]
            except NotFoundError:
                self.store.write(cid, sample.blocks[cid])
            pause(rng)
        assert all(map(self.store.has, sample.blocks))
        self.store.add_artifact(sample.artifact, frozenset(range(len(sample.artifact.chain_keys))))
        self.check_whole(sample, rng)
        self.store.holds.release(lease)

    # --- who reads -----------------------------------------------------------------------------------------------------

    def read(self, rng: random.Random) -> None:
        """As those do who serve peers: without a lease, whatever happens."""
        buffer = bytearray(MAX_CODED_BLOCK_BYTES)
        for cid, data in rng.sample([*BLOCKS.items()], 20):
            with suppress(NotFoundError):
                assert buffer[: self.store.read_into(cid, buffer)] == data
            with suppress(NotFoundError):
                assert self.store.read(cid) == data

    def read_mapped(self, rng: random.Random) -> None:
        """As a program does under a lease: what it was told of once lies there as long as the lease lasts."""
        sample = rng.choice(SAMPLES)
        lease = self.store.lease(sample.cid, LEASE_S)
        places = {cid: self.store.locate(cid) for cid in sample.blocks}
        buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
        if all(places.values()):
            self.done["read"] += 1
            for _ in range(3):
                for cid, place in places.items():
                    assert place is not None
                    assert read_located(self.store.layout.blocks, place, buffer) == sample.blocks[cid]
                pause(rng)
        self.store.holds.release(lease)

    # --- who keeps and takes away --------------------------------------------------------------------------------------

    def pin(self, rng: random.Random) -> None:
        sample, name = rng.choice(SAMPLES), threading.current_thread().name
        try:
            self.store.holds.pin(name, sample.cid)
        except NotFoundError:
            return
        self.done["pinned"] += 1
        for _ in range(3):
            self.check_whole(sample, rng)
            assert self.store.index.artifact(sample.cid) is not None
        assert self.store.holds.unpin(name, sample.cid) == 1

    def remove(self, rng: random.Random) -> None:
        with suppress(UsageError):  # it is pinned
            self.store.remove(rng.choice(SAMPLES).cid)
        time.sleep(0.001)

    def collect(self, rng: random.Random) -> None:
        self.store.collector._quota = rng.choice(QUOTAS)
        self.done["evicted"] += len(self.store.collector.collect().evicted)

    def check_whole(self, sample: Sample, rng: random.Random) -> None:
        """Whoever keeps an artifact finds every block of it."""
        for cid in rng.sample([*sample.blocks], len(sample.blocks)):
            assert self.store.read(cid) == sample.blocks[cid]
        pause(rng)

    def check_listed(self) -> None:
        for row in self.store.index.artifacts():
            sample = next(sample for sample in SAMPLES if sample.cid == row.manifest_cid)
            assert row.complete
            assert all(self.store.read(cid) == data for cid, data in sample.blocks.items())

    # --- threads -------------------------------------------------------------------------------------------------------

    def in_turns(self, work: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(TURNS):
            work(rng)
            pause(rng)

    def meanwhile(self, work: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while self.others_work.is_set():
            work(rng)
            pause(rng)


def pause(rng: random.Random) -> None:
    """Let another thread go on, or do not."""
    if rng.random() < 0.3:
        time.sleep(rng.choice((0.0, 0.00001, 0.0002)))


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_on_one_store(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with open_store(tmp_path) as store, ThreadPoolExecutor(12) as pool:
        store.blocks._max_pack_bytes = PACK_BYTES
        threads = Threads(store)
        others = (threads.publish, threads.fetch, threads.fetch, threads.read_mapped, threads.read_mapped, threads.pin)
        working = [pool.submit(threads.in_turns, work, seed + number) for number, work in enumerate(others)]
        beside = (threads.read, threads.remove, threads.collect, threads.collect)
        working_beside = [pool.submit(threads.meanwhile, work, -seed - number) for number, work in enumerate(beside)]
        try:
            for future in working:
                future.result()
        finally:
            threads.others_work.clear()
        for future in working_beside:
            future.result()
        assert store.blocks.totals().damaged == 0
        assert set(threads.done) == {"read", "pinned", "evicted"}
        threads.check_listed()
        store.collector._quota = 1
        assert not store.collector.collect().over_quota
        assert store.blocks.totals().bytes == 0


def test_who_is_told_that_a_block_is_here_finds_it(folder: Path) -> None:
    """Also in the middle of the decision who goes."""
    data = b"wanted"
    cid = Cid.of_block(data)
    with closing(BlockPacks(folder)) as blocks, ThreadPoolExecutor(1) as pool, blocks.noting_uses():
        blocks.write(cid, data)
        blocks._used = set()  # noted from here on
        told: list[Future[bool]] = []

        def garbage() -> Iterator[bytes]:
            yield cid.binary
            told.append(pool.submit(blocks.has, cid))
            wait(told, 0.1)  # it may have to wait until the decision is made

        blocks.sweep(garbage())
        assert told[0].result() == blocks.has(cid)
