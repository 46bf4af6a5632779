"""Every encoding by hand, in annotated pieces, without p2pkv: what the golden vectors are made with.

BLAKE3 from ``blake3``, lengths by ``struct``, CBOR heads by arithmetic, the text of CIDs from ``multiformats``.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from multiformats import CID


@dataclass(frozen=True)
class Link:
    """A CID inside a node."""

    binary: bytes


Piece = tuple[bytes, str]
"""Bytes and what they mean."""


def joined(pieces: list[Piece]) -> bytes:
    return b"".join(data for data, _ in pieces)


def hashed(data: bytes) -> bytes:
    return blake3(data).digest()


def cid(codec: int, data: bytes) -> bytes:
    return bytes((1, codec, 0x1E, 32)) + hashed(data)


def cid_text(binary: bytes) -> str:
    return str(CID.decode(binary).set(base="base32"))


def preimage(domain: str, *parts: tuple[bytes, str]) -> list[Piece]:
    """Return the bytes that a domain-separated hash is taken over."""
    pieces: list[Piece] = []
    for data, comment in ((domain.encode(), f"the domain {domain!r}"), *parts):
        pieces.append((struct.pack("<Q", len(data)), f"length of the next part: {len(data)} as u64 little endian"))
        pieces.append((data, comment))
    return pieces


def head(major: int, argument: int) -> bytes:
    first = major << 5
    if argument < 24:
        return bytes((first | argument,))
    for info, form in ((24, ">B"), (25, ">H"), (26, ">I"), (27, ">Q")):
        if argument < 1 << 8 * struct.calcsize(form):
            return bytes((first | info,)) + struct.pack(form, argument)
    raise ValueError(argument)


def node(value: Any, notes: dict[str, str], path: str = "") -> list[Piece]:
    """Return the encoding of ``value`` in pieces; ``notes`` explain fields by their path."""
    note = f": {notes[path]}" if path in notes else ""
    match value:
        case None | bool():
            byte = {False: b"\xf4", True: b"\xf5", None: b"\xf6"}[value]
            return [(byte, f"{json.dumps(value)}{note}")]
        case int():
            return [(head(0, value) if value >= 0 else head(1, -1 - value), f"integer {value}{note}")]
        case bytes():
            return [(head(2, len(value)) + value, f"{len(value)} bytes{note}")]
        case str():
            text = value.encode()
            return [(head(3, len(text)) + text, f"text {json.dumps(value, ensure_ascii=False)}{note}")]
        case Link():
            content = head(6, 42) + head(2, 37) + b"\x00" + value.binary
            return [(content, f"tag 42, 37 bytes: a zero byte and the binary CID{note}")]
        case list():
            pieces = [(head(4, len(value)), f"list of {len(value)}{note}")]
            for item in value:
                pieces += node(item, notes, f"{path}[]")
            return pieces
        case dict():
            pieces = [(head(5, len(value)), f"map of {len(value)}{note}")]
            for key in sorted(value, key=lambda name: (len(name.encode()), name.encode())):
                pieces.append((head(3, len(key.encode())) + key.encode(), f"key {json.dumps(key, ensure_ascii=False)}"))
                pieces += node(value[key], notes, f"{path}.{key}" if path else key)
            return pieces
        case _:
            raise TypeError(value)


def dag_json(value: Any) -> Any:
    """Return ``value`` as DAG-JSON, in which the vectors show values of nodes."""
    match value:
        case bytes():
            return {"/": {"bytes": base64.b64encode(value).decode().rstrip("=")}}
        case Link():
            return {"/": cid_text(value.binary)}
        case list():
            return [dag_json(item) for item in value]
        case dict():
            return {key: dag_json(item) for key, item in value.items()}
        case _:
            return value
