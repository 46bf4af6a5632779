"""An idle node makes its store ready for the next fetch: in virtual time, on a real folder, and never in a fetch's way."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pkv.formats.cid import Cid
from p2pkv.limits import READY_STEP_BYTES
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.database import Database
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.store import Store
from p2pkv.swarm.context import Context
from p2pkv.trust.policy import Decision
from p2pkv_node import node as node_module
from p2pkv_node.config import NodeConfig
from p2pkv_node.node import Node
from sims.node import in_place

STEPS = 5
PACK_BYTES = STEPS * READY_STEP_BYTES
DATA = b"\x07" * 5000


class Blocks(BlockPacks):
    """Packs that note when they were asked to make ready, and whose disk fails while ``error`` is set."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[float] = []
        self.error = 0
        super().__init__(folder, write=self._write_or_fail, max_pack_bytes=PACK_BYTES)

    def make_ready(self) -> bool:
        self.asked.append(trio.current_time())
        return super().make_ready()

    def _write_or_fail(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return os.pwritev(descriptor, buffers, offset)


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    HomeLayout(tmp_path).create()
    with closing(Blocks(HomeLayout(tmp_path).blocks)) as found:
        yield found


@pytest.fixture
async def idle(tmp_path: Path, blocks: Blocks, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node of which only its store is real, keeping that ready. A test has to ask for the clock itself."""
    monkeypatch.setattr(node_module, "in_thread", in_place)  # virtual time would run ahead of a thread
    layout = HomeLayout(tmp_path)
    with closing(Database(layout.index)) as database:
        node = bare_node(Store(layout, blocks, database), nursery)
        nursery.start_soon(node.keep_ready)
        yield node
        nursery.cancel_scope.cancel()


def bare_node(store: Store, nursery: trio.Nursery) -> Node:
    nothing: Any = None  # keeping ready needs neither network nor DHT
    context = Context(
        network=nothing,
        routing=nothing,
        store=store,
        catalog=store,
        judge=lambda manifest, cid: Decision(()),
        wall_clock=lambda: 0.0,
        rng=random.Random(0),
        offload=in_place,
    )
    return Node(NodeConfig(store.layout.home), store, nothing, nothing, context, HomeTrust(store.layout), nursery)


def sizes(blocks: Blocks) -> list[int]:
    return sorted(path.stat().st_size for path in Path(blocks.folder).iterdir())


async def test_an_idle_node_goes_on_in_steps_until_its_pack_is_ready(
    autojump_clock: MockClock, idle: Node, blocks: Blocks
) -> None:
    await trio.sleep(1.9)
    assert (blocks.asked, sizes(blocks)) == ([], [])
    await trio.sleep(0.2)
    assert sizes(blocks) == [PACK_BYTES]
    await trio.sleep(0.5)
    steps = blocks.asked[: STEPS + 1]
    assert all(0.01 < later - earlier < 0.1 for earlier, later in pairwise(steps))  # with a pause after each
    await trio.sleep(60)
    assert 20 <= len(blocks.asked) - len(steps) <= 40  # then it looks now and then, and does nothing more
    assert sizes(blocks) == [PACK_BYTES]


async def test_what_else_a_fetch_needs_is_prepared_while_there_is_none(
    autojump_clock: MockClock, idle: Node, nursery: trio.Nursery
) -> None:
    prepared: list[float] = []
    start = trio.current_time()
    nursery.start_soon(idle.keep_ready, lambda: prepared.append(trio.current_time() - start))
    idle.fetches = 1
    await trio.sleep(60)
    assert prepared == []
    idle.fetches = 0
    await trio.sleep(2.1)
    assert prepared


async def test_nothing_is_made_ready_while_a_fetch_runs(autojump_clock: MockClock, idle: Node, blocks: Blocks) -> None:
    idle.fetches = 1
    await trio.sleep(600)
    assert (blocks.asked, sizes(blocks)) == ([], [])
    idle.fetches = 0
    await trio.sleep(10)
    assert sizes(blocks) == [PACK_BYTES]


async def test_a_fetch_that_begins_stops_it_after_that_step(autojump_clock: MockClock, idle: Node, blocks: Blocks) -> None:
    await trio.sleep(2.03)
    assert len(blocks.asked) == 2
    idle.fetches = 2
    await trio.sleep(600)
    assert len(blocks.asked) == 2
    idle.fetches = 1
    await trio.sleep(600)
    assert len(blocks.asked) == 2
    idle.fetches = 0
    await trio.sleep(5)
    assert len(blocks.asked) > STEPS


async def test_what_is_stored_goes_on_in_the_pack_that_is_ready(autojump_clock: MockClock, idle: Node, blocks: Blocks) -> None:
    await trio.sleep(5)
    cids = [Cid.of_block(bytes([number]) + DATA) for number in range(3)]
    for number, cid in enumerate(cids):
        blocks.write(cid, bytes([number]) + DATA)
    assert sizes(blocks) == [PACK_BYTES]
    assert all(blocks.read(cid) == bytes([number]) + DATA for number, cid in enumerate(cids))
    assert {location.file for location in map(blocks.locate, cids) if location} == {"00000001.pack"}


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "No space"), (errno.EIO, "error"), (errno.EROFS, "Read-only")])
async def test_a_disk_that_is_full_or_broken_costs_readiness_alone(
    autojump_clock: MockClock, idle: Node, blocks: Blocks, caplog: pytest.LogCaptureFixture, number: int, words: str
) -> None:
    caplog.set_level("INFO", "p2pkv_node.node")
    blocks.error = number
    await trio.sleep(9)
    assert len(blocks.asked) == 4  # it tries again, but no more often than an idle node looks
    assert sizes(blocks) == []
    assert len([record for record in caplog.records if words in record.getMessage()]) == 4
    blocks.error = 0
    await trio.sleep(5)
    assert sizes(blocks) == [PACK_BYTES]
