"""What a publisher staged: the pack in its folder, before a daemon takes it over."""

from __future__ import annotations

from pathlib import Path

from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.pack import Record, read_contents
from tests.support.stores import flip


def staged_records(home: Path, name: str) -> dict[Cid, Record]:
    """Return where each block of the staging folder ``name`` lies in its pack, in the order in which they were staged."""
    with staged_pack(home, name).open("rb") as file:
        return {Cid.from_bytes(record.cid): record for record in read_contents(file.fileno()).records}


def staged_block(home: Path, name: str, cid: Cid) -> bytes:
    """Return the bytes of a staged block, unverified."""
    record = staged_records(home, name)[cid]
    with staged_pack(home, name).open("rb") as file:
        file.seek(record.offset)
        return file.read(record.size)


def flip_staged(home: Path, name: str, cid: Cid, bit: int) -> None:
    """Flip one bit of a staged block in place."""
    record = staged_records(home, name)[cid]
    data = flip(staged_block(home, name, cid), bit)
    with staged_pack(home, name).open("r+b") as file:
        file.seek(record.offset)
        file.write(data)


def staged_pack(home: Path, name: str) -> Path:
    return HomeLayout(home).staging / name / "blocks.pack"
