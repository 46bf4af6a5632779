"""When to announce what: paced under the receivers' limits, repeated before records expire. Sans-IO.

A receiver drops provider records beyond 10 messages in 10 s from one peer (py-libp2p 0.8.1), so at most ANNOUNCE_BURST
announcements lie within any ANNOUNCE_WINDOW_S. The window counts from the end of one announcement to the start of another:
then it holds at the receiver too, however long the first was on its way. Due keys go out in the order in which they fell due.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass
from itertools import count

from p2pkv.limits import ANNOUNCE_BURST, ANNOUNCE_PERIOD_S, ANNOUNCE_WINDOW_S

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


@dataclass(slots=True)
class _Key:
    announced: bool = False
    turn: int | None = None  # names the one heap entry that counts; None while the key is being announced


class Announcer:
    """Hand in keys; take what is due with :meth:`next_due`; report every one of these back with :meth:`confirm`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._keys: dict[bytes, _Key] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._turns = count()
        self._under_way = 0
        self._ended: deque[float] = deque(maxlen=ANNOUNCE_BURST)  # when the last announcements ended

    def add(self, key: bytes, now: float) -> None:
        """Announce ``key`` as soon as the pace allows, and then once a period. Known keys stay as scheduled."""
        if key not in self._keys:
            self._keys[key] = _Key()
            self._schedule(key, now)

    def repeat(self, key: bytes, now: float) -> None:
        """Announce ``key`` as soon as the pace allows, also where its turn is later; one under way is not asked for twice."""
        state = self._keys.get(key)
        if state is None:
            self.add(key, now)
        elif state.turn is not None:
            self._schedule(key, now)

    def discard(self, key: bytes) -> None:
        """Stop announcing ``key``; its record runs out by itself."""
        self._keys.pop(key, None)

    def next_due(self, now: float) -> bytes | None:
        """Return a key to announce now, or ``None``."""
        self._drop_stale()
        allowed = self._allowed_at(now)
        if not self._heap or self._heap[0][0] > now or allowed is None or allowed > now:
            return None
        key = heapq.heappop(self._heap)[2]
        self._keys[key].turn = None
        self._under_way += 1
        return key

    def confirm(self, key: bytes, reached: bool, now: float) -> None:
        """Report how the announcement of ``key`` went; it is scheduled again either way, unless it was discarded."""
        self._under_way -= 1
        self._ended.append(now)
        state = self._keys.get(key)
        if state is not None:
            state.announced = state.announced or reached
            wait = ANNOUNCE_PERIOD_S * (1 - _JITTER * self._rng.random()) if reached else _RETRY_S
            self._schedule(key, now + wait)

    def get_timer(self, now: float) -> float | None:
        """Return when :meth:`next_due` may have something; ``None`` for not before the next call of another method."""
        self._drop_stale()
        allowed = self._allowed_at(now)
        if not self._heap or allowed is None:
            return None
        return max(self._heap[0][0], allowed)

    def statistics(self, now: float) -> AnnouncerStatistics:
        late = max((now - due for due, turn, key in self._heap if self._counts(turn, key)), default=0.0)
        return AnnouncerStatistics(len(self._keys), sum(state.announced for state in self._keys.values()), max(late, 0.0))

    def _schedule(self, key: bytes, due: float) -> None:
        turn = next(self._turns)
        self._keys[key].turn = turn
        heapq.heappush(self._heap, (due, turn, key))

    def _counts(self, turn: int, key: bytes) -> bool:
        """Tell the entry that counts from those of a key that was discarded, or discarded and added again."""
        return key in self._keys and self._keys[key].turn == turn

    def _drop_stale(self) -> None:
        while self._heap and not self._counts(self._heap[0][1], self._heap[0][2]):
            heapq.heappop(self._heap)

    def _allowed_at(self, now: float) -> float | None:
        """Return from when on one more announcement keeps the pace; ``None`` while too many are under way."""
        free = ANNOUNCE_BURST - self._under_way
        if free <= 0:
            return None
        # Of the announcements that have ended, the latest ``free`` ones stand in the way.
        return now if len(self._ended) < free else max(now, self._ended[-free] + ANNOUNCE_WINDOW_S)
