"""Publishing and reading back, each beside the same bytes as one plain file."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench import artifacts
from bench.processes import node_process
from bench.settle import settle
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv.units import MIB

SHAPE: Final = artifacts.LLAMA
# A node prepares its store when it had nothing to do for two seconds; measured is a daemon that has been running.
_IDLE_S: Final = 3.0


def measure_disk(folder: Path, segments: Sequence[Sequence[bytes]], repetition: int) -> Iterator[dict[str, Any]]:
    """Publish ``segments`` to a fresh node, write them to a plain file, read both back, and yield a row of each.

    Nothing stays in ``folder``.
    """
    home, plain = folder / "home", folder / "plain"
    size = sum(len(layer) for layers in segments for layer in layers)
    published: list[artifacts.Published] = []
    try:
        with node_process(home) as node, artifacts.control(home) as http:
            writes: dict[str, Callable[[], None]] = {
                "publish": lambda: published.append(artifacts.publish(http, home, SHAPE, segments)),
                "plain_write": lambda: write_plain(plain, segments),
            }
            for name in in_turn(writes, repetition):
                settle([node.process.pid], size, _IDLE_S)
                yield _measure(name, repetition, size, writes[name])
        folder_of_packs = HomeLayout(home).blocks
        stored = StoredBlocks(folder_of_packs)
        buffer = bytearray(SHAPE.block_bytes)
        reads: dict[str, Callable[[], None]] = {
            "read_verified": lambda: read_verified(stored, published[0].cids, buffer),
            "plain_read": lambda: read_plain(plain, buffer),
        }
        settle([], size)
        for path in (plain, *folder_of_packs.iterdir()):
            read_plain(path, buffer)  # both come from the page cache below
        for name in in_turn(reads, repetition):
            yield _measure(name, repetition, size, reads[name])
    finally:
        shutil.rmtree(home, ignore_errors=True)
        plain.unlink(missing_ok=True)


def in_turn(cases: Mapping[str, object], repetition: int) -> list[str]:
    """Return the names in their order, and backwards in every second repetition: what goes first may find another disk."""
    return list(cases)[:: 1 if repetition % 2 else -1]


def write_plain(path: Path, segments: Sequence[Sequence[bytes]]) -> None:
    """Write one file and wait until it is on the disk."""
    with path.open("xb") as file:
        for layers in segments:
            file.writelines(layers)
        file.flush()
        os.fsync(file.fileno())


def read_verified(blocks: StoredBlocks, cids: Sequence[Cid], buffer: bytearray) -> None:
    """Read every block into ``buffer``. Each is hashed where ``blocks`` has read none of them yet. Raises as read_into."""
    for cid in cids:
        blocks.read_into(cid, buffer)


def read_plain(path: Path, buffer: bytearray) -> None:
    """Read one file through ``buffer``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)


def _measure(case: str, repetition: int, size: int, work: Callable[[], None]) -> dict[str, Any]:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    mib = size / MIB
    return {"case": case, "repetition": repetition, "data_mib": mib, "seconds": seconds, "mib_s": mib / seconds}
