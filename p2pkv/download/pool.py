"""The wants of a session that nobody is asked for, kept in the order in which they are to be asked.

Within a window of RARITY_DEADLINES the order is: what most peers lack first, whatever its deadline, since it decides how soon
all can be done; what nobody lacks by deadline; chance among equals. The order is kept, not made: adding, removing and
re-ranking one want costs a binary search, so that no call of the engine sorts all wants.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from p2pkv.formats.cid import Cid
from p2pkv.limits import RARITY_DEADLINES

# What a node of unknown size counts as in windows and loads.
_NODE_GUESS = 8192


@dataclass(frozen=True, slots=True)
class Want:
    """A block to fetch. ``size`` is exact for blocks and ``None`` for nodes; a smaller ``deadline`` comes first."""

    cid: Cid
    size: int | None
    deadline: int


@dataclass(slots=True, eq=False)
class Wanted:
    """One want of a session. ``holders`` are asked for it now, at most two; ``lackers`` said that they do not have it."""

    want: Want
    draw: float  # chance, drawn once
    lackers: set[str] = field(default_factory=set)
    holders: list[str] = field(default_factory=list)
    asked_before: bool = False
    pooled: bool = False

    @property
    def size(self) -> int:
        return self.want.size if self.want.size is not None else _NODE_GUESS


def _rank(wanted: Wanted) -> tuple[int, int, int, float]:
    # Most lackers is rarest, and unlike the count of owners it stays the same when a peer joins.
    deadline, rarity = wanted.want.deadline, len(wanted.lackers)
    return deadline // RARITY_DEADLINES, -rarity, 0 if rarity else deadline, wanted.draw


class Pool:
    """See the module text. Iterating yields the wants in order; nothing may be added or removed meanwhile."""

    def __init__(self) -> None:
        self._ranked: list[Wanted] = []
        self._lacked: Counter[str] = Counter()  # by peer: how many wants in here it lacks
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self._ranked)

    def __reversed__(self) -> Iterator[Wanted]:
        return reversed(self._ranked)

    def has_for(self, peer: str) -> bool:
        """Return whether ``peer`` may be asked for anything in here."""
        return len(self._ranked) > self._lacked[peer]

    def add(self, several: Iterable[Wanted]) -> None:
        """Take wants in that are not in here. Many at once cost one sort."""
        new = list(several)
        for wanted in new:
            wanted.pooled = True
            self._lacked.update(wanted.lackers)
            self.bytes += wanted.size
        if len(new) == 1:
            insort(self._ranked, new[0], key=_rank)
        elif new:
            self._ranked += new
            self._ranked.sort(key=_rank)

    def remove(self, wanted: Wanted) -> None:
        """Take a want out that is in here."""
        at = bisect_left(self._ranked, _rank(wanted), key=_rank)
        while self._ranked[at] is not wanted:  # two may draw the same number
            at += 1
        del self._ranked[at]
        wanted.pooled = False
        self._lacked.subtract(wanted.lackers)
        self.bytes -= wanted.size

    def clear(self) -> None:
        for wanted in self._ranked:
            wanted.pooled = False
        self._ranked.clear()
        self._lacked.clear()
        self.bytes = 0

    def note_lack(self, wanted: Wanted, peer: str, lacks: bool) -> None:
        """Note whether ``peer`` lacks ``wanted``, which need not be in here."""
        if (peer in wanted.lackers) is lacks:
            return
        pooled = wanted.pooled
        if pooled:
            self.remove(wanted)
        if lacks:
            wanted.lackers.add(peer)
        else:
            wanted.lackers.discard(peer)
        if pooled:
            self.add((wanted,))
