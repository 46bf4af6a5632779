"""Block stores that misbehave on purpose, to be put under a real node with ``serve_from``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from p2pkv.formats.cid import Cid
from p2pkv.ports import BlockStore, Buffer
from p2pkv.store.blocks import BlockFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import Store

# Far above what any of these waits for, and below the time limit of a test.
GATE_TIMEOUT_S = 20.0


class TamperedStore:
    """A store whose reads pass through ``tamper(cid, data)``: it may change the bytes, wait, or tell somebody."""

    def __init__(self, inner: BlockStore, tamper: Callable[[Cid, bytes], bytes]) -> None:
        self._inner = inner
        self._tamper = tamper

    def has(self, cid: Cid) -> bool:
        return self._inner.has(cid)

    def read(self, cid: Cid) -> bytes:
        return self._tamper(cid, self._inner.read(cid))

    def write(self, cid: Cid, data: Buffer) -> None:
        self._inner.write(cid, data)


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


def block_file(home: Path, cid: Cid) -> Path:
    """Return the file of a block under ``home``."""
    return Path(BlockFiles(HomeLayout(home).blocks).path(cid))


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
