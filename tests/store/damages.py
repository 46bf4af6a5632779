"""What the tests of stored blocks share: blocks, the ways to read them, and what can happen to their packs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.location import Location
from p2pkv.store.pack import Contents, read_contents
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv.units import KIB

DATA = os.urandom(192 * KIB)
CID = Cid.of_block(DATA)
SMALL = [bytes([number]) * 1000 for number in range(20)]
SMALL_CIDS = [Cid.of_block(data) for data in SMALL]
NAME = "00000001.pack"


def by_buffer(blocks: StoredBlocks, cid: Cid) -> bytes:
    buffer = bytearray(MAX_CODED_BLOCK_BYTES)
    return bytes(buffer[: blocks.read_into(cid, buffer)])


Read = Callable[[StoredBlocks, Cid], bytes]
every_way_to_read = pytest.mark.parametrize("read", [StoredBlocks.read, by_buffer])


def overwrite(pack: Path, offset: int, data: bytes) -> None:
    with pack.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# What happens to a pack, and to the block that lies at a place in it.
DAMAGES: dict[str, Callable[[Path, Location], object]] = {
    "flipped bit": lambda pack, at: overwrite(pack, at.offset + at.size - 1, bytes([DATA[-1] ^ 1])),
    "first byte": lambda pack, at: overwrite(pack, at.offset, bytes([DATA[0] ^ 0x80])),
    "zero filled": lambda pack, at: overwrite(pack, at.offset, bytes(at.size)),
    "swapped": lambda pack, at: overwrite(pack, at.offset, os.urandom(at.size)),
    "moved": lambda pack, at: overwrite(pack, at.offset, DATA[1:] + DATA[:1]),
    "cut off at its end": lambda pack, at: os.truncate(pack, at.offset + at.size - 1),
    "cut off at its start": lambda pack, at: os.truncate(pack, at.offset),
    "cut off before its header": lambda pack, at: os.truncate(pack, at.offset - 70),
    "emptied": lambda pack, at: os.truncate(pack, 0),
    "huge": lambda pack, at: pack.write_bytes(os.urandom(at.offset + at.size + MAX_CODED_BLOCK_BYTES)),
}


def reopened(folder: Path) -> BlockPacks:
    """Return the blocks as the next start finds them; nothing is written, so that closing it changes nothing."""
    return BlockPacks(folder)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_pack(path: Path) -> Contents:
    with opened(path) as descriptor:
        return read_contents(descriptor)


def contents_of(pack: Path) -> tuple[list[bytes], bool]:
    """Return the CIDs of a pack and whether it is sealed."""
    contents = read_pack(pack)
    return [record.cid for record in contents.records], contents.sealed
