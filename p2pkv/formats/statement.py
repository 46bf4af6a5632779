"""Statements: what a publisher signs beside manifests (``docs/spec/statements.md``).

All kinds share one form. The payload is a strict DAG-CBOR map that begins with kind, version, publisher, sequence and created;
:class:`SignedStatement` is the shape of a manifest's envelope and names the kind outside of the payload too, since the kind
decides the signature's domain. A new kind is a subclass of :class:`Statement` in a module of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final, Self, TypeVar

from nacl.signing import SigningKey

from p2pkv.errors import SignatureError, StatementError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import PUBLIC_KEY_BYTES, decode_did, encode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.signature import SIGNATURE_BYTES, verify_signature
from p2pkv.limits import MAX_STATEMENT_BYTES

KIND: Final = "p2pkv/statement"
VERSION: Final = 1
NOT_OBEYED: Final = "Nothing of it was obeyed. Ask the publisher for the statement, or fetch it from another source."


class StatementKind(StrEnum):
    """What a statement is about. The value is part of the payload's kind and of the domain of the signature."""

    REVOCATIONS = "revocations"
    SUCCESSION = "succession"
    GRANT = "grant"

    @property
    def payload_kind(self) -> str:
        """The ``kind`` of the payload: ``p2pkv/revocations``."""
        return f"p2pkv/{self.value}"

    @property
    def domain(self) -> bytes:
        """What stands before the payload where it is signed; it keeps kinds, and manifests, from being taken for another."""
        return f"p2pkv/{self.value}/v{VERSION}\0".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement(ABC):
    """What is common to all kinds. A subclass adds fields, and says how they are written and read.

    ``publisher`` is the did:key that signs. ``sequence`` orders the statements of one kind of one publisher, from 1.
    ``created`` is in seconds since the epoch, UTC, for people. ``extra`` holds fields of later versions.
    """

    kind: ClassVar[StatementKind]

    publisher: str
    sequence: int
    created: int
    extra: Mapping[str, dagcbor.Value] = field(default_factory=dict)

    @abstractmethod
    def body(self) -> dict[str, dagcbor.Value]:
        """Return the fields of this kind."""

    @classmethod
    @abstractmethod
    def read(cls, fields: Fields, publisher: str, sequence: int, created: int) -> Self:
        """Take the fields of this kind, and ``fields.rest()`` as ``extra``. Raises FormatError."""

    def encode(self) -> bytes:
        """Return the payload, which is signed. Raises StatementError where it exceeds MAX_STATEMENT_BYTES."""
        data = dagcbor.encode(
            {
                **self.extra,
                "kind": self.kind.payload_kind,
                "version": VERSION,
                "publisher": self.publisher,
                "sequence": self.sequence,
                "created": self.created,
                **self.body(),
            }
        )
        return _bounded(data)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse and check a payload. Raises FormatError or a subclass: UnknownVersionError, StatementError, ..."""
        fields = Fields(dagcbor.decode_map(_bounded(data)), cls.kind.value, StatementError)
        fields.version(cls.kind.payload_kind, VERSION)
        publisher = fields.text("publisher")
        decode_did(publisher)
        return cls.read(fields, publisher, fields.integer("sequence", 1), fields.integer("created"))


AnyStatement = TypeVar("AnyStatement", bound=Statement)


@dataclass(frozen=True, slots=True)
class SignedStatement:
    """A payload, what kind it is said to be, the signer's key and the signature over the kind's domain and the payload."""

    kind: StatementKind
    payload: bytes
    key: bytes
    signature: bytes

    @classmethod
    def sign(cls, statement: Statement, key: SigningKey) -> SignedStatement:
        """Sign ``statement`` with its publisher's key. Raises StatementError where the key is not the publisher's."""
        if encode_did(bytes(key.verify_key)) != statement.publisher:
            raise StatementError(
                "the key is not that of the statement's publisher", advice="Sign with the publisher's own key."
            )
        payload = statement.encode()
        type(statement).decode(payload)  # a statement that nobody could open is not worth a signature
        return cls(statement.kind, payload, bytes(key.verify_key), key.sign(statement.kind.domain + payload).signature)

    def encode(self) -> bytes:
        return dagcbor.encode(
            {
                "kind": KIND,
                "version": VERSION,
                "statement": self.kind.value,
                "payload": self.payload,
                "key": self.key,
                "signature": self.signature,
            }
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> SignedStatement:
        """Parse a signed statement without judging its signature. Raises FormatError or a subclass."""
        _bounded(data)
        fields = Fields(dagcbor.decode_map(data), "statement", StatementError)
        fields.version(KIND, VERSION)
        signed = cls(
            fields.choice("statement", StatementKind),
            fields.bytes_up_to("payload", MAX_STATEMENT_BYTES),
            fields.fixed_bytes("key", PUBLIC_KEY_BYTES),
            fields.fixed_bytes("signature", SIGNATURE_BYTES),
        )
        fields.end()
        return signed

    @property
    def cid(self) -> Cid:
        """The CID of the encoded signed statement."""
        return Cid.of_node(self.encode())

    @property
    def publisher(self) -> str:
        """The did:key of the key that has to have signed; nothing is verified yet."""
        return encode_did(self.key)

    def open(self, expected: type[AnyStatement]) -> AnyStatement:
        """Verify the signature and return the statement. Raises SignatureError, then what :meth:`Statement.decode` raises.

        StatementError for another kind than ``expected``. Nothing of the payload is looked at before its signature is known
        to be good.
        """
        if self.kind is not expected.kind:
            raise StatementError(f"expected {expected.kind.value}, found {self.kind.value}")
        verify_signature(self.key, self.kind.domain + self.payload, self.signature, f"the {self.kind.value}", NOT_OBEYED)
        statement = expected.decode(self.payload)
        if statement.publisher != self.publisher:
            raise SignatureError(f"the {self.kind.value} name {statement.publisher} but another key signed", advice=NOT_OBEYED)
        return statement


Buffer = TypeVar("Buffer", bound="bytes | bytearray | memoryview")


def _bounded(data: Buffer) -> Buffer:
    if len(data) > MAX_STATEMENT_BYTES:
        raise StatementError(f"a statement of {len(data)} bytes exceeds {MAX_STATEMENT_BYTES}")
    return data
