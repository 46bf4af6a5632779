"""The CID profile: CIDv1, ``raw`` or ``dag-cbor``, BLAKE3-256; SHA2-256 is accepted when reading (``docs/spec/cid.md``).

Written by hand because ``multiformats`` needs about 200 µs a CID; the tests hold the two equal. A binary CID of this
profile is always 36 bytes: version, codec, hash function, digest length, digest.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

from p2pkv.errors import CidError, IntegrityError
from p2pkv.formats.hashing import DIGEST_BYTES, digest

CID_BYTES: Final = 4 + DIGEST_BYTES
CID_TEXT_LENGTH: Final = 59  # "b" and 36 bytes in unpadded base32
_VERSION: Final = 0x01


class Codec(IntEnum):
    """Multicodec of what a CID names."""

    RAW = 0x55
    DAG_CBOR = 0x71


class HashFunction(IntEnum):
    """Multicodec of the hash functions on the allow-list."""

    SHA2_256 = 0x12
    BLAKE3 = 0x1E


# What may stand before the digest of a binary CID.
_BEGINNINGS: Final = frozenset(
    bytes((_VERSION, codec, function, DIGEST_BYTES)) for codec in Codec for function in HashFunction
)


def is_binary_cid(data: bytes) -> bool:
    """Return whether :meth:`Cid.from_bytes` would take ``data``; for whoever meets too many to make each of them."""
    return data[:-DIGEST_BYTES] in _BEGINNINGS


@dataclass(frozen=True, eq=False)
class Cid:
    """One content identifier. Equal CIDs hash equal; text and bytes are canonical.

    Comparison is by hand because CIDs are the keys of every hot dictionary: the digest alone nearly always decides.
    """

    codec: Codec
    hash_function: HashFunction
    digest: bytes

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Cid):
            return NotImplemented
        return self.digest == other.digest and self.codec is other.codec and self.hash_function is other.hash_function

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of_block(cls, data: bytes | bytearray | memoryview) -> Cid:
        """Return the CID of a block (``raw``, BLAKE3-256)."""
        return cls(Codec.RAW, HashFunction.BLAKE3, digest(data))

    @classmethod
    def of_node(cls, data: bytes) -> Cid:
        """Return the CID of an encoded DAG-CBOR node (BLAKE3-256)."""
        return cls(Codec.DAG_CBOR, HashFunction.BLAKE3, digest(data))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Cid:
        """Parse a binary CID. Raises CidError for anything outside the profile."""
        if len(data) != CID_BYTES:
            raise CidError(f"a CID of this profile has {CID_BYTES} bytes, got {len(data)}")
        version, codec, function, length = data[:4]
        if version != _VERSION:
            raise CidError(f"CID version {version} is not 1")
        try:
            known_codec = Codec(codec)
        except ValueError:
            raise CidError(f"CID codec 0x{codec:02x} is neither raw nor dag-cbor") from None
        try:
            known_function = HashFunction(function)
        except ValueError:
            raise CidError(f"CID hash function 0x{function:02x} is neither BLAKE3-256 nor SHA2-256") from None
        if length != DIGEST_BYTES:
            raise CidError(f"CID digest of {length} bytes is truncated or too long")
        return cls(known_codec, known_function, bytes(data[4:]))

    @classmethod
    def parse(cls, text: str) -> Cid:
        """Parse the base32 text form (``b`` and lower case). Raises CidError."""
        if len(text) != CID_TEXT_LENGTH or not text.startswith("b"):
            raise CidError(f"not a base32 CIDv1 of {CID_TEXT_LENGTH} characters: {text[:80]!r}")
        try:
            data = base64.b32decode(text[1:].upper() + "======")
        except ValueError:  # a character outside the alphabet, or outside ASCII
            raise CidError(f"not base32: {text!r}") from None
        cid = cls.from_bytes(data)
        if str(cid) != text:  # upper case, or bits set in the unused part of the last character
            raise CidError(f"not the canonical text of a CID: {text!r}")
        return cid

    @cached_property
    def binary(self) -> bytes:
        """The 36 bytes of the CID."""
        return bytes((_VERSION, self.codec, self.hash_function, DIGEST_BYTES)) + self.digest

    @cached_property
    def multihash(self) -> bytes:
        """The hash alone with its function and length: what the DHT keys provider records by."""
        return self.binary[2:]

    @cached_property
    def _text(self) -> str:
        return "b" + base64.b32encode(self.binary).decode("ascii").rstrip("=").lower()

    def __str__(self) -> str:
        return self._text

    def matches(self, data: bytes | bytearray | memoryview) -> bool:
        """Return whether ``data`` has this CID's hash."""
        if self.hash_function is HashFunction.BLAKE3:
            return digest(data) == self.digest
        return hashlib.sha256(data).digest() == self.digest

    def check(self, data: bytes | bytearray | memoryview) -> None:
        """Raise IntegrityError unless ``data`` has this CID's hash."""
        if not self.matches(data):
            raise IntegrityError(f"{len(data)} bytes do not hash to {self}")
