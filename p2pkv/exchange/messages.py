"""Frames and messages of the exchange (``docs/spec/exchange.md``).

A frame is ``length u32 big endian | type u8 | body``; the length counts the body. Lists of CIDs are 36 bytes each, blocks
are a CID and the payload, everything else is strict DAG-CBOR. Type and length are checked as soon as the header is there,
before the body is; bodies of unknown types are skipped without being kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from p2pkv.artifact.match import Match
from p2pkv.errors import FormatError, ProtocolError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.formats.did import PUBLIC_KEY_BYTES
from p2pkv.formats.fields import Fields
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.limits import (
    MAX_CONTROL_BYTES,
    MAX_ERROR_TEXT_BYTES,
    MAX_FEATURES,
    MAX_FRAME_BYTES,
    MAX_NAME_BYTES,
    MAX_QUERY_KEYS,
    MAX_QUERY_MATCHES,
    MAX_SEGMENTS,
    MAX_STATEMENT_BYTES,
    MAX_STATEMENTS,
    MAX_WANTS_PER_MESSAGE,
)

PROTOCOL_ID: Final = "/p2pkv/exchange/1.0.0"
VERSION: Final = 1
HEADER_BYTES: Final = 5
BLOCK_HEADER_BYTES: Final = HEADER_BYTES + CID_BYTES
TOKEN_BYTES: Final = 32
_MAX_REQUEST_ID: Final = 2**31 - 1


class MessageType(IntEnum):
    """Wire codes, with gaps for later messages; receivers skip what they do not know."""

    HELLO = 0x01
    QUERY = 0x10
    MATCHES = 0x11
    ASK_STATEMENTS = 0x12
    STATEMENTS = 0x13
    WANT = 0x20
    BLOCK = 0x21
    DONT_HAVE = 0x22
    HAVE = 0x23
    CANCEL = 0x24
    BULK_REQUEST = 0x30
    BULK_OFFER = 0x31
    BULK_CLOSED = 0x32
    ERROR = 0x7F


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of each side: the protocol version, a software name for people, and optional features by name."""

    agent: str
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Query:
    """Which manifests match these chain keys? The keys are those after each segment, in order, a tail's last."""

    request: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Matches:
    """Answer to a query, longest match first; empty for none."""

    request: int
    matches: tuple[Match, ...]


@dataclass(frozen=True, slots=True)
class AskStatements:
    """What does the publisher with this 32-byte key say of itself, beyond the statements ``known``?"""

    request: int
    publisher: bytes
    known: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Statements:
    """Answer to :class:`AskStatements`: signed statements as they are encoded, which nobody has verified yet."""

    request: int
    statements: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class WantBlocks:
    """Send these, in this order."""

    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Block:
    cid: Cid
    data: bytes


@dataclass(frozen=True, slots=True)
class DontHave:
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Have:
    """The sender has gained these since it answered dont-have."""

    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """Offer me a bulk lane for the blocks that I want."""


@dataclass(frozen=True, slots=True)
class BulkOffered:
    """A bulk lane is open at this port of your connection's address; ``port`` 0 says that there is none."""

    port: int
    token: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class BulkClosed:
    """I read no bulk lane of this stream any more: what I want from here on comes over the stream."""


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """The sender gives up on this stream, for the reason that ``code`` names (a code of the error tree)."""

    code: str
    message: str


Message: TypeAlias = (
    Hello
    | Query
    | Matches
    | AskStatements
    | Statements
    | WantBlocks
    | Block
    | DontHave
    | Have
    | Cancel
    | BulkRequest
    | BulkOffered
    | BulkClosed
    | ErrorMessage
)

_CID_LISTS: Final[dict[MessageType, type[WantBlocks | DontHave | Have | Cancel]]] = {
    MessageType.WANT: WantBlocks,
    MessageType.DONT_HAVE: DontHave,
    MessageType.HAVE: Have,
    MessageType.CANCEL: Cancel,
}
_CID_LIST_TYPES: Final = {message: kind for kind, message in _CID_LISTS.items()}


def block_header(cid: Cid, size: int) -> bytes:
    """Return what stands before a block's payload of ``size`` bytes."""
    return _header(MessageType.BLOCK, CID_BYTES + size) + cid.binary


def encode(message: Message) -> bytes:
    """Return one whole frame."""
    match message:
        case Hello():
            features: list[dagcbor.Value] = [*sorted(message.features)]
            return _cbor_frame(MessageType.HELLO, {"version": VERSION, "agent": message.agent, "features": features})
        case Query():
            return _cbor_frame(MessageType.QUERY, {"request": message.request, "keys": list(message.keys)})
        case Matches():
            matches: list[dagcbor.Value] = [
                {"manifest": m.manifest, "matched": m.matched, "segments": m.segments, "held": m.held} for m in message.matches
            ]
            return _cbor_frame(MessageType.MATCHES, {"request": message.request, "matches": matches})
        case AskStatements():
            known: list[dagcbor.Value] = [*message.known]
            ask: dagcbor.Value = {"request": message.request, "publisher": message.publisher, "known": known}
            return _cbor_frame(MessageType.ASK_STATEMENTS, ask)
        case Statements():
            return _cbor_frame(MessageType.STATEMENTS, {"request": message.request, "statements": list(message.statements)})
        case Block():
            return block_header(message.cid, len(message.data)) + message.data
        case BulkRequest():
            return _cbor_frame(MessageType.BULK_REQUEST, {})
        case BulkOffered():
            return _cbor_frame(
                MessageType.BULK_OFFER,
                {"port": message.port, "token": message.token, "fingerprint": message.fingerprint},
            )
        case BulkClosed():
            return _cbor_frame(MessageType.BULK_CLOSED, {})
        case ErrorMessage():
            return _cbor_frame(MessageType.ERROR, {"code": message.code, "message": message.message})
        case _:
            body = b"".join(cid.binary for cid in message.cids)
            return _header(_CID_LIST_TYPES[type(message)], len(body)) + body


def encode_cid_lists(kind: type[WantBlocks | DontHave | Have | Cancel], cids: Sequence[Cid]) -> bytes:
    """Return frames for any number of CIDs, each within MAX_WANTS_PER_MESSAGE."""
    step = MAX_WANTS_PER_MESSAGE
    return b"".join(encode(kind(tuple(cids[at : at + step]))) for at in range(0, len(cids), step))


class FrameDecoder:
    """Turns bytes of any cut into messages; known types outside ``accepted`` are refused by their header.

    Holds at most one incomplete frame. Raises ProtocolError when the peer breaks the rules, and from then on always.
    """

    def __init__(self, accepted: Iterable[MessageType] = MessageType) -> None:
        self._accepted = frozenset(accepted)
        self._buffer = bytearray()
        self._to_skip = 0  # bytes of an unknown message that are still to come
        self._broken = ""

    def feed(self, data: bytes) -> list[Message]:
        """Add ``data`` and return the messages that are now whole, in order."""
        if self._broken:
            raise ProtocolError(self._broken)
        self._buffer += data
        try:
            return self._take_messages()
        except ProtocolError as error:
            self._broken = error.message
            self._buffer.clear()
            raise

    def _take_messages(self) -> list[Message]:
        messages: list[Message] = []
        at = 0
        while True:
            skipped = min(self._to_skip, len(self._buffer) - at)
            self._to_skip -= skipped
            at += skipped
            if len(self._buffer) - at < HEADER_BYTES:
                break
            kind, length = self._check_header(bytes(self._buffer[at : at + HEADER_BYTES]))
            if kind is None:
                at += HEADER_BYTES
                self._to_skip = length
                continue
            end = at + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(kind, bytes(memoryview(self._buffer)[at + HEADER_BYTES : end])))
            at = end
        del self._buffer[:at]
        return messages

    def _check_header(self, header: bytes) -> tuple[MessageType | None, int]:
        """Return type and length, or ``None`` for a type that is unknown here and to be skipped."""
        length, code = int.from_bytes(header[:4], "big"), header[4]
        kind = MessageType(code) if code in _CODES else None
        if kind is not None and kind not in self._accepted:
            raise ProtocolError(f"a {kind.name.lower()} message is not for this side to receive")
        bound = _bound(kind)
        if length > bound:
            raise ProtocolError(f"a frame of type 0x{code:02x} announces {length} bytes; {bound} are allowed")
        return kind, length

    @property
    def incomplete(self) -> bool:
        """Whether the bytes so far end in the middle of a frame."""
        return bool(self._buffer or self._to_skip)


_CODES: Final = frozenset(MessageType)


def _bound(kind: MessageType | None) -> int:
    """Return the largest body; later versions may make theirs as large as the largest of this one."""
    if kind is None or kind is MessageType.BLOCK:
        return MAX_FRAME_BYTES
    return CID_BYTES * MAX_WANTS_PER_MESSAGE if kind in _CID_LISTS else MAX_CONTROL_BYTES


def _decode(kind: MessageType, body: bytes) -> Message:
    try:
        if kind is MessageType.BLOCK:
            return Block(Cid.from_bytes(body[:CID_BYTES]), body[CID_BYTES:])
        cid_list = _CID_LISTS.get(kind)
        if cid_list is not None:
            return cid_list(_cids(body))
        return _decode_map(kind, Fields(dagcbor.decode_map(body), kind.name.lower(), FormatError))
    except FormatError as error:
        raise ProtocolError(f"bad {kind.name.lower()} message: {error.message}") from error


def _decode_map(kind: MessageType, fields: Fields) -> Message:
    match kind:
        case MessageType.HELLO:
            fields.integer("version", VERSION, VERSION)
            return Hello(fields.text("agent", MAX_NAME_BYTES), _features(fields.items("features", MAX_FEATURES)))
        case MessageType.QUERY:
            keys = fields.items("keys", MAX_QUERY_KEYS)
            if not all(isinstance(key, bytes) and len(key) == DIGEST_BYTES for key in keys):
                raise FormatError("a chain key is not 32 bytes")
            return Query(fields.integer("request", 0, _MAX_REQUEST_ID), tuple(key for key in keys if isinstance(key, bytes)))
        case MessageType.MATCHES:
            request = fields.integer("request", 0, _MAX_REQUEST_ID)
            return Matches(request, tuple(_match(item) for item in fields.maps("matches", MAX_QUERY_MATCHES)))
        case MessageType.ASK_STATEMENTS:
            known = fields.items("known", MAX_STATEMENTS)
            if not all(isinstance(cid, Cid) for cid in known):
                raise FormatError("a known statement is not named by its CID")
            return AskStatements(
                fields.integer("request", 0, _MAX_REQUEST_ID),
                fields.fixed_bytes("publisher", PUBLIC_KEY_BYTES),
                tuple(cid for cid in known if isinstance(cid, Cid)),
            )
        case MessageType.STATEMENTS:
            statements = fields.items("statements", MAX_STATEMENTS)
            if not all(isinstance(data, bytes) and len(data) <= MAX_STATEMENT_BYTES for data in statements):
                raise FormatError(f"a statement is not a byte string of at most {MAX_STATEMENT_BYTES} bytes")
            return Statements(
                fields.integer("request", 0, _MAX_REQUEST_ID), tuple(data for data in statements if isinstance(data, bytes))
            )
        case MessageType.BULK_OFFER:
            return BulkOffered(
                fields.integer("port", 0, 65_535),
                fields.fixed_bytes("token", TOKEN_BYTES),
                fields.fixed_bytes("fingerprint", DIGEST_BYTES),
            )
        case MessageType.ERROR:
            return ErrorMessage(fields.text("code", MAX_NAME_BYTES), fields.text("message", MAX_ERROR_TEXT_BYTES))
        case MessageType.BULK_CLOSED:
            return BulkClosed()
        case _:
            return BulkRequest()


def _features(names: list[dagcbor.Value]) -> frozenset[str]:
    features: set[str] = set()
    for name in names:
        if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES:
            raise FormatError(f"a feature is not text of at most {MAX_NAME_BYTES} bytes")
        features.add(name)
    return frozenset(features)


def _match(fields: Fields) -> Match:
    segments = fields.integer("segments", 1, MAX_SEGMENTS)
    return Match(
        fields.link("manifest"),
        fields.integer("matched", 1, segments),
        segments,
        fields.fixed_bytes("held", -(-segments // 8)),
    )


def _cids(body: bytes) -> tuple[Cid, ...]:
    if len(body) % CID_BYTES:
        raise FormatError(f"{len(body)} bytes are no list of CIDs")
    return tuple(Cid.from_bytes(body[at : at + CID_BYTES]) for at in range(0, len(body), CID_BYTES))


def _cbor_frame(kind: MessageType, value: dagcbor.Value) -> bytes:
    body = dagcbor.encode(value)
    return _header(kind, len(body)) + body


def _header(kind: MessageType, length: int) -> bytes:
    return length.to_bytes(4, "big") + bytes((kind,))
