"""When to announce what: paced under the receivers' limits, repeated before records expire. Sans-IO.

A receiver drops provider records beyond 10 messages in 10 s from one peer (py-libp2p 0.8.1), so announcements pass a token
bucket of ANNOUNCE_BURST that refills at ANNOUNCE_PER_SECOND. Due keys go out in the order in which they became due.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count

from p2pkv.limits import ANNOUNCE_BURST, ANNOUNCE_PER_SECOND, ANNOUNCE_PERIOD_S

# A failed announcement is tried again after this; nobody in reach seldom mends itself faster.
_RETRY_S = 30.0
# Repeats are spread over this share of the period, so that a restart does not bunch them for ever.
_JITTER = 0.1


@dataclass(frozen=True, slots=True)
class AnnouncerStatistics:
    """Keys under care, of these announced at least once, and how late the most overdue one is in seconds."""

    keys: int
    announced: int
    late_s: float


class Announcer:
    """Hand in keys; take what is due with :meth:`next_due`; report back with :meth:`confirm`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._heap: list[tuple[float, int, bytes]] = []
        self._keys: dict[bytes, bool] = {}  # key -> announced at least once
        self._order = count()
        self._tokens = float(ANNOUNCE_BURST)
        self._refilled = 0.0

    def add(self, key: bytes, now: float) -> None:
        """Announce ``key`` as soon as the pace allows, and then once a period. Known keys stay as scheduled."""
        if key not in self._keys:
            self._keys[key] = False
            heapq.heappush(self._heap, (now, next(self._order), key))

    def discard(self, key: bytes) -> None:
        """Stop announcing ``key``; its record runs out by itself."""
        self._keys.pop(key, None)

    def next_due(self, now: float) -> bytes | None:
        """Return a key to announce now, or ``None``."""
        self._drop_discarded()
        self._refill(now)
        if not self._heap or self._heap[0][0] > now or self._tokens < 1:
            return None
        self._tokens -= 1
        return heapq.heappop(self._heap)[2]

    def confirm(self, key: bytes, reached: bool, now: float) -> None:
        """Report how the announcement of ``key`` went; it is scheduled again either way."""
        if key not in self._keys:
            return
        self._keys[key] = self._keys[key] or reached
        wait = ANNOUNCE_PERIOD_S * (1 - _JITTER * self._rng.random()) if reached else _RETRY_S
        heapq.heappush(self._heap, (now + wait, next(self._order), key))

    def get_timer(self, now: float) -> float | None:
        """Return when :meth:`next_due` may have something."""
        self._drop_discarded()
        if not self._heap:
            return None
        self._refill(now)
        pace = now if self._tokens >= 1 else now + (1 - self._tokens) / ANNOUNCE_PER_SECOND
        return max(self._heap[0][0], pace)

    def statistics(self, now: float) -> AnnouncerStatistics:
        late = max((now - due for due, _, key in self._heap if key in self._keys), default=0.0)
        return AnnouncerStatistics(len(self._keys), sum(self._keys.values()), max(late, 0.0))

    def _refill(self, now: float) -> None:
        elapsed = max(now - self._refilled, 0.0)
        self._tokens = min(float(ANNOUNCE_BURST), self._tokens + elapsed * ANNOUNCE_PER_SECOND)
        self._refilled = now

    def _drop_discarded(self) -> None:
        while self._heap and self._heap[0][2] not in self._keys:
            heapq.heappop(self._heap)
