"""Blocks on disk: a folder of packs (``pack``), an index of them in memory, and no byte trusted before its hash.

A block that is written is appended to the current pack. It is not synced unless asked: after a power cut a torn block fails
its hash. A block that fails is forgotten and marked in its pack, so that it is fetched again. Later packs and records win over
earlier ones of the same block.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from p2pkv.errors import NotFoundError, P2pkvError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_PACK_BYTES
from p2pkv.ports import Buffer
from p2pkv.store.files import os_errors, sync_paths
from p2pkv.store.location import Location, is_pack, pack_number
from p2pkv.store.pack import Contents, PackWriter, Record, Write, bury, is_foreign, read_contents, reclaim, seal
from p2pkv.store.stored_blocks import ONE_FILE_ONLY, StoredBlocks, damaged, not_here
from p2pkv.store.verified import Stamp

logger = logging.getLogger(__name__)

_DISK_BLOCK_BYTES: Final = 512  # the unit of st_blocks (POSIX leaves it open, all systems have this one)


class Swept(NamedTuple):
    """Blocks that were forgotten and their bytes, and the bytes that the disk got back: more or fewer, as blocks lie."""

    blocks: int
    bytes: int
    freed: int


@dataclass(frozen=True, slots=True)
class BlockTotals:
    """Blocks here and their bytes, and damaged blocks that reading found since the store was opened."""

    blocks: int
    bytes: int
    damaged: int


class BlockPacks(StoredBlocks):
    """The blocks under ``folder`` for the one process that may change them; it holds the home's lock.

    Opening seals what a killed process left, and removes a pack without blocks. Any thread may call any method.
    """

    def __init__(self, folder: Path, *, write: Write = os.pwritev, max_pack_bytes: int = MAX_PACK_BYTES) -> None:
        self._write = write
        self._max_pack_bytes = max_pack_bytes
        self._lock = threading.Lock()  # held while the index or the current pack changes
        self._current: PackWriter | None = None
        self._next_number = 1
        self._bytes = 0
        self._damaged = 0
        self._used: set[bytes] | None = None  # binary CIDs, while somebody wants to know
        self._using = threading.Lock()  # held while a use is noted, and while it is decided who goes for want of one
        self._swept: set[bytes] = set()  # by the last sweep
        super().__init__(folder)

    def close(self) -> None:
        """Seal the current pack; the next write would open another."""
        with self._lock:
            self._retire()

    def write(self, cid: Cid, data: Buffer) -> None:
        """Store bytes that the caller has verified against ``cid``; they take the place of those that are there.

        Raises DiskFullError, StoreError; UsageError for more than MAX_CODED_BLOCK_BYTES.
        """
        view = memoryview(data).cast("B")
        if len(view) > MAX_CODED_BLOCK_BYTES:
            raise UsageError(f"a block of {len(view)} bytes exceeds {MAX_CODED_BLOCK_BYTES}")
        with os_errors(f"store block {cid}"), self._lock:
            pack = self._open_pack()
            offset = pack.append(cid, view)
            self._add(pack.name, [Record(cid.binary, offset, len(view))])
            if pack.size >= self._max_pack_bytes:
                self._retire()

    def make_ready(self) -> bool:
        """Do a little of what makes later writes faster, while nothing else is to do; return whether there is more.

        Raises DiskFullError, StoreError.
        """
        with os_errors("make room for blocks"), self._lock:
            return self._open_pack().make_ready(self._max_pack_bytes)

    def install(self, path: str, contents: Contents) -> None:
        """Move a pack of blocks that were just verified in it, and synced, to its place, durably. Raises OSError."""
        with self._lock:
            name = self._new_name()
            place = f"{self.folder}/{name}"
            os.rename(path, place)
            self.verified.add(name, Stamp.of(place), (record.cid for record in contents.records))
            self._add(name, contents.records)
        sync_paths([self.folder])

    def sync(self, cids: Iterable[Cid]) -> None:
        """Make stored blocks durable: the packs first, then the folder that names them. Raises DiskFullError, StoreError."""
        packs = {self._find(cid).file for cid in cids}
        with os_errors("sync blocks to the disk"):
            sync_paths([*(f"{self.folder}/{name}" for name in sorted(packs))])
            sync_paths([self.folder])

    def totals(self) -> BlockTotals:
        with self._lock:
            return BlockTotals(len(self._index), self._bytes, self._damaged)

    # --- what is not needed any more -----------------------------------------------------------------------------------

    def sizes(self) -> dict[bytes, int]:
        """Return the bytes of every block by its binary CID."""
        with self._lock:
            return {cid: location.size for cid, location in self._index.items()}

    def peek(self, cid: Cid) -> bytes:
        """As :meth:`read`, for whoever decides what is swept: it does not count as a use."""
        location = self._index.get(cid.binary)
        if location is None:
            raise not_here(cid)
        return self._read(cid, location)

    @contextmanager
    def noting_uses(self) -> Iterator[None]:
        """Take note of every block that is asked for or added from here on: :meth:`sweep` spares it. One at a time."""
        self._used = set()
        try:
            yield
        finally:
            self._used = None

    def sweep(self, garbage: Iterable[bytes], kept: Collection[bytes] = ()) -> Swept:
        """Forget the blocks with these binary CIDs, unless they were used meanwhile, and give room back to the disk.

        Of the blocks ``kept`` each copy stays where it is, also one that was replaced: somebody may be reading it there.

        Within :meth:`noting_uses`. Room is given back in all packs, also of what was replaced or found damaged earlier. Works
        on a full disk. Raises StoreError.
        """
        with os_errors("give room back to the disk"):
            with self._lock:
                self._retire()  # whatever is written from now on goes to a pack that is not looked at
                with self._using:
                    swept = self._forget_unused(garbage)
                live: dict[str, set[int]] = {name: set() for name in filter(is_pack, os.listdir(self.folder))}
                for location in self._index.values():
                    live.setdefault(location.file, set()).add(location.offset)
            freed = sum(self._reclaim(name, offsets, kept) for name, offsets in live.items())
        return Swept(*swept, freed)

    def _forget_unused(self, garbage: Iterable[bytes]) -> tuple[int, int]:
        used = self._used
        assert used is not None, "only who notes the uses may sweep"
        self._swept = {cid for cid in garbage if cid in self._index and cid not in used}
        # Before their bytes go: who reads them now looks here again afterwards.
        size = sum(self._index.pop(cid).size for cid in self._swept)
        self._bytes -= size
        return len(self._swept), size

    def _reclaim(self, name: str, live: set[int], kept: Collection[bytes]) -> int:
        """Give back what is dead in one pack, and return the bytes that the disk got."""
        path = f"{self.folder}/{name}"
        with self._lock:
            try:
                before = os.stat(path).st_blocks * _DISK_BLOCK_BYTES
                if live or (kept and _holds(path, kept)):
                    _change(path, partial(reclaim, live=live, kept=kept))
                elif not _look(path, is_foreign):
                    os.unlink(path)
                    self.verified.forget(name)
                    return before
                return before - os.stat(path).st_blocks * _DISK_BLOCK_BYTES
            except OSError as error:
                if error.errno not in ONE_FILE_ONLY and not isinstance(error, FileNotFoundError):
                    raise
                return 0

    def _read_pack(self, path: str) -> Contents:
        self._next_number = max(self._next_number, pack_number(os.path.basename(path)) + 1)
        contents = super()._read_pack(path)
        if not contents.sealed:
            # A disk that is full or read-only costs later starts a walk, and nobody a block.
            with suppress(OSError):
                _change(path, partial(_tidy, path, contents))
        return contents

    def has(self, cid: Cid) -> bool:
        self._note_use(cid)
        return super().has(cid)

    def locate(self, cid: Cid) -> Location | None:
        self._note_use(cid)
        return super().locate(cid)

    def _find(self, cid: Cid) -> Location:
        self._note_use(cid)
        return super()._find(cid)

    def _note_use(self, cid: Cid) -> None:
        if self._used is not None:
            with self._using:
                if self._used is not None:
                    self._used.add(cid.binary)

    def _add(self, name: str, records: Iterable[Record]) -> None:
        used = self._used
        for cid, offset, size in records:
            if used is not None:
                used.add(cid)
            replaced = self._index.get(cid)
            self._index[cid] = Location(name, offset, size)
            self._bytes += size - (replaced.size if replaced is not None else 0)

    @contextmanager
    def _gone_means_missing(self, cid: Cid, location: Location) -> Iterator[None]:
        try:
            with super()._gone_means_missing(cid, location):
                yield
        except NotFoundError:
            with self._lock:
                if self._current is not None and self._current.name == location.file:
                    self._retire()  # nobody would find what is written to it
            raise

    def _forget(self, cid: Cid, location: Location) -> None:
        with self._lock:
            if self._index.get(cid.binary) is location:
                del self._index[cid.binary]
                self._bytes -= location.size

    def _damage(self, cid: Cid, location: Location) -> P2pkvError:
        if cid.binary in self._swept and cid.binary not in self._index:
            return not_here(cid)  # it was swept while it was read
        self._forget(cid, location)
        record = Record(cid.binary, location.offset, location.size)
        with self._lock:
            self._damaged += 1
            # Where even the mark fails, the next start finds the block and its damage again.
            with suppress(OSError):
                _change(f"{self.folder}/{location.file}", lambda descriptor: bury(descriptor, record))
        return damaged(cid)

    def _open_pack(self) -> PackWriter:
        if self._current is None:
            self._current = PackWriter(f"{self.folder}/{self._new_name()}", write=self._write)
        return self._current

    def _new_name(self) -> str:
        name = f"{self._next_number:08}.pack"
        self._next_number += 1
        return name

    def _retire(self) -> None:
        pack, self._current = self._current, None
        if pack is not None:
            with suppress(OSError):  # as for a pack that a killed process left
                if not pack.seal().records:
                    os.unlink(f"{self.folder}/{pack.name}")
            pack.close()


def _tidy(path: str, contents: Contents, descriptor: int) -> None:
    """Seal a pack that has no table, or remove it where it holds nothing."""
    if contents.records:
        seal(descriptor, contents)
    elif is_foreign(descriptor):
        logger.warning("%s is no pack of this version, and is left alone", path)
    else:
        os.unlink(path)


def _holds(path: str, kept: Collection[bytes]) -> bool:
    """Return whether a pack has a record of one of these CIDs. Raises OSError."""
    return _look(path, lambda descriptor: any(record.cid in kept for record in read_contents(descriptor).records))


def _look(path: str, look: Callable[[int], bool]) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return look(descriptor)
    finally:
        os.close(descriptor)


def _change(path: str, change: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        change(descriptor)
    finally:
        os.close(descriptor)
