"""Pack files put together by hand from the description in :mod:`p2pkv.store.pack`, with nothing of its code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import digest
from p2pkv.store.pack import Record

UNIT = 64
SALT = bytes(range(32))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % UNIT)


def head(salt: bytes = SALT) -> bytes:
    return padded(b"p2pkvPK1" + salt)


def header(binary: bytes, size: int, tag: bytes = b"BLCK") -> bytes:
    return padded(tag + binary + struct.pack(">I", size))


def record(data: bytes, cid: Cid | None = None, tag: bytes = b"BLCK") -> bytes:
    return header((cid or Cid.of_block(data)).binary, len(data), tag) + padded(data)


def table(records: Sequence[Record], salt: bytes = SALT) -> bytes:
    entries = b"".join(found.cid + struct.pack(">QI", found.offset, found.size) for found in records)
    return entries + padded(b"TABL" + struct.pack(">I", len(records)) + digest(salt + entries))


def records_of(blocks: Sequence[bytes]) -> list[Record]:
    """Return where blocks lie that follow each other from the start of a pack."""
    found: list[Record] = []
    end = UNIT
    for data in blocks:
        found.append(Record(Cid.of_block(data).binary, end + UNIT, len(data)))
        end += UNIT + len(padded(data))
    return found


def unsealed(blocks: Sequence[bytes], salt: bytes = SALT) -> bytes:
    return b"".join([head(salt), *map(record, blocks)])


def sealed(blocks: Sequence[bytes], salt: bytes = SALT) -> bytes:
    return unsealed(blocks, salt) + table(records_of(blocks), salt)
