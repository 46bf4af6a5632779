"""What a session knows of one peer: what is outstanding, how fast it is, what it lacks."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    INITIAL_WINDOW_BLOCKS,
    MAX_BLOCK_TIMEOUT_S,
    MAX_WINDOW_BLOCKS,
    MIN_BLOCK_TIMEOUT_S,
    WINDOW_SECONDS,
)
from p2pkv.units import MIB

# Weight of the newest sample in the running means: about the last eight blocks count.
_GAIN = 1 / 8


@dataclass(slots=True)
class PeerState:
    """One peer of one session. Times are seconds of the monotonic clock that the driver hands in."""

    peer: str
    joined: float
    outstanding: dict[Cid, float] = field(default_factory=dict)  # CID -> when it was asked for, oldest first
    outstanding_bytes: int = 0
    lacks: set[Cid] = field(default_factory=set)
    window: int = INITIAL_WINDOW_BLOCKS
    received_bytes: int = 0
    received_blocks: int = 0
    snubbed: bool = False
    rate: float = 0.0  # bytes per second while something was outstanding; 0 = not measured yet
    busy_since: float = 0.0  # start of the present stretch of work
    last_progress: float = 0.0
    gap_mean: float = 0.0
    gap_deviation: float = 0.0

    def asked(self, cid: Cid, size: int, now: float) -> None:
        if not self.outstanding:
            self.last_progress = now
        self.outstanding[cid] = now
        self.outstanding_bytes += size

    def settle(self, cid: Cid, size: int) -> bool:
        """Take ``cid`` off what is outstanding; tell whether it was there."""
        if self.outstanding.pop(cid, None) is None:
            return False
        self.outstanding_bytes -= size
        return True

    def delivered(self, size: int, now: float) -> None:
        """Work one good block into rate, timing and window."""
        gap = now - self.last_progress
        self.last_progress = now
        self.received_bytes += size
        self.received_blocks += 1
        if self.received_blocks == 1:
            self.gap_mean, self.gap_deviation = gap, gap / 2
        else:
            self.gap_deviation += _GAIN * (abs(gap - self.gap_mean) - self.gap_deviation)
            self.gap_mean += _GAIN * (gap - self.gap_mean)
        if self.gap_mean > 0:
            self.rate = size / self.gap_mean
        if self.snubbed:
            self.snubbed = False
            self.window = INITIAL_WINDOW_BLOCKS
            return
        # Slow start: one more block for each that arrives, up to what the rate moves in WINDOW_SECONDS.
        ceiling = max(INITIAL_WINDOW_BLOCKS, int(self.rate * WINDOW_SECONDS / max(size, 1)))
        self.window = min(self.window + 1, ceiling, MAX_WINDOW_BLOCKS)

    def snub(self) -> None:
        """The peer let its time run out: one block at a time until it delivers again."""
        self.snubbed = True
        self.window = 1
        self.rate = 0.0
        self.outstanding.clear()
        self.outstanding_bytes = 0

    @property
    def deadline(self) -> float | None:
        """When silence becomes a snub; ``None`` while nothing is outstanding."""
        if not self.outstanding:
            return None
        patience = max(MIN_BLOCK_TIMEOUT_S, self.gap_mean + 4 * self.gap_deviation)
        return self.last_progress + min(patience, MAX_BLOCK_TIMEOUT_S)

    @property
    def load(self) -> float:
        """Seconds until the outstanding bytes are here at the present rate: the next block goes where this is least.

        An unmeasured peer counts as moderately fast, so that it is tried but not flooded; a snubbed one as hopeless.
        """
        if self.snubbed:
            return float(self.outstanding_bytes)
        return self.outstanding_bytes / (self.rate or 16 * MIB)
