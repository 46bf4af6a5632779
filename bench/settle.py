"""How the machine gets into the same state before each measurement: at rest, and with memory that has been in use."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_SETTLE_STEP_S: Final = 0.5
_SETTLE_AT_MOST_S: Final = 30.0
_LONGEST_TICK_S: Final = 0.5  # libtorrent's
_WARM_COPIES: Final = 4  # what is received lies in memory twice at most: in the receiver's, and in the page cache


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a living process, its ended threads included, to a clock tick."""
    # The name of the process stands in parentheses and may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def settle(pids: Sequence[int], data_bytes: int, at_least_s: float = 0.0) -> None:
    """Wait until the processes have nothing to do, as those that have run for a while, and all earlier writes are done.

    Then wait for a random moment, so that a system that works in ticks is met in any part of one.
    """
    os.sync()
    time.sleep(at_least_s)
    deadline = time.monotonic() + _SETTLE_AT_MOST_S
    before = sum(map(cpu_seconds, pids))
    while time.monotonic() < deadline:
        time.sleep(_SETTLE_STEP_S)
        now = sum(map(cpu_seconds, pids))
        if now - before <= 1 / _TICKS_PER_S:
            break
        before = now
    time.sleep(random.uniform(0, _LONGEST_TICK_S))
    warm_memory(_WARM_COPIES * data_bytes)


def warm_memory(size: int) -> None:
    """Touch so much of the machine's free memory that what is used next has been in use.

    A virtual machine gives memory that has been free for some seconds back to its host. To get a page again costs many times
    what it costs to write it, and whether a transfer meets such pages is chance.
    """
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))
