"""Blocks on disk: a folder of packs (``pack``), an index of them in memory, and no byte trusted before its hash.

A block that is written is appended to the current pack. It is not synced unless asked: after a power cut a torn block fails
its hash. A block that fails is forgotten and marked in its pack, so that it is fetched again. Later packs and records win over
earlier ones of the same block.

Blocks are read with ``pread`` into memory of the caller's. Mapping them would spare a copy that costs less than the page
faults of the mapping, and a file that is cut off under a mapping ends the process that looks at it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from p2pkv.errors import IntegrityError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_PACK_BYTES
from p2pkv.ports import BlockReader, Buffer
from p2pkv.store.files import os_errors, sync_paths
from p2pkv.store.pack import Contents, PackWriter, Record, Write, bury, is_foreign, read_contents, seal
from p2pkv.store.verified import Stamp, VerifiedLately

logger = logging.getLogger(__name__)

# A folder in a pack's place, or a bad spot of the disk: the blocks in there are missing, and nothing else is.
_ONE_FILE_ONLY: Final = frozenset({errno.EISDIR, errno.EIO})
_PACK_NAME: Final = re.compile(r"[0-9]{8,}\.pack")


class Location(NamedTuple):
    """Where a block lies: ``size`` bytes from ``offset`` of the pack ``file``, a name in the folder of blocks."""

    file: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class BlockTotals:
    """Blocks here and their bytes, and damaged blocks that reading found since the store was opened."""

    blocks: int
    bytes: int
    damaged: int


def read_located(folder: Path | str, location: Location, buffer: memoryview) -> memoryview:
    """Read the bytes at ``location`` into the front of ``buffer`` and return them, unverified.

    Fewer than ``location.size`` come where the file ends early. Raises UsageError for a buffer that is too short,
    NotFoundError where the file is gone, StoreError.
    """
    with _opened(folder, location) as descriptor:
        return _read_at(descriptor, location, buffer)


def damaged(cid: Cid) -> IntegrityError:
    """Return what to raise for a block whose bytes on this machine's disk do not have its hash."""
    return IntegrityError(
        f"block {cid} is damaged on this machine's disk", advice="It is fetched again; if this repeats, check the disk."
    )


def is_intact(blocks: BlockReader, cid: Cid) -> bool:
    """Return whether a block is here and has its hash. Raises StoreError."""
    try:
        blocks.read(cid)
    except (NotFoundError, IntegrityError):
        return False
    return True


def is_pack(name: str) -> bool:
    """Return whether ``name`` is what a pack in the folder of blocks is called, so that it leads nowhere else."""
    return _PACK_NAME.fullmatch(name) is not None


class StoredBlocks:
    """The blocks under ``folder`` as they lie when this is made; any thread may read them. Raises StoreError."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.fspath(folder)
        self.verified = VerifiedLately()
        self._index: dict[bytes, Location] = {}
        with os_errors(f"read the packs in {folder}"):
            self._load()

    def has(self, cid: Cid) -> bool:
        """Return whether the block is here; only reading tells whether it is intact."""
        return cid.binary in self._index

    def locate(self, cid: Cid) -> Location | None:
        """Return where the block lies, ``None`` where it is not here."""
        return self._index.get(cid.binary)

    def size(self, cid: Cid) -> int:
        """Return the bytes of the block. Raises NotFoundError."""
        return self._find(cid).size

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes of a block.

        Raises NotFoundError; IntegrityError for bytes that do not hash to ``cid``, which are then forgotten; StoreError.
        """
        location = self._find(cid)
        with self._gone_means_missing(cid, location), _opened(self.folder, location) as descriptor:
            data = os.pread(descriptor, location.size, location.offset)
        if not cid.matches(data):
            raise self._damage(cid, location)
        return data

    def read_into(self, cid: Cid, buffer: bytearray | memoryview) -> int:
        """Read a block into the front of ``buffer`` for somebody who verifies it, and return its size in bytes.

        It is verified here too, unless it was lately (``verified``). What is in ``buffer`` after an error is not to be used.
        Raises what :meth:`read` raises, and UsageError where the buffer is too short.
        """
        location = self._find(cid)
        with self._gone_means_missing(cid, location), _opened(self.folder, location) as descriptor:
            stamp = Stamp.of(descriptor)
            data = _read_at(descriptor, location, memoryview(buffer).cast("B"))
        if not self.verified.has(location.file, stamp, cid.binary):
            if not cid.matches(data):
                raise self._damage(cid, location)
            self.verified.add(location.file, stamp, [cid.binary])
        return location.size

    def _load(self) -> None:
        for name in sorted(filter(is_pack, os.listdir(self.folder)), key=_number):
            try:
                contents = self._read_pack(f"{self.folder}/{name}")
            except FileNotFoundError:
                continue  # the process that may change them removed it just now
            except OSError as error:
                if error.errno not in _ONE_FILE_ONLY:
                    raise
                logger.warning("the blocks in %s/%s are passed over: %s", self.folder, name, error.strerror)
                continue
            self._add(name, contents.records)

    def _read_pack(self, path: str) -> Contents:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_contents(descriptor)
        finally:
            os.close(descriptor)

    def _add(self, name: str, records: Iterable[Record]) -> None:
        for record in records:
            self._index[record.cid] = Location(name, record.offset, record.size)

    def _find(self, cid: Cid) -> Location:
        location = self._index.get(cid.binary)
        if location is None:
            raise _not_here(cid)
        return location

    @contextmanager
    def _gone_means_missing(self, cid: Cid, location: Location) -> Iterator[None]:
        try:
            yield
        except NotFoundError:
            self._forget(cid, location)
            raise _not_here(cid) from None

    def _damage(self, cid: Cid, location: Location) -> IntegrityError:
        self._forget(cid, location)
        return damaged(cid)

    def _forget(self, cid: Cid, location: Location) -> None:
        """Drop a location, unless a good one took its place meanwhile."""
        if self._index.get(cid.binary) is location:
            self._index.pop(cid.binary, None)  # another thread may find the same damage


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

    def _read_pack(self, path: str) -> Contents:
        self._next_number = max(self._next_number, _number(os.path.basename(path)) + 1)
        contents = super()._read_pack(path)
        if not contents.sealed:
            # A disk that is full or read-only costs later starts a walk, and nobody a block.
            with suppress(OSError):
                _change(path, partial(_tidy, path, contents))
        return contents

    def _add(self, name: str, records: Iterable[Record]) -> None:
        for record in records:
            replaced = self._index.get(record.cid)
            self._index[record.cid] = Location(name, record.offset, record.size)
            self._bytes += record.size - (replaced.size if replaced is not None else 0)

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

    def _damage(self, cid: Cid, location: Location) -> IntegrityError:
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
        seal(descriptor)
    elif is_foreign(descriptor):
        logger.warning("%s is no pack of this version, and is left alone", path)
    else:
        os.unlink(path)


def _change(path: str, change: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        change(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _opened(folder: Path | str, location: Location) -> Iterator[int]:
    """Open the pack of a block, for reading. Raises NotFoundError, StoreError; maps every OSError of the block."""
    with os_errors(f"read {location.file}"):
        try:
            descriptor = os.open(f"{folder}/{location.file}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(f"{location.file} is gone") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _read_at(descriptor: int, location: Location, buffer: memoryview) -> memoryview:
    """As :func:`read_located`, from the open pack. Raises UsageError, OSError."""
    if location.size > len(buffer):
        raise UsageError(f"a block of {location.size} bytes does not fit a buffer of {len(buffer)}")
    filled = os.preadv(descriptor, [buffer[: location.size]], location.offset)
    while filled < location.size:
        count = os.preadv(descriptor, [buffer[filled : location.size]], location.offset + filled)
        if count == 0:
            break
        filled += count
    return buffer[:filled]


def _not_here(cid: Cid) -> NotFoundError:
    return NotFoundError(
        f"block {cid} is not stored here", advice="Fetch the artifact that it belongs to; what is here is kept."
    )


def _number(name: str) -> int:
    return int(name.partition(".")[0])
