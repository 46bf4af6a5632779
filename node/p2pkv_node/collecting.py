"""What was collected since the start, and why, as the node's operator sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from p2pkv.store.collect import Collected


class Why(StrEnum):
    """Why the node collected."""

    ABOVE_HIGH_MARK = "above the high mark"
    ASKED_FOR = "asked for"


@dataclass(frozen=True, slots=True)
class Collection:
    """One that is over: ``at`` in seconds since the epoch, ``freed_bytes`` that the disk got back."""

    at: float
    why: Why
    evicted: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class CollectionStatistics:
    """Sums since the start. ``over_quota``: what the ``last`` one left is too much, and all of it is pinned or leased."""

    count: Mapping[Why, int]
    evicted: int
    freed_bytes: int
    last: Collection | None
    over_quota: bool


@dataclass(slots=True)
class Collections:
    """Keeps count."""

    _count: Counter[Why] = field(default_factory=Counter)
    _evicted: int = 0
    _freed_bytes: int = 0
    _last: Collection | None = None
    _over_quota: bool = False

    def add(self, collected: Collected, why: Why, now: float) -> None:
        """Note a collection that was no dry run; ``now`` in seconds since the epoch."""
        # A pack that is sealed for it may take more than its holes give back.
        last = Collection(now, why, len(collected.evicted), max(0, collected.freed))
        self._count[why] += 1
        self._evicted += last.evicted
        self._freed_bytes += last.freed_bytes
        self._last, self._over_quota = last, collected.over_quota

    def statistics(self) -> CollectionStatistics:
        """Return a frozen view."""
        count = {why: self._count[why] for why in Why}
        return CollectionStatistics(count, self._evicted, self._freed_bytes, self._last, self._over_quota)
