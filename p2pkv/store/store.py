"""One node's store: packs of blocks and index under one locked home; the real :class:`~p2pkv.ports.BlockStore`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from p2pkv.formats.cid import Cid
from p2pkv.ports import Buffer
from p2pkv.store import staging
from p2pkv.store.blocks import BlockPacks, Location
from p2pkv.store.home import HomeLayout, lock_home
from p2pkv.store.index import ArtifactIndex


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Blocks and their bytes, known and complete artifacts, and damaged blocks found since the store was opened."""

    blocks: int
    bytes: int
    artifacts: int
    complete_artifacts: int
    damaged_blocks: int


class Store:
    """Blocks and index, used together. Every method may be called from any thread; see the parts for their errors."""

    def __init__(self, layout: HomeLayout, blocks: BlockPacks, index: ArtifactIndex) -> None:
        self.layout = layout
        self.blocks = blocks
        self.index = index

    def has(self, cid: Cid) -> bool:
        return self.blocks.has(cid)

    def locate(self, cid: Cid) -> Location | None:
        return self.blocks.locate(cid)

    def size(self, cid: Cid) -> int:
        return self.blocks.size(cid)

    def read(self, cid: Cid) -> bytes:
        return self.blocks.read(cid)

    def read_into(self, cid: Cid, buffer: bytearray | memoryview) -> int:
        return self.blocks.read_into(cid, buffer)

    def write(self, cid: Cid, data: Buffer) -> None:
        self.blocks.write(cid, data)

    def adopt(self, name: str, cids: Sequence[Cid]) -> None:
        """Take over the blocks of a staging folder, checked and durable; see :func:`p2pkv.store.staging.adopt`.

        To publish: adopt, then ``index.add_artifact(..., durable=True)``, then announce.
        """
        staging.adopt(self.layout, self.blocks, name, cids)

    def statistics(self) -> StoreStatistics:
        """Return a frozen view."""
        totals = self.blocks.totals()
        known, complete = self.index.counts()
        return StoreStatistics(totals.blocks, totals.bytes, known, complete, totals.damaged)


@contextmanager
def open_store(home: Path) -> Iterator[Store]:
    """Open the store under ``home``, created where missing, for this process alone.

    What dead publishers left is removed. Raises HomeLockedError with the pid of the process that has
    it open, UnknownVersionError for the index of a newer p2pkv, DiskFullError, StoreError.
    """
    layout = HomeLayout(home)
    layout.create()
    with lock_home(home):
        staging.clear_stale_staging(layout)
        with closing(BlockPacks(layout.blocks)) as blocks, closing(ArtifactIndex(layout.index)) as index:
            yield Store(layout, blocks, index)
