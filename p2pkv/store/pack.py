"""Pack files: blocks one after another in a file that only grows, so that a block costs one system call and no inode.

::

    pack   = "p2pkvPK1", salt (32), zeros to 64; records; the table, once the pack is sealed
    record = "BLCK", CID (36), size (u32), zeros to 64; the block; zeros to the next multiple of 64
    table  = for each record: CID (36), offset of its block (u64), size (u32)
             "TABL", number of records (u32), BLAKE3-256 of salt and entries, zeros to 64

The salt is drawn for each pack and never leaves the machine: a block that a peer made up to end like a table is none.
Numbers are big endian. A pack describes itself: what a killed process left is read record by record up to the first that is
not whole, and the table only spares that walk. A record that turned out damaged is marked "DEAD" and leaves the table. Blocks
begin at multiples of 64, a cache line. Nothing here is believed: a block counts after its hash alone.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from p2pkv.formats.cid import CID_BYTES, Cid, is_binary_cid
from p2pkv.formats.hashing import DIGEST_BYTES, digest
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, READY_STEP_BYTES
from p2pkv.ports import Buffer
from p2pkv.store.files import punch_hole
from p2pkv.units import KIB

ALIGNMENT: Final = 64
MAGIC: Final = b"p2pkvPK1"
SALT_BYTES: Final = 32
_LIVE: Final = b"BLCK"
_DEAD: Final = b"DEAD"
_HEADER: Final = struct.Struct(f">4s{CID_BYTES}sI")
_ENTRY: Final = struct.Struct(f">{CID_BYTES}sQI")
_TRAILER_TAG: Final = b"TABL"
_TRAILER: Final = struct.Struct(f">4sI{DIGEST_BYTES}s")

# What a walk reads at once, and up to which size of a block that is less work than a call for each header.
_WALK_BYTES: Final = 64 * KIB
_SMALL_BYTES: Final = 8 * KIB

Write: TypeAlias = Callable[[int, Sequence[memoryview], int], int]
"""``os.pwritev`` or a stand-in that fails on purpose."""


class Record(NamedTuple):
    """One live block of a pack: its binary CID, and where its bytes lie."""

    cid: bytes
    offset: int
    size: int


class Contents(NamedTuple):
    """The live records of a pack in their order, where its last record ends, and whether a table follows."""

    records: list[Record]
    end: int
    sealed: bool


class PackWriter:
    """Appends to a pack that it creates. For one thread at a time. Its methods raise OSError."""

    def __init__(self, path: str, *, write: Write = os.pwritev) -> None:
        self.name = os.path.basename(path)
        self._write = write
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_at(self._descriptor, [_padded(MAGIC + secrets.token_bytes(SALT_BYTES))], 0, write=write)
        except BaseException:
            os.close(self._descriptor)
            os.unlink(path)
            raise
        self._end = ALIGNMENT
        self._ready = 0

    @property
    def size(self) -> int:
        """Bytes of the pack so far."""
        return self._end

    def make_ready(self, end: int) -> bool:
        """Bring the file's next pages, up to ``end``, a step nearer to memory; return whether there is more to do.

        A page that is first touched by a write costs a system that has to find memory for it, and most where the system is a
        virtual machine. Reading a hole of the file ahead costs no disk and moves that out of the way of a transfer.
        """
        start = max(self._ready, self._end)
        if start >= end or not hasattr(os, "posix_fadvise"):
            return False
        if not self._ready:
            os.ftruncate(self._descriptor, end)
        self._ready = min(start + READY_STEP_BYTES, end)
        os.posix_fadvise(self._descriptor, start, self._ready - start, os.POSIX_FADV_WILLNEED)
        return self._ready < end

    def append(self, cid: Cid, data: memoryview) -> int:
        """Add a block and return its offset; after a failure the pack ends where it ended before."""
        offset = self._end + ALIGNMENT
        end = offset + len(data)
        padding = bytes(-end % ALIGNMENT)
        header = _padded(_HEADER.pack(_LIVE, cid.binary, len(data)))
        try:
            write_at(self._descriptor, [header, data, padding], self._end, write=self._write)
        except BaseException:
            # What is torn here would be passed over anyway; the room is wanted back.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            self._ready = 0
            raise
        self._end = end + len(padding)
        return offset

    def seal(self) -> Contents:
        """Add the table and return what the pack holds; nothing is appended afterwards."""
        return seal(self._descriptor)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_contents(descriptor: int) -> Contents:
    """Return what a pack holds: by its table where it has a whole one, else record by record. Raises OSError."""
    size = os.fstat(descriptor).st_size
    return _read_table(descriptor, size) or _walk(descriptor, size)


def seal(descriptor: int, contents: Contents | None = None) -> Contents:
    """Cut off what follows the last whole record, write the table there, and return what the pack holds.

    ``contents`` is what it is known to hold. Raises OSError; the pack then has no table.
    """
    if contents is None:
        contents = _walk(descriptor, os.fstat(descriptor).st_size)
    _write_table(descriptor, contents)
    return contents


def bury(descriptor: int, record: Record) -> None:
    """Mark a record as dead, for good. Raises OSError."""
    table = _read_table(descriptor, os.fstat(descriptor).st_size)
    write_at(descriptor, [_DEAD], record.offset - ALIGNMENT)
    if table is not None:
        # The other records stay known even where the damage goes on into a header that a walk would stop at.
        _write_table(descriptor, table._replace(records=[other for other in table.records if other != record]))


def reclaim(descriptor: int, live: Container[int], kept: Container[bytes] = ()) -> list[Record]:
    """Mark as dead every record whose block does not begin at a ``live`` offset, give the room back, and return who lives.

    A record of one of the CIDs ``kept`` lives too, unless it was marked before. Works on a full disk. Killed anywhere in
    it, the pack has the same live records, or those from before. Raises OSError.
    """
    size = os.fstat(descriptor).st_size
    contents = _read_table(descriptor, size) or _walk(descriptor, size)
    living = [record for record in contents.records if record.offset in live or record.cid in kept]
    contents = Contents(living, contents.end, sealed=True)
    lives = set(contents.records)
    dead = [record for record in _walk(descriptor, size, dead=True).records if record not in lives]
    for record in dead:
        write_at(descriptor, [_DEAD], record.offset - ALIGNMENT)
    with suppress(OSError):  # without a table the next start walks
        _write_table(descriptor, contents)
    # A table that still has the dead would lead to zeros.
    if _read_table(descriptor, os.fstat(descriptor).st_size) in (None, contents):
        for record in dead:
            punch_hole(descriptor, record.offset, record.size)
    return contents.records


def is_foreign(descriptor: int) -> bool:
    """Return whether a file begins as no pack of this version does, however torn. Raises OSError."""
    head = os.pread(descriptor, len(MAGIC), 0)
    return not MAGIC.startswith(head.rstrip(b"\0"))


def write_at(descriptor: int, buffers: Sequence[Buffer], offset: int, *, write: Write = os.pwritev) -> None:
    """Write all of ``buffers``, one after another, at ``offset``. Raises OSError."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        count = write(descriptor, left, offset)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _read_table(descriptor: int, size: int) -> Contents | None:
    trailer = os.pread(descriptor, ALIGNMENT, max(size - ALIGNMENT, 0))
    if len(trailer) < ALIGNMENT or os.pread(descriptor, len(MAGIC), 0) != MAGIC:
        return None
    tag, count, entries_digest = _TRAILER.unpack_from(trailer)
    end = size - ALIGNMENT - count * _ENTRY.size
    if tag != _TRAILER_TAG or end < ALIGNMENT:
        return None
    entries = os.pread(descriptor, count * _ENTRY.size, end)
    if _table_digest(descriptor, entries) != entries_digest:
        return None
    records = [Record(*entry) for entry in _ENTRY.iter_unpack(entries)]
    if records and records[-1].offset + records[-1].size > end:
        return None  # a piece of the file is lost before the table, so that its places are those of other bytes
    return Contents(records, end, True)


def _write_table(descriptor: int, contents: Contents) -> None:
    os.ftruncate(descriptor, contents.end)
    entries = b"".join(_ENTRY.pack(*record) for record in contents.records)
    trailer = _padded(_TRAILER.pack(_TRAILER_TAG, len(contents.records), _table_digest(descriptor, entries)))
    try:
        write_at(descriptor, [entries, trailer], contents.end)
    except OSError:
        os.ftruncate(descriptor, contents.end)
        raise


def _table_digest(descriptor: int, entries: bytes) -> bytes:
    return digest(os.pread(descriptor, SALT_BYTES, len(MAGIC)) + entries)


def _walk(descriptor: int, size: int, *, dead: bool = False) -> Contents:
    """Read the records one by one, those that are marked as dead only with ``dead``."""
    records: list[Record] = []
    end = ALIGNMENT if os.pread(descriptor, len(MAGIC), 0) == MAGIC else 0
    window, start, last = b"", end, -1  # what was read, from where on, and the last place of a header in it
    length = _SMALL_BYTES
    while end:
        if end - start > last:
            # Small blocks come many at a time, with their headers; large ones are jumped over.
            window = os.pread(descriptor, _WALK_BYTES if length < _SMALL_BYTES else _HEADER.size, end)
            start, last = end, len(window) - _HEADER.size
            if last < 0:
                break
        tag, binary, length = _HEADER.unpack_from(window, end - start)
        offset = end + ALIGNMENT
        if (tag != _LIVE and tag != _DEAD) or length > MAX_CODED_BLOCK_BYTES or offset + length > size:
            break
        if tag == _LIVE or dead:
            if not is_binary_cid(binary):
                break
            records.append(Record(binary, offset, length))
        end = offset + length + -length % ALIGNMENT
    return Contents(records, end, False)


def _padded(data: bytes) -> bytes:
    return data.ljust(ALIGNMENT, b"\0")
