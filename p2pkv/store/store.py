"""One node's store: packs of blocks and index under one locked home; the real BlockStore and Catalog of the drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2pkv.artifact.match import Match
from p2pkv.artifact.read import Artifact
from p2pkv.errors import FetchIncompleteError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import RESERVE_BYTES, WORK_LEASE_S
from p2pkv.ports import Buffer
from p2pkv.store import staging
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.collect import Collector
from p2pkv.store.database import Database
from p2pkv.store.downloads import Downloads
from p2pkv.store.files import Reserve
from p2pkv.store.holds import Holds
from p2pkv.store.home import HomeLayout, lock_home
from p2pkv.store.index import ArtifactIndex
from p2pkv.store.lease import WorkLease
from p2pkv.store.location import Location
from p2pkv.store.pins_file import PinsFile
from p2pkv.store.progress import Progress, ignore
from p2pkv.store.rebuild import open_index
from p2pkv.store.whole import open_whole


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Blocks and their bytes, known and complete artifacts, and damaged blocks found since the store was opened."""

    blocks: int
    bytes: int
    artifacts: int
    complete_artifacts: int
    damaged_blocks: int


class Store:
    """Blocks, index, holds, downloads and collector. Any thread may call any method; see the parts for their errors."""

    def __init__(self, layout: HomeLayout, blocks: BlockPacks, database: Database, *, quota: int = 0) -> None:
        self.layout = layout
        self.blocks = blocks
        self.database = database
        self.index = ArtifactIndex(database)
        self.holds = Holds(database, copy=PinsFile(layout.pins).write)
        self.downloads = Downloads(database)
        self._reserve = _reserve(layout)
        self.collector = Collector(database, blocks, self._reserve, quota=quota)

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

    def match(self, chain_keys: Sequence[bytes]) -> Sequence[Match]:
        return self.index.match(chain_keys)

    def add_artifact(self, artifact: Artifact, held: frozenset[int]) -> None:
        self.index.add_artifact(artifact, held)

    def lease(self, manifest: Cid, seconds: float) -> int:
        return self.holds.lease(manifest, seconds)

    def renew(self, lease: int, seconds: float) -> None:
        self.holds.renew(lease, seconds)

    def publish(self, name: str, manifest: Cid, on_progress: Progress = ignore) -> Artifact:
        """Take over the artifact that is staged in the folder ``name``, check that it is whole, and list it, durably.

        What is stored already need not be staged. After an error nothing is listed. Raises what open_artifact raises;
        UsageError for a name that is none, NotFoundError where something is missing, IntegrityError, DiskFullError,
        StoreError.
        """
        lease = WorkLease(self.holds, manifest, WORK_LEASE_S)  # what is adopted belongs to nothing that is listed yet
        try:
            with staging.open_staged(self.layout, self.blocks, name) as staged:
                artifact, cids = open_whole(manifest, staged.read(manifest), staged)
            self.adopt(name, cids, lease.kept_by(on_progress))
            self.index.add_artifact(artifact, range(len(artifact.chain_keys)), durable=True)
        except FetchIncompleteError as error:
            raise NotFoundError(f"what is staged is not all: {error.message}", advice=staging.PUBLISH_AGAIN) from None
        finally:
            lease.release()
        return artifact

    def adopt(self, name: str, cids: Sequence[Cid], on_progress: Progress = ignore) -> None:
        """Take over the blocks of a staging folder, checked and durable; see :func:`p2pkv.store.staging.adopt`."""
        staging.adopt(self.layout, self.blocks, name, cids, on_progress)

    def remove(self, manifest: Cid) -> bool:
        """Take an artifact off the list, durably; return whether it was there. Raises UsageError for one that is pinned."""
        if self._reserve.spend_on(partial(self.index.remove_artifact, manifest)):
            return True
        names = [pin.name for pin in self.holds.pins() if pin.manifest_cid == manifest]
        if names:
            raise UsageError(
                f"{manifest} is pinned as {', '.join(names)}", advice=f"Take the pin away first: p2pkv unpin {names[0]}"
            )
        return False

    def statistics(self) -> StoreStatistics:
        """Return a frozen view."""
        totals = self.blocks.totals()
        known, complete = self.index.counts()
        return StoreStatistics(totals.blocks, totals.bytes, known, complete, totals.damaged)


@contextmanager
def open_store(home: Path, *, quota: int = 0, go_on: Callable[[], None] = lambda: None) -> Iterator[Store]:
    """Open the store under ``home``, created where missing, for this process alone. ``quota``: see :class:`Collector`.

    What dead publishers left is removed; an index that was lost is made anew (``rebuild``), in which ``go_on`` is called often
    and may raise. Raises HomeLockedError with the pid of the process that has it open, UnknownVersionError for the index of a
    newer p2pkv, DiskFullError, StoreError.
    """
    layout = HomeLayout(home)
    layout.create()
    with lock_home(home):
        staging.clear_stale_staging(layout)
        with (
            closing(BlockPacks(layout.blocks)) as blocks,
            closing(_reserve(layout).spend_on(partial(open_index, layout, blocks, go_on))) as database,
        ):
            _reserve(layout).refill()
            store = Store(layout, blocks, database, quota=quota)
            store.holds.keep_copy()
            yield store


def _reserve(layout: HomeLayout) -> Reserve:
    return Reserve(layout.reserve, RESERVE_BYTES)
