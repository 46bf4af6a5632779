"""Successions: a publisher names the key that follows its own, and that key agrees (``docs/spec/statements.md``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from nacl.signing import SigningKey

from p2pkv.errors import StatementError
from p2pkv.formats import dagcbor
from p2pkv.formats.did import decode_did, encode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.signature import SIGNATURE_BYTES, verify_signature
from p2pkv.formats.statement import NOT_OBEYED, Statement, StatementKind
from p2pkv.limits import MAX_REASON_BYTES

# The successor's signature has a domain of its own: it is no statement of the successor's.
CONSENT_DOMAIN: Final = b"p2pkv/succession-consent/v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession(Statement):
    """From manifest sequence ``last`` on, ``successor`` (a did:key) signs in the place of ``publisher``.

    ``consent`` is the successor's Ed25519 signature over :data:`CONSENT_DOMAIN`, ``publisher``'s 32-byte key and its own, so
    that nobody can name a key its successor that does not want to be.
    """

    kind: ClassVar[StatementKind] = StatementKind.SUCCESSION

    successor: str
    last: int
    reason: str
    consent: bytes

    @classmethod
    def agreed(cls, publisher: str, successor: SigningKey, *, last: int, created: int, reason: str) -> Self:
        """Return the succession of ``publisher`` by the key ``successor``, which agrees; the old key has still to sign it."""
        new = bytes(successor.verify_key)
        consent = successor.sign(consent_bytes(decode_did(publisher), new)).signature
        return cls(
            publisher=publisher,
            sequence=1,
            created=created,
            successor=encode_did(new),
            last=last,
            reason=reason,
            consent=consent,
        )

    def body(self) -> dict[str, dagcbor.Value]:
        return {"successor": self.successor, "last": self.last, "reason": self.reason, "consent": self.consent}

    @classmethod
    def read(cls, fields: Fields, publisher: str, sequence: int, created: int) -> Self:
        statement = cls(
            publisher=publisher,
            sequence=sequence,
            created=created,
            successor=fields.text("successor"),
            last=fields.integer("last"),
            reason=fields.text("reason", MAX_REASON_BYTES),
            consent=fields.fixed_bytes("consent", SIGNATURE_BYTES),
            extra=fields.rest(),
        )
        old, new = decode_did(publisher), decode_did(statement.successor)
        if old == new:
            raise StatementError("a key that follows itself")
        verify_signature(new, consent_bytes(old, new), statement.consent, "the successor's consent", NOT_OBEYED)
        return statement


def consent_bytes(publisher: bytes, successor: bytes) -> bytes:
    """Return what the successor signs, from the two 32-byte keys."""
    return CONSENT_DOMAIN + publisher + successor
