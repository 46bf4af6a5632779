"""Read CAR files from the disk, piece by piece: to take an artifact over, to look at it, or to check it where it lies."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2pkv.artifact.read import Artifact
from p2pkv.errors import FormatError, UsageError
from p2pkv.formats.car import CarDecoder
from p2pkv.formats.cid import Cid
from p2pkv.formats.draft import open_root
from p2pkv.ports import Buffer
from p2pkv.store.arriving import Arriving
from p2pkv.store.files import os_errors
from p2pkv.store.progress import Progress, Step, ignore
from p2pkv.store.stored_blocks import not_here
from p2pkv.units import MIB

# A few system calls for each MiB, and little to hold.
_PIECE_BYTES: Final = MIB

Blocks = Sequence[tuple[Cid, bytes]]


class CarReader:
    """An open CAR file; ``total`` and ``done`` are in bytes, the roots are known with the first piece that is yielded."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._decoder = CarDecoder()
        self.total = os.fstat(descriptor).st_size
        self.done = 0

    @property
    def roots(self) -> tuple[Cid, ...]:
        return self._decoder.roots

    def pieces(self) -> Iterator[Blocks]:
        """Yield the blocks of each piece, verified against their CIDs, until the file ends whole.

        Raises what CarDecoder raises: FormatError and its kin, TruncatedError for a file that is cut off, IntegrityError;
        StoreError.
        """
        while piece := self._read():
            blocks = self._decoder.feed(piece)
            self.done += len(piece)
            if self.roots:
                yield blocks
        self._decoder.end()

    def _read(self) -> bytes:
        with os_errors(f"read {self._path}"):
            return os.read(self._descriptor, _PIECE_BYTES)


@contextmanager
def open_car(path: Path) -> Iterator[CarReader]:
    """Open a CAR file. Raises UsageError where there is no file, StoreError."""
    with os_errors(f"read {path}"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise _no_file(path) from None
    try:
        with os_errors(f"read {path}"):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _no_file(path)
            reader = CarReader(path, descriptor)
        yield reader
    finally:
        os.close(descriptor)


def _no_file(path: Path) -> UsageError:
    return UsageError(
        f"there is no file {path}", advice="Name a CAR file, as `p2pkv export` writes it, that the node can see."
    )


class _NoBlocks:
    """A store of nothing."""

    def has(self, cid: Cid) -> bool:
        return False

    def size(self, cid: Cid) -> int:
        raise not_here(cid)

    def read_into(self, cid: Cid, buffer: Buffer) -> int:
        raise not_here(cid)

    def read(self, cid: Cid) -> bytes:
        raise not_here(cid)


@dataclass(frozen=True, slots=True)
class CheckedCar:
    """A CAR file that holds all of an artifact: its root, an envelope or a draft, how many blocks, and bytes of KV, coded."""

    artifact: Artifact
    root: bytes
    blocks: int
    kv_bytes: int
    file_bytes: int

    @property
    def cid(self) -> Cid:
        """The CID of the root."""
        return self.artifact.cid


def check_car(path: Path, on_progress: Progress = ignore) -> CheckedCar:
    """Check all of a CAR file by itself: format, signature where it has one, tokens and chain keys, every node and block.

    Raises UsageError where ``path`` is no file; FormatError and its kin, IntegrityError, SignatureError for what is no
    artifact of this project, TruncatedError for a file that is cut off, FetchIncompleteError where blocks are missing;
    StoreError.
    """
    arriving: Arriving | None = None
    root = b""
    with open_car(path) as car:
        for blocks in car.pieces():
            if arriving is None:
                arriving = Arriving(car.roots, _NoBlocks(), lambda _, data: open_root(data))
            for cid, data in blocks:
                root = root or data
                arriving.add(cid, data)
            on_progress(Step.VERIFYING, car.done, car.total)
    assert arriving is not None, "a CAR that ends whole has roots"
    artifact = arriving.finish(lambda: on_progress(Step.VERIFYING, car.done, car.total))
    return CheckedCar(artifact, root, len(arriving.cids), arriving.kv_bytes, car.done)


def read_root(path: Path) -> bytes:
    """Return the first block of a CAR file, which has to be its one root, and read no further. Raises as :func:`check_car`."""
    with open_car(path) as car:
        for blocks in car.pieces():
            for cid, data in blocks:
                if car.roots != (cid,):
                    break
                return data
    raise FormatError(f"{path} does not begin with its one root")


def is_car(path: Path) -> bool:
    """Return whether a file begins as a CAR does, whatever follows. Raises StoreError."""
    with os_errors(f"read {path}"), path.open("rb") as file:
        start = file.read(10)
    # A varint of one or two bytes, then the map of two fields whose first name is "roots".
    return b"\xa2eroots" in start
