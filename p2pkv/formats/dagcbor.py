"""Strict DAG-CBOR: one value, one encoding (``docs/spec/dag-cbor.md``).

The profile has integers of 64 bits with sign, byte strings, text, lists, maps with text keys, CID links (tag 42), booleans
and null. No floats, no other tags, no indefinite lengths. Decoding checks size, depth and item count before it allocates,
refuses every non-canonical form, so that nothing is accepted whose re-encoding would give other bytes: the tests hold that
against two independent codecs.

Encoding is cbor2's; its canonical mode sorts map keys by length and then bytes, as DAG-CBOR does. Its decoder is lenient,
so decoding is written here. Spec: https://ipld.io/specs/codecs/dag-cbor/spec/
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final, TypeAlias

import cbor2

from p2pkv.errors import CidError, DagCborError, TruncatedError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_NODE_BYTES, MAX_NODE_DEPTH, MAX_NODE_ITEMS

Value: TypeAlias = "int | bytes | str | bool | Cid | list[Value] | dict[str, Value] | None"

MIN_INT: Final = -(2**63)
MAX_INT: Final = 2**63 - 1
_TAG_CID: Final = 42
_UINT, _NINT, _BYTES, _TEXT, _LIST, _MAP, _TAG, _SIMPLE = range(8)


def encode(value: Value) -> bytes:
    """Return the one encoding of ``value``. Raises DagCborError for a value outside the profile."""
    try:
        data = cbor2.dumps(_to_plain(value, 0, count(1)), canonical=True)
    except UnicodeEncodeError:
        raise DagCborError("text holds a lone surrogate, which UTF-8 cannot say") from None
    if len(data) > MAX_NODE_BYTES:
        raise DagCborError(f"node of {len(data)} bytes exceeds {MAX_NODE_BYTES}")
    return data


def decode(data: bytes | bytearray | memoryview) -> Value:
    """Return the value of exactly ``data``.

    Raises TruncatedError where the bytes end too early, DagCborError for other faults; never anything else for any bytes.
    """
    if len(data) > MAX_NODE_BYTES:
        raise DagCborError(f"node of {len(data)} bytes exceeds {MAX_NODE_BYTES}")
    raw = bytes(data)
    decoder = _Decoder(raw)
    value = decoder.value(0)
    if decoder.at != len(raw):
        raise DagCborError(f"{len(raw) - decoder.at} bytes behind the value")
    return value


def decode_map(data: bytes | bytearray | memoryview) -> dict[str, Value]:
    """Decode a node that has to be a map, as all nodes of this project are. Raises as :func:`decode`."""
    value = decode(data)
    if not isinstance(value, dict):
        raise DagCborError(f"expected a map, found {type(value).__name__}")
    return value


def _to_plain(value: Value, depth: int, items: Iterator[int]) -> object:
    """Check ``value`` against the profile and replace links by tag 42 over a zero byte and the binary CID.

    ``items`` counts the values of the whole node, as the decoder does.
    """
    if depth > MAX_NODE_DEPTH:
        raise DagCborError(f"nesting deeper than {MAX_NODE_DEPTH}")
    if next(items) > MAX_NODE_ITEMS:
        raise DagCborError(f"more than {MAX_NODE_ITEMS} items")
    match value:
        case bool() | None | str() | bytes():
            return value
        case int():
            if not MIN_INT <= value <= MAX_INT:
                raise DagCborError(f"integer {value} does not fit 64 bits with sign")
            return value
        case Cid():
            return cbor2.CBORTag(_TAG_CID, b"\x00" + value.binary)
        case list():
            return [_to_plain(item, depth + 1, items) for item in value]
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise DagCborError("map keys are text")
            return {key: _to_plain(item, depth + 1, items) for key, item in value.items()}
        case _:
            raise DagCborError(f"{type(value).__name__} is not part of the profile")


class _Decoder:
    """One pass over the bytes; every read checks what is left before it takes it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.items = 0

    def value(self, depth: int) -> Value:
        if depth > MAX_NODE_DEPTH:
            raise DagCborError(f"nesting deeper than {MAX_NODE_DEPTH}")
        self.items += 1
        if self.items > MAX_NODE_ITEMS:
            raise DagCborError(f"more than {MAX_NODE_ITEMS} items")
        major, info = self.head()
        if major == _SIMPLE:
            return self.simple(info)
        argument = self.argument(info)
        if major == _UINT:
            return self.bounded(argument)
        if major == _NINT:
            return self.bounded(-1 - argument)
        if major == _BYTES:
            return self.take(argument)
        if major == _TEXT:
            return self.text(argument)
        if major == _LIST:
            self.room_for(argument)
            return [self.value(depth + 1) for _ in range(argument)]
        if major == _MAP:
            return self.map(argument, depth)
        return self.link(argument)

    def head(self) -> tuple[int, int]:
        (first,) = self.take(1)
        return first >> 5, first & 0x1F

    def argument(self, info: int) -> int:
        if info < 24:
            return info
        if info > 27:
            raise DagCborError("indefinite length or reserved head")
        size: int = 1 << (info - 24)
        argument = int.from_bytes(self.take(size), "big")
        if argument < (24 if size == 1 else 1 << (size * 4)):
            raise DagCborError("integer or length is not in its shortest form")
        return argument

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise TruncatedError("the bytes end in the middle of a value")
        chunk = self.data[self.at : self.at + count]
        self.at += count
        return chunk

    def room_for(self, count: int) -> None:
        """Each announced item takes at least one byte: refuse counts that the rest cannot hold."""
        if count > len(self.data) - self.at:
            raise TruncatedError("more items announced than bytes left")

    def bounded(self, number: int) -> int:
        if not MIN_INT <= number <= MAX_INT:
            raise DagCborError("integer does not fit 64 bits with sign")
        return number

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise DagCborError("text is not UTF-8") from None

    def map(self, count: int, depth: int) -> dict[str, Value]:
        self.room_for(2 * count)
        result: dict[str, Value] = {}
        previous = (-1, b"")
        for _ in range(count):
            major, info = self.head()
            if major != _TEXT:
                raise DagCborError("map keys are text")
            key = self.text(self.argument(info))
            encoded = key.encode("utf-8")
            if (len(encoded), encoded) <= previous:
                raise DagCborError("map keys are repeated or not in canonical order")
            previous = (len(encoded), encoded)
            result[key] = self.value(depth + 1)
        return result

    def link(self, tag: int) -> Cid:
        if tag != _TAG_CID:
            raise DagCborError(f"tag {tag} is not part of the profile")
        major, info = self.head()
        if major != _BYTES:
            raise DagCborError("a link is a byte string under tag 42")
        content = self.take(self.argument(info))
        if content[:1] != b"\x00":
            raise DagCborError("a link starts with the identity multibase byte")
        try:
            return Cid.from_bytes(content[1:])
        except CidError as error:
            raise DagCborError(error.message) from None

    def simple(self, info: int) -> bool | None:
        if info == 20:
            return False
        if info == 21:
            return True
        if info == 22:
            return None
        raise DagCborError("floats and other simple values are not part of the profile")
