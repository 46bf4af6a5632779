"""Where blocks lie: what a pack is called, and how its bytes are read, unverified. Writers and readers of a home share it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from p2pkv.errors import NotFoundError, UsageError
from p2pkv.store.files import os_errors

_PACK_NAME: Final = re.compile(r"[0-9]{8,}\.pack")


class Location(NamedTuple):
    """Where a block lies: ``size`` bytes from ``offset`` of the pack ``file``, a name in the folder of blocks."""

    file: str
    offset: int
    size: int


def is_pack(name: str) -> bool:
    """Return whether ``name`` is what a pack in the folder of blocks is called, so that it leads nowhere else."""
    return _PACK_NAME.fullmatch(name) is not None


def pack_number(name: str) -> int:
    """Return the number of a pack: later packs have higher ones."""
    return int(name.partition(".")[0])


def read_located(folder: Path | str, location: Location, buffer: memoryview) -> memoryview:
    """Read the bytes at ``location`` into the front of ``buffer`` and return them, unverified.

    Fewer than ``location.size`` come where the file ends early. Raises UsageError for a buffer that is too short,
    NotFoundError where the file is gone, StoreError.
    """
    with opened(folder, location) as descriptor:
        return read_at(descriptor, location, buffer)


@contextmanager
def opened(folder: Path | str, location: Location) -> Iterator[int]:
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


def read_at(descriptor: int, location: Location, buffer: memoryview) -> memoryview:
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
