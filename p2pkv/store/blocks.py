"""Block files: one file per CID, found by its name and trusted only after its hash.

A block appears under its name at once and whole (written in ``tmp/``, then renamed), and is never changed in place. It is not
synced unless asked: after a power cut a torn file fails its hash. A file that fails is removed, so that it is fetched again.
Folders are named by the last character of a CID's text but one: the first ones are the same in all CIDs, and the last
carries three bits only. 32 folders keep a million blocks at 31,000 files each, and cost a fresh store little.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2pkv.errors import IntegrityError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import Buffer
from p2pkv.store.files import Write, os_errors, read_up_to, sync_paths, write_new

_TEMP: Final = "tmp"
# One call maps all pages of a block; without it each page costs a fault.
_MAP_FLAGS: Final = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True)
class BlockTotals:
    """Files and bytes on disk, and damaged files that reading found and removed since the store was opened."""

    blocks: int
    bytes: int
    damaged: int


class BlockFiles:
    """The blocks under ``folder``. Every method may be called from any thread."""

    def __init__(self, folder: Path, *, write: Write = os.write) -> None:
        self._folder = os.fspath(folder)
        self._temp = f"{self._folder}/{_TEMP}"
        self._temp_prefix = f"{self._temp}/{secrets.token_hex(4)}-"
        self._temp_numbers = itertools.count()
        self._write = write
        self._lock = threading.Lock()  # held while a name changes its file, so that totals and removals stay exact
        self._counted: tuple[int, int] | None = None  # files and bytes, once somebody asked
        self._damaged = 0
        with os_errors(f"create {self._temp}"):
            os.makedirs(self._temp, mode=0o700, exist_ok=True)

    def path(self, cid: Cid) -> str:
        """Return where the block of ``cid`` lies, or would lie."""
        text = str(cid)
        return f"{self._folder}/{text[-2]}/{text}"

    def has(self, cid: Cid) -> bool:
        """Return whether there is a file of that name; only reading tells whether it is intact."""
        return os.path.exists(self.path(cid))

    def size(self, cid: Cid) -> int:
        """Return the bytes of the file. Raises NotFoundError, StoreError."""
        with self._file_errors(cid):
            return os.stat(self.path(cid)).st_size

    def write(self, cid: Cid, data: Buffer, *, durable: bool = False) -> None:
        """Store bytes that the caller has verified against ``cid``; a file that is there is replaced.

        Raises DiskFullError, StoreError; UsageError for more than MAX_CODED_BLOCK_BYTES.
        """
        size = memoryview(data).nbytes
        if size > MAX_CODED_BLOCK_BYTES:
            raise UsageError(f"a block of {size} bytes exceeds {MAX_CODED_BLOCK_BYTES}")
        with os_errors(f"store block {cid}"):
            temp = f"{self._temp_prefix}{next(self._temp_numbers)}"
            write_new(temp, data, write=self._write)
            try:
                self.install(temp, cid, size)
            except BaseException:
                os.unlink(temp)
                raise
        if durable:
            self.sync([cid])

    def install(self, path: str, cid: Cid, size: int) -> None:
        """Move the verified file ``path`` of ``size`` bytes, on the same file system, to its place. Raises OSError."""
        target = self.path(cid)
        with self._lock:
            replaced = None if self._counted is None else _size_or_none(target)
            try:
                os.replace(path, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.replace(path, target)
            if replaced is None:
                self._count(1, size)
            else:
                self._count(0, size - replaced)

    def sync(self, cids: Iterable[Cid]) -> None:
        """Make stored blocks durable: the files first, then the folders that name them. Raises DiskFullError, StoreError."""
        known = list(cids)
        with os_errors("sync blocks to the disk"):
            sync_paths(map(self.path, known))
        self.sync_names(known)

    def sync_names(self, cids: Iterable[Cid]) -> None:
        """Make the names of blocks durable, whose files were synced already. Raises DiskFullError, StoreError."""
        with os_errors("sync folders of blocks to the disk"):
            sync_paths({os.path.dirname(self.path(cid)) for cid in cids} | {self._folder})

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes of a block.

        Raises NotFoundError; IntegrityError for a file that does not hash to ``cid``, which is then gone; StoreError.
        """
        with self._opened(cid) as (descriptor, found):
            data = read_up_to(descriptor, found.st_size)
            self._check(cid, data, found)
            return data

    def read_into(self, cid: Cid, buffer: bytearray | memoryview) -> int:
        """Read a block into the front of ``buffer``, verify it there, and return its size in bytes.

        What is in ``buffer`` after an error is not to be used. Raises what :meth:`read` raises, and UsageError where the
        buffer is too short for an intact block.
        """
        view = memoryview(buffer).cast("B")
        with self._opened(cid) as (descriptor, found):
            if found.st_size > len(view):
                size = len(self.read(cid))  # a longer file is first of all suspect
                raise UsageError(f"block {cid} of {size} bytes does not fit a buffer of {len(view)}")
            view = view[: found.st_size]
            filled = 0
            while filled < len(view) and (count := os.readv(descriptor, [view[filled:]])):
                filled += count
            self._check(cid, view[:filled], found)
            return filled

    def read_mapped(self, cid: Cid) -> memoryview:
        """Return a verified read-only view of a block's file, without a copy; it ends with its last reference.

        Removing or replacing the block leaves the view as it is. Before Python 3.13 each view also holds one file
        descriptor: :meth:`read_into` is for those who keep many blocks. Raises what :meth:`read` raises.
        """
        with self._opened(cid) as (descriptor, found):
            view = memoryview(_map(descriptor, found.st_size) if found.st_size else b"")
            self._check(cid, view, found)
            return view

    def totals(self) -> BlockTotals:
        """Return what is stored; the first call looks at every file, later ones at none. Raises StoreError."""
        with self._lock:
            if self._counted is None:
                with os_errors(f"list {self._folder}"):
                    sizes = [size for folder in self._block_folders() for size in _file_sizes(folder)]
                self._counted = len(sizes), sum(sizes)
            return BlockTotals(*self._counted, self._damaged)

    def clear_leftovers(self) -> int:
        """Remove what interrupted writes left in ``tmp/`` and return how many; only while nobody writes. Raises StoreError."""
        with os_errors(f"clear {self._temp}"):
            names = os.listdir(self._temp)
            for name in names:
                os.unlink(f"{self._temp}/{name}")
            return len(names)

    def _block_folders(self) -> Iterator[str]:
        with os.scandir(self._folder) as entries:
            yield from (entry.path for entry in entries if entry.name != _TEMP)

    @contextmanager
    def _file_errors(self, cid: Cid) -> Iterator[None]:
        with os_errors(f"read block {cid}"):
            try:
                yield
            except FileNotFoundError:
                raise NotFoundError(
                    f"block {cid} is not stored here", advice="Fetch the artifact that it belongs to; what is here is kept."
                ) from None

    @contextmanager
    def _opened(self, cid: Cid) -> Iterator[tuple[int, os.stat_result]]:
        with self._file_errors(cid):
            descriptor = os.open(self.path(cid), os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if found.st_size > MAX_CODED_BLOCK_BYTES:
                    raise self._damage(cid, found)
                yield descriptor, found
            finally:
                os.close(descriptor)

    def _check(self, cid: Cid, data: bytes | memoryview, found: os.stat_result) -> None:
        if not cid.matches(data):
            raise self._damage(cid, found)

    def _damage(self, cid: Cid, found: os.stat_result) -> IntegrityError:
        """Remove the file that ``found`` describes, unless a good one took its place meanwhile; return what to raise."""
        path = self.path(cid)
        with self._lock:
            self._damaged += 1
            # Where even removing fails the block is still refused, which is what matters.
            with suppress(OSError):
                if os.path.samestat(os.stat(path), found):
                    os.unlink(path)
                    self._count(-1, -found.st_size)
        return IntegrityError(
            f"block {cid} is damaged on this machine's disk and was removed",
            advice="It is fetched from a peer again; if this repeats, check the disk.",
        )

    def _count(self, files: int, size: int) -> None:
        if self._counted is not None:
            self._counted = self._counted[0] + files, self._counted[1] + size


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, flags=_MAP_FLAGS, prot=mmap.PROT_READ, trackfd=False)
    return mmap.mmap(descriptor, size, flags=_MAP_FLAGS, prot=mmap.PROT_READ)


def _size_or_none(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _file_sizes(folder: str) -> Iterator[int]:
    with os.scandir(folder) as entries:
        yield from (entry.stat().st_size for entry in entries)
