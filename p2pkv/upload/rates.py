"""Rates in bytes per second: one that is kept below a limit, and one that is measured."""

from __future__ import annotations

import math
from typing import Final

from p2pkv.limits import MAX_CODED_BLOCK_BYTES, UPLOAD_BURST_S

# Some five blocks of a slow uplink: figures for people, steady enough to be read and young enough to be believed.
_MEASURED_S: Final = 5.0


class TokenBucket:
    """Holds what is sent below ``rate`` bytes per second over any time, plus one burst.

    The burst is what ``rate`` moves in UPLOAD_BURST_S, and at least the largest block, which could never be sent otherwise.
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.burst = max(float(MAX_CODED_BLOCK_BYTES), rate * UPLOAD_BURST_S)
        self._tokens = self.burst
        self._at = now

    def ready_at(self, size: int, now: float) -> float:
        """Return when ``size`` bytes may be sent, of which there are no more than a burst; ``now`` if at once."""
        tokens = self._filled(now)
        return now if tokens >= size else now + (size - tokens) / self.rate

    def full(self, now: float) -> bool:
        """Whether nothing that was ever taken matters any more."""
        return self._filled(now) >= self.burst

    def take(self, size: int, now: float) -> None:
        """Take note that ``size`` bytes are being sent, at or after the time that :meth:`ready_at` gave."""
        self._tokens = max(0.0, self._filled(now) - size)  # below zero by the rounding of a sum only
        self._at = now

    def _filled(self, now: float) -> float:
        return min(self.burst, self._tokens + (now - self._at) * self.rate)


class RateMeter:
    """Measures bytes per second over the last seconds, the youngest weighing most."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = -math.inf

    def add(self, size: int, now: float) -> None:
        self._rate = self.rate(now) + size / _MEASURED_S
        self._at = now

    def rate(self, now: float) -> float:
        return self._rate * math.exp((self._at - now) / _MEASURED_S) if self._rate else 0.0
