"""Blocks on disk for reading: a folder of packs, an index of them in memory, and no byte trusted before its hash.

Blocks are read with ``pread`` into memory of the caller's. Mapping them would spare a copy that costs less than the page
faults of the mapping, and a file that is cut off under a mapping ends the process that looks at it.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from p2pkv.errors import IntegrityError, NotFoundError, P2pkvError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.ports import BlockReader
from p2pkv.store.files import os_errors
from p2pkv.store.location import Location, is_pack, opened, pack_number, read_at
from p2pkv.store.pack import Contents, Record, read_contents
from p2pkv.store.verified import Stamp, VerifiedLately

logger = logging.getLogger(__name__)

# A folder in a pack's place, or a bad spot of the disk: the blocks in there are missing, and nothing else is.
ONE_FILE_ONLY: Final = frozenset({errno.EISDIR, errno.EIO})


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

    def nodes(self) -> list[Cid]:
        """Return the CIDs of all that is DAG-CBOR, in the order in which it was stored."""
        places = ((pack_number(at.file), at.offset, cid) for cid, at in [*self._index.items()] if cid[1] == Codec.DAG_CBOR)
        return [Cid.from_bytes(cid) for _, _, cid in sorted(places)]

    def size(self, cid: Cid) -> int:
        """Return the bytes of the block. Raises NotFoundError."""
        return self._find(cid).size

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes of a block.

        Raises NotFoundError; IntegrityError for bytes that do not hash to ``cid``, which are then forgotten; StoreError.
        """
        return self._read(cid, self._find(cid))

    def read_into(self, cid: Cid, buffer: bytearray | memoryview) -> int:
        """Read a block into the front of ``buffer`` for somebody who verifies it, and return its size in bytes.

        It is verified here too, unless it was lately (``verified``). What is in ``buffer`` after an error is not to be used.
        Raises what :meth:`read` raises, and UsageError where the buffer is too short.
        """
        location = self._find(cid)
        with self._gone_means_missing(cid, location), opened(self.folder, location) as descriptor:
            stamp = Stamp.of(descriptor)
            data = read_at(descriptor, location, memoryview(buffer).cast("B"))
        if not self.verified.has(location.file, stamp, cid.binary):
            if not cid.matches(data):
                raise self._damage(cid, location)
            self.verified.add(location.file, stamp, [cid.binary])
        elif self._index.get(cid.binary) is not location:
            raise not_here(cid)  # it was swept meanwhile, and nobody has looked at what was read
        return location.size

    def _read(self, cid: Cid, location: Location) -> bytes:
        with self._gone_means_missing(cid, location), opened(self.folder, location) as descriptor:
            data = os.pread(descriptor, location.size, location.offset)
        if not cid.matches(data):
            raise self._damage(cid, location)
        return data

    def _load(self) -> None:
        with _collector_paused():
            self._load_packs()

    def _load_packs(self) -> None:
        for name in sorted(filter(is_pack, os.listdir(self.folder)), key=pack_number):
            try:
                contents = self._read_pack(f"{self.folder}/{name}")
            except FileNotFoundError:
                continue  # the process that may change them removed it just now
            except OSError as error:
                if error.errno not in ONE_FILE_ONLY:
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
        for cid, offset, size in records:
            self._index[cid] = Location(name, offset, size)

    def _find(self, cid: Cid) -> Location:
        location = self._index.get(cid.binary)
        if location is None:
            raise not_here(cid)
        return location

    @contextmanager
    def _gone_means_missing(self, cid: Cid, location: Location) -> Iterator[None]:
        try:
            yield
        except NotFoundError:
            self._forget(cid, location)
            raise not_here(cid) from None

    def _damage(self, cid: Cid, location: Location) -> P2pkvError:
        self._forget(cid, location)
        return damaged(cid)

    def _forget(self, cid: Cid, location: Location) -> None:
        """Drop a location, unless a good one took its place meanwhile."""
        if self._index.get(cid.binary) is location:
            self._index.pop(cid.binary, None)  # another thread may find the same damage


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's collector of cycles: it would walk again and again through what is loaded, and none of it is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def not_here(cid: Cid) -> NotFoundError:
    return NotFoundError(
        f"block {cid} is not stored here", advice="Fetch the artifact that it belongs to; what is here is kept."
    )
