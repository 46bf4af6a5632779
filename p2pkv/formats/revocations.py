"""Revocations: one signed list per publisher of what it takes back (``docs/spec/statements.md``).

The list with the highest sequence number is the publisher's list. A list only ever grows, and whoever keeps lists obeys all
that any of them took back: :class:`p2pkv.trust.record.Record`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from p2pkv.errors import StatementError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import MAX_INT
from p2pkv.formats.fields import Fields
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.statement import Statement, StatementKind
from p2pkv.limits import MAX_REASON_BYTES, MAX_REVOCATIONS

EVERYTHING = MAX_INT
"""As a sequence number: the key is burnt, all that it ever signed or signs is taken back."""


class Scope(StrEnum):
    """What an item takes back: one artifact, all of a model, or all with a sequence number below one."""

    MANIFEST = "manifest"
    MODEL = "model"
    BEFORE = "before"


@dataclass(frozen=True, slots=True)
class Revoked:
    """One item: a manifest CID, a model id of 32 bytes, or a sequence number, by ``scope``; ``reason`` is for people."""

    scope: Scope
    what: Cid | bytes | int
    reason: str

    @property
    def key(self) -> tuple[Scope, Cid | bytes | int]:
        """What is taken back, without the reason: two items with one key take back the same."""
        return self.scope, self.what

    def covers(self, cid: Cid, model_id: bytes, sequence: int) -> bool:
        """Return whether this takes back the artifact ``cid``, of that model and with that sequence number of its manifest.

        That both are of one publisher is the caller's to see.
        """
        match self.scope:
            case Scope.MANIFEST:
                return self.what == cid
            case Scope.MODEL:
                return self.what == model_id
            case Scope.BEFORE:
                return isinstance(self.what, int) and (self.what == EVERYTHING or sequence < self.what)

    @property
    def everything(self) -> bool:
        """Whether this takes back the key itself."""
        return self.scope is Scope.BEFORE and self.what == EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations(Statement):
    """All that a publisher takes back, in the order in which it did."""

    kind: ClassVar[StatementKind] = StatementKind.REVOCATIONS

    items: tuple[Revoked, ...]

    def body(self) -> dict[str, dagcbor.Value]:
        items: list[dagcbor.Value] = [{item.scope.value: item.what, "reason": item.reason} for item in self.items]
        return {"items": items}

    @classmethod
    def read(cls, fields: Fields, publisher: str, sequence: int, created: int) -> Self:
        items = tuple(_item(item) for item in fields.maps("items", MAX_REVOCATIONS))
        if len({item.key for item in items}) != len(items):
            raise StatementError("the list takes one thing back twice")
        return cls(publisher=publisher, sequence=sequence, created=created, items=items, extra=fields.rest())


def _item(fields: Fields) -> Revoked:
    reason = fields.text("reason", MAX_REASON_BYTES)
    names = [scope for scope in Scope if scope.value in fields.rest()]
    if len(names) != 1:
        raise StatementError("an item takes back exactly one of manifest, model and before")
    what: Cid | bytes | int
    match names[0]:
        case Scope.MANIFEST:
            what = fields.link(names[0])
        case Scope.MODEL:
            what = fields.fixed_bytes(names[0], DIGEST_BYTES)
        case Scope.BEFORE:
            what = fields.integer(names[0], 1)
    fields.end()
    return Revoked(names[0], what, reason)
