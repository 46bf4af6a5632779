"""Block stores that misbehave on purpose, to be put under a real node with ``serve_from``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from p2pkv.formats.cid import Cid
from p2pkv.ports import BlockStore
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location
from p2pkv.store.store import Store
from p2pkv.store.stored_blocks import StoredBlocks
from sims.store import TamperedStore

# Far above what any of these waits for, and below the time limit of a test.
GATE_TIMEOUT_S = 20.0


def tampering(tamper: Callable[[Cid, bytes], bytes]) -> Callable[[Store], BlockStore]:
    """Return what ``open_node`` takes as ``serve_from``."""
    return lambda store: TamperedStore(store, tamper)


def flip(data: bytes, bit: int) -> bytes:
    """Return ``data`` with one bit flipped; negative bits count from the end."""
    flipped = bytearray(data)
    bit %= 8 * len(data)
    flipped[bit // 8] ^= 1 << (bit % 8)
    return bytes(flipped)


def flip_file(path: Path | str, bit: int) -> None:
    """Flip one bit of a file in place, as a failing disk would."""
    path = Path(path)
    path.write_bytes(flip(path.read_bytes(), bit))


def block_location(home: Path, cid: Cid) -> tuple[Path, Location]:
    """Return the pack that holds a block under ``home``, and the block's place there; a daemon may be running there."""
    folder = HomeLayout(home).blocks
    location = StoredBlocks(folder).locate(cid)
    assert location is not None, f"block {cid} is not stored in {home}"
    return folder / location.file, location


def damage_block(home: Path, cid: Cid, data: bytes) -> None:
    """Overwrite a stored block in place with ``data`` and zeros; what lies around the block stays as it is."""
    pack, location = block_location(home, cid)
    assert len(data) <= location.size, "that would damage the neighbour too"
    with pack.open("r+b") as file:
        file.seek(location.offset)
        file.write(data.ljust(location.size, b"\0"))


def flip_block(home: Path, cid: Cid, bit: int) -> None:
    """Flip one bit of a stored block in place, as a failing disk would; negative bits count from the block's end."""
    pack, location = block_location(home, cid)
    with pack.open("r+b") as file:
        file.seek(location.offset)
        data = flip(file.read(location.size), bit)
        file.seek(location.offset)
        file.write(data)


def cut_off(home: Path, cid: Cid) -> None:
    """End the pack of a stored block in the middle of the block, as a power cut may; blocks after it are gone too."""
    pack, location = block_location(home, cid)
    os.truncate(pack, location.offset + location.size // 2)


class Gate:
    """Closed until :meth:`open`; threads wait at it, and :attr:`reached` tells that one does."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.reached = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(GATE_TIMEOUT_S), "nobody opened the gate"
