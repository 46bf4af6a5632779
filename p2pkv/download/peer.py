"""What a session knows of one peer: what is outstanding, how fast it is, what it lacks."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    INITIAL_WINDOW_BLOCKS,
    MAX_BLOCK_TIMEOUT_S,
    MAX_WINDOW_BLOCKS,
    MIN_BLOCK_TIMEOUT_S,
    TAIL_STALL_S,
    WINDOW_SECONDS,
)
from p2pkv.units import MIB

# Weight of the newest sample in the running means: about the last eight blocks count.
_GAIN = 1 / 8


@dataclass(slots=True, eq=False)
class PeerState:
    """One peer of one session. Times are seconds of the monotonic clock that the driver hands in."""

    peer: str
    outstanding: dict[Cid, None] = field(default_factory=dict)  # in the order asked
    outstanding_bytes: int = 0
    lacks: set[Cid] = field(default_factory=set)
    window: int = INITIAL_WINDOW_BLOCKS
    received_bytes: int = 0  # news only
    received_blocks: int = 0
    snubbed: bool = False
    rate: float = 0.0  # bytes per second while something was outstanding; 0 = not measured yet
    last_progress: float = 0.0  # the last answer, or the first ask after an idle time
    samples: int = 0
    size_mean: float = 0.0
    gap_mean: float = 0.0
    gap_deviation: float = 0.0

    @property
    def has_room(self) -> bool:
        """A window is refilled when half of it is free, so that wants travel in batches and not one by one."""
        return len(self.outstanding) <= self.window // 2

    @property
    def full(self) -> bool:
        return len(self.outstanding) >= self.window

    def asked(self, cid: Cid, size: int, now: float) -> None:
        if not self.outstanding:
            self.last_progress = now
        self.outstanding[cid] = None
        self.outstanding_bytes += size

    def settle(self, cid: Cid, size: int) -> bool:
        """Take ``cid`` off what is outstanding; tell whether it was there."""
        if cid not in self.outstanding:
            return False
        del self.outstanding[cid]
        self.outstanding_bytes -= size
        return True

    def forget_outstanding(self) -> None:
        self.outstanding.clear()
        self.outstanding_bytes = 0

    def delivered(self, size: int, now: float, *, news: bool) -> None:
        """Work one good block into rate, timing and window; only ``news`` counts as received."""
        if news:
            self.received_bytes += size
            self.received_blocks += 1
        self._measure(size, now - self.last_progress)
        self.last_progress = now
        if self.snubbed:
            self.snubbed = False
            self.window = INITIAL_WINDOW_BLOCKS
            return
        # Slow start: one more block for each that arrives, up to what the rate moves in WINDOW_SECONDS.
        ceiling = MAX_WINDOW_BLOCKS
        if self.gap_mean > 0:
            ceiling = min(ceiling, max(INITIAL_WINDOW_BLOCKS, int(WINDOW_SECONDS / self.gap_mean)))
        self.window = min(self.window + 1, ceiling)

    def _measure(self, size: int, gap: float) -> None:
        self.samples += 1
        if self.samples == 1:
            self.size_mean, self.gap_mean, self.gap_deviation = float(size), gap, gap / 2
        else:
            self.gap_deviation += _GAIN * (abs(gap - self.gap_mean) - self.gap_deviation)
            self.gap_mean += _GAIN * (gap - self.gap_mean)
            self.size_mean += _GAIN * (size - self.size_mean)
        # Sizes are averaged like gaps: a small node behind large blocks says nothing about the rate.
        if self.gap_mean > 0:
            self.rate = self.size_mean / self.gap_mean

    def snub(self) -> None:
        """The peer let its time run out: one block at a time until it delivers again."""
        self.snubbed = True
        self.window = 1
        self.rate = 0.0
        self.forget_outstanding()

    @property
    def deadline(self) -> float | None:
        """When silence becomes a snub; ``None`` while nothing is outstanding."""
        if not self.outstanding:
            return None
        patience = max(MIN_BLOCK_TIMEOUT_S, self.gap_mean + 4 * self.gap_deviation)
        return self.last_progress + min(patience, MAX_BLOCK_TIMEOUT_S)

    def helped_from(self, seconds: float) -> float:
        """Return when a peer that needs ``seconds`` for it had better take over a block from this one.

        At once where this one has more than that to do, else when it has stalled for that long and longer than it ever does.
        """
        if self.load > seconds:
            return self.last_progress
        return self.last_progress + max(seconds, self.gap_mean + 4 * self.gap_deviation, TAIL_STALL_S)

    @property
    def load(self) -> float:
        """Seconds until the outstanding bytes are here at the present rate: the next block goes where this is least.

        An unmeasured peer counts as moderately fast, so that it is tried but not flooded; a snubbed one as hopeless.
        """
        if self.snubbed:
            return float(self.outstanding_bytes)
        return self.outstanding_bytes / (self.rate or 16 * MIB)
