"""When to look up what which publisher says of itself: at once, then every period, sooner where it matters. Sans-IO.

Look-ups of a start are spread over the first minute, and those of a period over a tenth of it, so that a thousand trusted
publishers are no storm. At most MAX_STATEMENT_LOOKUPS are under way at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from p2pkv.limits import MAX_FOLLOWED_PUBLISHERS, MAX_STATEMENT_LOOKUPS, STATEMENTS_PERIOD_S, STATEMENTS_RETRY_S

# The first of many look-ups begins at once, the last one after so long.
_SPREAD_S = 60.0
# A few publishers are all looked up at once.
_AT_ONCE = 8
_JITTER = 0.1


@dataclass(slots=True)
class _Followed:
    due: float
    under_way: bool = False
    asked: float | None = None  # when the last look-up ended


class FollowedPublishers:
    """Say whom to follow, take who is due with :meth:`next_due`, and report with :meth:`conclude` how it went."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._followed: dict[str, _Followed] = {}
        self._under_way = 0

    def follow(self, publishers: Iterable[str], now: float) -> None:
        """Follow exactly ``publishers`` (did:key), at most MAX_FOLLOWED_PUBLISHERS, the first ones; new ones are due soon."""
        wanted = list(dict.fromkeys(publishers))[:MAX_FOLLOWED_PUBLISHERS]
        new = [publisher for publisher in wanted if publisher not in self._followed]
        for publisher in self._followed.keys() - set(wanted):
            del self._followed[publisher]
        for at, publisher in enumerate(new):
            wait = 0.0 if at < _AT_ONCE else _SPREAD_S * at / len(new)
            self._followed[publisher] = _Followed(now + wait)

    def hasten(self, publisher: str, now: float) -> None:
        """Look ``publisher`` up now if it is followed and was not looked up within STATEMENTS_RETRY_S."""
        followed = self._followed.get(publisher)
        if followed is not None:
            soonest = now if followed.asked is None else max(now, followed.asked + STATEMENTS_RETRY_S)
            followed.due = min(followed.due, soonest)

    def next_due(self, now: float) -> str | None:
        """Return the publisher to look up now, the one that waits longest, or ``None``. It is under way from then on."""
        timer = self.get_timer()
        if timer is None or timer > now:
            return None
        publisher = min(self._waiting(), key=lambda publisher: self._followed[publisher].due)
        self._followed[publisher].under_way = True
        self._under_way += 1
        return publisher

    def conclude(self, publisher: str, answered: bool, now: float) -> None:
        """Report that a look-up has ended, and whether anybody answered; it is due again either way."""
        self._under_way -= 1
        followed = self._followed.get(publisher)
        if followed is not None:
            followed.under_way, followed.asked = False, now
            wait = STATEMENTS_PERIOD_S if answered else STATEMENTS_RETRY_S
            followed.due = now + wait * (1 - _JITTER * self._rng.random())

    def get_timer(self) -> float | None:
        """Return when :meth:`next_due` has something; ``None`` for not before the next call of another method."""
        if self._under_way >= MAX_STATEMENT_LOOKUPS:
            return None
        return min((self._followed[publisher].due for publisher in self._waiting()), default=None)

    def _waiting(self) -> Iterator[str]:
        return (publisher for publisher, followed in self._followed.items() if not followed.under_way)
