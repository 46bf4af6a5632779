"""Which blocks were found intact lately: a block that many peers ask for is hashed once, and not once for each of them.

What was verified counts for REVERIFY_AFTER_S, and only while its file is unchanged: any write moves the file's time of change,
which no program can set. A disk that corrupts a byte on its own meanwhile is found out by the peer, who verifies what it gets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from p2pkv.limits import REVERIFY_AFTER_S


class Stamp(NamedTuple):
    """What tells whether a file is the same and unchanged."""

    device: int
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, file: int | str) -> Stamp:
        """Return the stamp of a file, open or by its path; taken before its bytes are read. Raises OSError."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


@dataclass(slots=True)
class _File:
    stamp: Stamp
    since: float
    blocks: set[bytes] = field(default_factory=set)


class VerifiedLately:
    """Blocks by file and binary CID. Safe from any thread. ``clock`` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._files: dict[str, _File] = {}

    def has(self, file: str, stamp: Stamp, cid: bytes) -> bool:
        """Return whether the block was intact in this file as it is now."""
        known = self._files.get(file)
        return known is not None and cid in known.blocks and self._counts(known, stamp)

    def add(self, file: str, stamp: Stamp, cids: Iterable[bytes]) -> None:
        """Take note of blocks that were read after ``stamp`` was taken, and were intact."""
        known = self._files.get(file)
        if known is None or not self._counts(known, stamp):
            known = self._files[file] = _File(stamp, self._clock())
        known.blocks.update(cids)

    def forget(self, file: str) -> None:
        """Drop a file that is gone."""
        self._files.pop(file, None)

    def _counts(self, known: _File, stamp: Stamp) -> bool:
        return known.stamp == stamp and self._clock() - known.since < REVERIFY_AFTER_S
