"""What both ends of a bulk lane share: the frame, the counters, the name of the threads.

A lane carries frames in one direction, provider to consumer: the binary CID (36 bytes), the length (u32, big endian), the
block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

_Self = TypeVar("_Self")

THREAD_NAME: Final = "p2pkv bulk"


@dataclass(frozen=True, slots=True)
class BulkStatistics:
    """What the bulk lane has done since it was made, and the lanes that are open now."""

    sending_lanes: int = 0
    receiving_lanes: int = 0
    blocks_sent: int = 0
    bytes_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    refused_tokens: int = 0  # wrong, late, used before, or of another peer
    dropped_strangers: int = 0  # no TLS 1.3, no greeting in time, or too many at once
    refused_certificates: int = 0  # as consumer: not the certificate of the offer
    protocol_faults: int = 0  # as consumer: a provider sent what nobody asked for, or of another size


class BulkCounters:
    """The counting part of :class:`BulkStatistics`; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = asdict(BulkStatistics())

    def add(self, **amounts: int) -> None:
        """Add to the fields named."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def snapshot(self, *, sending_lanes: int, receiving_lanes: int) -> BulkStatistics:
        return BulkStatistics(**{**self._totals, "sending_lanes": sending_lanes, "receiving_lanes": receiving_lanes})


def in_named_thread(work: Callable[[_Self], None]) -> Callable[[_Self], None]:
    """Name the worker thread while it serves a lane, so that thread dumps tell lanes from idle workers."""

    @functools.wraps(work)
    def named(self: _Self) -> None:
        thread = threading.current_thread()
        idle_name, thread.name = thread.name, THREAD_NAME
        try:
            work(self)
        finally:
            thread.name = idle_name

    return named
