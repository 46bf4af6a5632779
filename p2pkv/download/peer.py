"""What a session knows of one peer: what is outstanding, how fast it is, what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    INITIAL_WINDOW_BYTES,
    MAX_BLOCK_TIMEOUT_S,
    MAX_WINDOW_BLOCKS,
    MIN_BLOCK_TIMEOUT_S,
    MIN_STALL_S,
    TAIL_STALL_S,
    WINDOW_SECONDS,
)
from p2pkv.units import MIB

# Weight of the newest sample in the running means: about the last eight blocks count.
_GAIN = 1 / 8
_KNOWN_SAMPLES = 8  # after so many, the means say what is usual
_UNMEASURED_RATE = 16 * MIB
_FIRST_BLOCKS = 2
# How many dont-haves in a row open the window: the answer to so many wants is one round trip.
_MAX_DENIED_BLOCKS = 64


@dataclass(slots=True, eq=False)
class PeerState:
    """One peer of one session. Times are seconds of the monotonic clock that the driver hands in."""

    peer: str
    outstanding: dict[Cid, None] = field(default_factory=dict)  # in the order asked
    outstanding_bytes: int = 0
    lacks: set[Cid] = field(default_factory=set)
    window: float = INITIAL_WINDOW_BYTES
    received_bytes: int = 0  # news only
    received_blocks: int = 0
    snubbed: bool = False
    rate: float = 0.0  # bytes per second while something was outstanding; 0 = not measured yet
    last_progress: float = 0.0  # the last answer, or the first ask after an idle time
    samples: int = 0
    size_mean: float = 0.0
    gap_mean: float = 0.0
    gap_deviation: float = 0.0
    denied_bytes: int = 0  # what dont-haves in a row have opened the window by

    @property
    def has_room(self) -> bool:
        """A window is refilled when half of it is free, so that wants travel in batches and not one by one."""
        if self.snubbed:
            return not self.outstanding
        return 2 * self.outstanding_bytes <= self.window and 2 * len(self.outstanding) <= MAX_WINDOW_BLOCKS

    @property
    def full(self) -> bool:
        # Before the rate is known, one block is on its way while the peer reads the next, however large they are.
        if not self.samples and not self.snubbed and len(self.outstanding) < _FIRST_BLOCKS:
            return False
        return self.outstanding_bytes >= self.window or len(self.outstanding) >= MAX_WINDOW_BLOCKS

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

    def delivered(self, sizes: Sequence[int], now: float) -> None:
        """Work good blocks that came together into rate, timing and window."""
        # What arrives together was under way together: each took its share of the time.
        for size in sizes:
            self._measure(size, (now - self.last_progress) / len(sizes))
        self.last_progress = now
        if self.snubbed:
            self.snubbed = False
            self.window = INITIAL_WINDOW_BYTES
            return
        # Slow start: twice as much more as arrives, which doubles the window each time that half of it is here, up to what the
        # rate moves in WINDOW_SECONDS: of a slow peer one block at a time. The rate is known from the first block on.
        ceiling = WINDOW_SECONDS * self.rate if self.rate else inf
        self.window = min(self.window - self.denied_bytes + 2 * sum(sizes), ceiling)
        self.denied_bytes = 0

    def answered(self, now: float) -> None:
        """Take a sign of life that says nothing of the rate: a node came, which is small."""
        self.last_progress = now

    def denied(self, size: int, now: float) -> None:
        """Work a dont-have in. The window opens until a block comes, so that a peer with few blocks is soon known."""
        self.last_progress = now
        if not self.snubbed and self.denied_bytes < _MAX_DENIED_BLOCKS * size:
            self.window += size
            self.denied_bytes += size

    def _measure(self, size: float, gap: float) -> None:
        self.samples += 1
        if self.samples == 1:
            self.size_mean, self.gap_mean, self.gap_deviation = size, gap, gap / 2
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
        self.denied_bytes = 0
        self.rate = 0.0
        self.forget_outstanding()

    def deadline(self, heard_at: float) -> float | None:
        """Return when silence becomes a snub; ``None`` while nothing is outstanding. ``heard_at``: of any peer."""
        if not self.outstanding:
            return None
        usual = self.gap_mean + 4 * self.gap_deviation
        patience = min(max(MIN_BLOCK_TIMEOUT_S, usual), MAX_BLOCK_TIMEOUT_S)
        stall = max(MIN_STALL_S, usual)
        if self.samples >= _KNOWN_SAMPLES and stall < patience and heard_at > self.last_progress + stall / 2:
            patience = stall
        return self.last_progress + patience

    def helped_from(self, seconds: float) -> float:
        """Return when a peer that needs ``seconds`` for it had better take over a block from this one.

        At once where this one has more than that to do, else when it has stalled for that long and longer than it ever does.
        """
        if self.seconds_for(0) > seconds:
            return self.last_progress
        return self.last_progress + max(seconds, self.gap_mean + 4 * self.gap_deviation, TAIL_STALL_S)

    @property
    def pace(self) -> float:
        """Bytes per second to reckon with. An unmeasured peer counts as moderately fast, so it is tried but not flooded."""
        return self.rate or _UNMEASURED_RATE

    def seconds_for(self, size: int) -> float:
        """Return when ``size`` bytes more would be here, after what is outstanding: a block goes where this is least."""
        return (self.outstanding_bytes + size) / self.pace
