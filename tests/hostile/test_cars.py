"""Attacks on CAR files: lengths that lie, headers that are none, blocks that are not what their CID names."""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import chain

import pytest

from p2pkv.errors import (
    CidError,
    DagCborError,
    FormatError,
    IntegrityError,
    P2pkvError,
    TruncatedError,
    UnknownVersionError,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.car import MAX_SECTION_BYTES, CarDecoder, encode_header, encode_section
from p2pkv.formats.cid import CID_BYTES, Cid, Codec, HashFunction
from p2pkv.limits import MAX_CAR_HEADER_BYTES, MAX_CODED_BLOCK_BYTES, MAX_NODE_BYTES
from p2pkv.units import MIB
from tests.hostile.attack import Attack, assert_refused, given

ROOT = Cid.of_node(b"\xa0")
HEADER = encode_header([ROOT])
BLOCK = encode_section(Cid.of_block(b"p2pkv"), b"p2pkv")


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


def header(value: dagcbor.Value) -> bytes:
    data = dagcbor.encode(value)
    return varint(len(data)) + data


def section(cid: Cid, data: bytes) -> bytes:
    """Return a section, whatever is in it and however much."""
    return varint(CID_BYTES + len(data)) + cid.binary + data


def node_of(size: int) -> tuple[Cid, bytes]:
    data = bytes(size)
    return Cid.of_node(data), data


FILES: dict[str, tuple[bytes, type[P2pkvError]]] = {
    "no byte": (b"", TruncatedError),
    "a header of no byte": (b"\0", DagCborError),
    "a header of 2^63 bytes": (varint(2**63), FormatError),
    "a header of 2^64 bytes": (varint(2**64), FormatError),
    "a header that is longer than any": (varint(MAX_CAR_HEADER_BYTES + 1), FormatError),
    "a length of the header without end": (b"\xff" * 100, FormatError),
    "a length of the header in a long form": (b"\xba\0" + HEADER[1:], FormatError),
    "a length of the header that ends early": (b"\xba", TruncatedError),
    "a header that ends early": (HEADER[:-1], TruncatedError),
    "a header that says too little of itself": (bytes((HEADER[0] - 1,)) + HEADER[1:], DagCborError),
    "a header that says too much of itself": (bytes((HEADER[0] + 1,)) + HEADER[1:] + b"\0", DagCborError),
    "a header that is a list": (header([ROOT]), DagCborError),
    "a CAR v2": (bytes.fromhex("0aa16776657273696f6e02") + bytes(40), UnknownVersionError),
    "a version of 2^63 - 1": (header({"roots": [ROOT], "version": 2**63 - 1}), UnknownVersionError),
    "a version that is true": (header({"roots": [ROOT], "version": True}), FormatError),
    "no version": (header({"roots": [ROOT]}), FormatError),
    "no roots": (header({"roots": [], "version": 1}), FormatError),
    "roots that are null": (header({"roots": None, "version": 1}), FormatError),
    "a root that is bytes": (header({"roots": [ROOT.binary], "version": 1}), FormatError),
    "an unknown field": (header({"later": 1, "roots": [ROOT], "version": 1}), FormatError),
    "roots that are claimed and not there": (b"\x0a\xa2\x65roots\x9a\xff\xff", DagCborError),
    "a section of no byte": (HEADER + b"\0", FormatError),
    "zeros behind the header": (HEADER + bytes(MIB), FormatError),
    "zeros behind a block": (HEADER + BLOCK + bytes(MIB), FormatError),
    "a section without a CID": (HEADER + b"\x01\0", FormatError),
    "a section of half a CID": (HEADER + bytes((CID_BYTES - 1,)) + ROOT.binary, FormatError),
    "a section of 2^63 bytes": (HEADER + varint(2**63), FormatError),
    "a section of 2^64 bytes": (HEADER + varint(2**64), FormatError),
    "a section that is longer than any": (HEADER + varint(MAX_SECTION_BYTES + 1), FormatError),
    "a length of a section without end": (HEADER + b"\x80" * 100, FormatError),
    "a length of a section in a long form": (HEADER + b"\xa9\0" + BLOCK[1:], FormatError),
    "a section that ends in its length": (HEADER + b"\xa9", TruncatedError),
    "a section that ends in its CID": (HEADER + BLOCK[:20], TruncatedError),
    "a section that ends in its block": (HEADER + BLOCK[:-1], TruncatedError),
    "a node larger than any": (HEADER + section(*node_of(MAX_NODE_BYTES + 1)), FormatError),
    "a block larger than any": (HEADER + varint(CID_BYTES + MAX_CODED_BLOCK_BYTES + 1) + bytes(MIB), FormatError),
    "a changed block": (HEADER + BLOCK[:-1] + b"V", IntegrityError),
    "an empty block that has a content": (HEADER + section(Cid.of_block(b"p2pkv"), b""), IntegrityError),
    "a content that is said to be a node": (HEADER + section(Cid.of_node(b"p2pkv"), b"P2pkv"), IntegrityError),
    "a CID with another function of the same digest": (
        HEADER + section(Cid(Codec.RAW, HashFunction.SHA2_256, Cid.of_block(b"p2pkv").digest), b"p2pkv"),
        IntegrityError,
    ),
    "a CID with our function of another digest": (
        HEADER + section(Cid(Codec.RAW, HashFunction.BLAKE3, hashlib.sha256(b"p2pkv").digest()), b"p2pkv"),
        IntegrityError,
    ),
    "a block under the identity": (HEADER + varint(CID_BYTES + 1) + b"\x01\x55\0\x20" + bytes(33), CidError),
    "two thousand good blocks and a bad one": (HEADER + BLOCK * 2_000 + BLOCK[:-1] + b"V", IntegrityError),
}


def read(data: bytes, step: int) -> None:
    """Read a file as the store does, in pieces; what is good in it is let go as soon as it is here."""
    decoder = CarDecoder()
    for at in range(0, len(data), step):
        decoder.feed(data[at : at + step])
    decoder.end()


OF_FILES = {
    name: [
        Attack(f"{name}, in pieces of {step}", partial(read, step=step), error, given(data))
        for step in (1, 4096, MIB)
        if len(data) <= 1000 * step
    ]
    for name, (data, error) in FILES.items()
}
ATTACKS = [*chain.from_iterable(OF_FILES.values())]


@pytest.mark.parametrize("name", OF_FILES)
def test_refused_in_pieces_of_any_size(name: str) -> None:
    for attack in OF_FILES[name]:
        assert_refused(attack)


def test_what_the_attacks_are_made_of_is_good() -> None:
    read(HEADER + BLOCK + section(ROOT, b"\xa0"), 7)
