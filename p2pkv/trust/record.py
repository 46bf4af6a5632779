"""What is known of one publisher by its own signature: what it took back, and which key follows its own.

A record only ever grows. Lists of revocations and successions may arrive in any order, again, and from anybody; each is
verified before it counts. What any list took back stays taken back, also where a later list leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

from p2pkv.errors import StatementError
from p2pkv.formats.cid import Cid
from p2pkv.formats.revocations import Revocations, Revoked
from p2pkv.formats.statement import SignedStatement, StatementKind
from p2pkv.formats.succession import Succession
from p2pkv.limits import MAX_LISTS_PER_PUBLISHER, MAX_REVOCATIONS, MAX_SUCCESSIONS


@dataclass(frozen=True, slots=True)
class KeptList:
    """A verified list of revocations and the bytes that prove it to others."""

    signed: SignedStatement
    opened: Revocations


@dataclass(frozen=True, slots=True)
class KeptSuccession:
    """A verified succession and the bytes that prove it to others."""

    signed: SignedStatement
    opened: Succession


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of ``publisher`` (a did:key). :meth:`heard` returns a record with one statement more.

    ``lists`` are in the order of their sequence numbers, the latest last: one, unless the publisher signed lists of which none
    holds all that another does. ``successions`` are one, or two with different successors.
    """

    publisher: str
    lists: tuple[KeptList, ...] = ()
    successions: tuple[KeptSuccession, ...] = ()

    def heard(self, signed: SignedStatement) -> Record:
        """Return the record that knows ``signed`` too; ``self`` where that tells nothing new.

        Raises SignatureError, FormatError: for a statement that is not this publisher's, that is not good, or that is not of a
        kind kept here; StatementError too where the publisher signed so many contradicting lists that no more are kept.
        """
        if signed.publisher != self.publisher:
            raise StatementError(f"a statement of {signed.publisher}, not of {self.publisher}")
        match signed.kind:
            case StatementKind.REVOCATIONS:
                return self._with_list(KeptList(signed, signed.open(Revocations)))
            case StatementKind.SUCCESSION:
                return self._with_succession(KeptSuccession(signed, signed.open(Succession)))
            case _:
                raise StatementError(f"{signed.kind.value} are not kept with a publisher's record")

    def _with_list(self, new: KeptList) -> Record:
        known = {item.key for item in self.items}
        if new.opened.sequence <= self.sequence and {item.key for item in new.opened.items} <= known:
            return self  # a replay, or what a later list says too
        kept = tuple(sorted(_needed([*self.lists, new]), key=lambda entry: entry.opened.sequence))
        if len(kept) > MAX_LISTS_PER_PUBLISHER:
            if any(item.everything for item in new.opened.items):
                return replace(self, lists=(new,))  # it says all that the others do
            raise StatementError(
                f"{self.publisher} signed more than {MAX_LISTS_PER_PUBLISHER} lists of revocations that contradict each other",
                advice="Its key is in several hands: run `p2pkv trust remove` for it.",
            )
        return replace(self, lists=kept)

    def _with_succession(self, new: KeptSuccession) -> Record:
        # A second successor proves that the key is in two hands; a third proves nothing more.
        if len(self.successions) >= 2 or any(new.opened.successor == kept.opened.successor for kept in self.successions):
            return self
        return replace(self, successions=(*self.successions, new))

    @property
    def sequence(self) -> int:
        """The sequence number of the latest list; 0 without one."""
        return self.lists[-1].opened.sequence if self.lists else 0

    @property
    def items(self) -> Iterator[Revoked]:
        """All that is taken back; what several lists name comes several times."""
        return (item for kept in self.lists for item in kept.opened.items)

    @property
    def burnt(self) -> Revoked | None:
        """The item that takes the key itself back."""
        return next((item for item in self.items if item.everything), None)

    @property
    def forked(self) -> bool:
        """Whether two keys were named to follow this one: whoever holds it is not one and the same."""
        return len(self.successions) > 1

    @property
    def succession(self) -> Succession | None:
        """The succession that trust follows: the only one there is, of a key that was not taken back."""
        return self.successions[0].opened if len(self.successions) == 1 and self.burnt is None else None

    @property
    def statements(self) -> tuple[SignedStatement, ...]:
        """All that proves this record to somebody else."""
        return (*(kept.signed for kept in self.lists), *(kept.signed for kept in self.successions))

    @property
    def signed(self) -> int | None:
        """When the last statement was made, by the publisher's clock, in seconds since the epoch; ``None`` without any."""
        lists = (kept.opened.created for kept in self.lists)
        successions = (kept.opened.created for kept in self.successions)
        return max((*lists, *successions), default=None)

    def revoking(self, cid: Cid, model_id: bytes, sequence: int) -> Revoked | None:
        """Return the item that takes back the publisher's artifact ``cid``, ``None`` where none does.

        ``model_id`` and ``sequence`` are those of its verified manifest.
        """
        return next((item for item in self.items if item.covers(cid, model_id, sequence)), None)

    def next_list(self, item: Revoked, created: int, sequence: int) -> Revocations:
        """Return the publisher's next list: all that it took back, and ``item``, whose first reason stays.

        ``sequence`` is the publisher's next number, above that of every list before. Raises StatementError where there are too
        many items.
        """
        items = {known.key: known for known in self.items}
        items.setdefault(item.key, item)
        if len(items) > MAX_REVOCATIONS:
            raise StatementError(
                f"more than {MAX_REVOCATIONS} items",
                advice="Take back all before a sequence number (`p2pkv revoke --before`).",
            )
        return Revocations(publisher=self.publisher, sequence=sequence, created=created, items=tuple(items.values()))


Records: TypeAlias = Mapping[str, Record]
"""Records by publisher; one that is missing is as good as an empty one."""


def record_from(publisher: str, statements: Iterable[SignedStatement]) -> Record:
    """Return the record that ``statements`` prove. Raises as :meth:`Record.heard` does."""
    return reduce(Record.heard, statements, Record(publisher))


def succeeded(publisher: str, records: Records) -> Iterator[str]:
    """Yield ``publisher``, the key that follows it, the one that follows that: as far as trust in the first one reaches."""
    seen: set[str] = set()
    following: str | None = publisher
    while following is not None and following not in seen and len(seen) <= MAX_SUCCESSIONS:
        yield following
        seen.add(following)
        succession = records.get(following, Record(following)).succession
        following = succession.successor if succession is not None else None


def holder(publisher: str, records: Records) -> str:
    """Return the key that whoever has the key ``publisher`` signs with by now: the last of those that follow it.

    Two keys with one holder are one publisher, however far apart in the row they are; keys that follow each other in a ring
    are all one.
    """
    row = [publisher]
    while (succession := records.get(row[-1], Record(row[-1])).succession) is not None:
        if succession.successor in row:
            return min(row[row.index(succession.successor) :])
        row.append(succession.successor)
    return row[-1]


def _needed(lists: Iterable[KeptList]) -> Iterator[KeptList]:
    """Leave out every list all of whose items a later one has too."""
    later: list[frozenset[object]] = []
    for kept in sorted(lists, key=lambda entry: entry.opened.sequence, reverse=True):
        keys = frozenset[object](item.key for item in kept.opened.items)
        if not any(keys <= other for other in later):
            later.append(keys)
            yield kept
