"""Rules: publisher x scope -> accept or reject. What a person says about whom this home believes.

A rule applies to an artifact where its publisher and every part of its scope match. **Any rule that rejects wins over all that
accept; without a rule that accepts, nothing is accepted.** So the order of rules means nothing, and no rule is more specific
than another: what a file of them does can be seen line by line.

A model is named by its id, never by its name: a name is whatever the publisher of a manifest wrote there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from p2pkv.errors import UsageError
from p2pkv.formats.did import decode_did
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_TEXT_BYTES, MAX_TRUST_NOTE_BYTES

ANYBODY: Final = "*"
"""In the place of a publisher, and only in a rule that rejects."""


class Action(StrEnum):
    ACCEPT = "accept"
    REJECT = "reject"


class Namespace(StrEnum):
    """Whether everybody may read an artifact, or only those whom it was granted to (``docs/spec/private.md``)."""

    PUBLIC = "public"
    PRIVATE = "private"

    @classmethod
    def of(cls, manifest: Manifest) -> Namespace:
        return cls.PRIVATE if manifest.private else cls.PUBLIC


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; ``None`` in a scope matches all.

    ``publisher`` is a did:key or :data:`ANYBODY`, ``model`` a model id of 32 bytes, ``licence`` the exact licence text.
    ``note`` is for the person who wrote it, ``added`` in seconds since the epoch. Raises FormatError for a publisher that is
    none, UsageError for what nobody could mean.
    """

    action: Action
    publisher: str
    model: bytes | None = None
    licence: str | None = None
    namespace: Namespace | None = None
    note: str = ""
    added: int = 0

    def __post_init__(self) -> None:
        if self.publisher != ANYBODY:
            decode_did(self.publisher)
        elif self.action is Action.ACCEPT:
            raise UsageError(
                "a rule that accepts names a publisher", advice="Trust each publisher by its name, did:key:z6Mk..."
            )
        if self.model is not None and len(self.model) != DIGEST_BYTES:
            raise UsageError(f"a model id has {DIGEST_BYTES} bytes", advice="`p2pkv inspect` shows the id of a model.")
        if len(self.note.encode()) > MAX_TRUST_NOTE_BYTES:
            raise UsageError(f"a note of more than {MAX_TRUST_NOTE_BYTES} bytes", advice="Say it shorter.")
        if self.licence is not None and len(self.licence.encode()) > MAX_TEXT_BYTES:
            raise UsageError(f"a licence of more than {MAX_TEXT_BYTES} bytes", advice="No manifest holds a longer one.")

    @property
    def key(self) -> tuple[Action, str, bytes | None, str | None, Namespace | None]:
        """What the rule says, without its note and date: of two rules with one key the later one stays."""
        return self.action, self.publisher, self.model, self.licence, self.namespace

    def covers(self, manifest: Manifest) -> bool:
        """Return whether the scope matches; whether the publisher does is a question of successions too."""
        return (
            (self.model is None or self.model == manifest.model_id)
            and (self.licence is None or self.licence == manifest.licence)
            and (self.namespace is None or self.namespace is Namespace.of(manifest))
        )

    def __str__(self) -> str:
        """Return the rule as a person reads it: ``accept did:key:z6Mk... model 8d3c... licence CC0-1.0``."""
        words = [self.action.value, "anybody" if self.publisher == ANYBODY else self.publisher]
        if self.model is not None:
            words += ["model", self.model.hex()]
        if self.licence is not None:
            words += ["licence", repr(self.licence)]
        if self.namespace is not None:
            words += ["namespace", self.namespace.value]
        return " ".join(words)


def trusted_publishers(rules: Iterable[Rule]) -> list[str]:
    """Return the publishers that some rule accepts, in the order of the rules."""
    return list(dict.fromkeys(rule.publisher for rule in rules if rule.action is Action.ACCEPT))
