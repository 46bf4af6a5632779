"""Vectors of CIDs and of the strict profile of DAG-CBOR, and the forms of both that are refused."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from tests.vectors.encoding import Link, Piece, cid, cid_text, dag_json, hashed, joined, node
from tests.vectors.form import refused, vector


def cid_pieces(codec: int, function: int, digest: bytes) -> list[Piece]:
    names = {0x55: "raw", 0x71: "dag-cbor", 0x1E: "BLAKE3-256", 0x12: "SHA2-256"}
    return [
        (b"\x01", "CID version 1"),
        (bytes((codec,)), f"codec {names[codec]}"),
        (bytes((function,)), f"hash function {names[function]}"),
        (b"\x20", "digest length 32"),
        (digest, "digest"),
    ]


def cid_file() -> dict[str, Any]:
    content, empty = b"p2pkv", b"\xa0"
    rows = [
        ("block", "a block of the five bytes 'p2pkv'", 0x55, 0x1E, content, hashed(content)),
        ("node", "the empty map as a node", 0x71, 0x1E, empty, hashed(empty)),
        ("sha2-256", "accepted when reading, never written", 0x55, 0x12, content, sha256(content).digest()),
    ]
    vectors = []
    for name, comment, codec, function, data, digest in rows:
        pieces = cid_pieces(codec, function, digest)
        vectors.append(vector(name, comment, pieces, content=data.hex(), text=cid_text(joined(pieces))))
    zeros = "00" * 32
    return {
        "about": "Binary CIDs. `content` is what is hashed, `text` the base32 form.",
        "vectors": vectors,
        "refused": [
            refused("version 0 (a bare SHA2-256 multihash)", "1220" + zeros),
            refused("version 2", "02551e20" + zeros),
            refused("codec dag-pb", "01701e20" + zeros),
            refused("codec libp2p-key", "01721e20" + zeros),
            refused("identity hash", "01550020" + zeros),
            refused("SHA2-512 function code", "01551320" + zeros),
            refused("truncated digest of 20 bytes", "01551e14" + "00" * 20),
            refused("length byte 20 over 32 bytes", "01551e14" + zeros),
            refused("digest cut off", "01551e20" + "00" * 31),
            refused("one byte too many", "01551e20" + "00" * 33),
            refused("version as two-byte varint", "8100551e20" + zeros),
            refused("empty", ""),
        ],
    }


def dag_cbor_file() -> dict[str, Any]:
    link = Link(cid(0x55, b"p2pkv"))
    values: list[tuple[str, Any]] = [
        *((f"integer {number}", number) for number in (0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1)),
        *((f"integer {number}", number) for number in (-1, -24, -25, -256, -257, -(2**32), -(2**63))),
        ("no bytes", b""),
        ("24 bytes", bytes(range(24))),
        ("no text", ""),
        ("text beyond ASCII", "Grüße 🌍"),
        ("null", None),
        ("false", False),
        ("true", True),
        ("empty list", []),
        ("nested list", [1, [2, [3]], "x"]),
        ("empty map", {}),
        ("map order: shorter keys first, then by bytes", {"bb": 1, "a": 2, "b": 3, "aaa": 4, "é": 5}),
        ("link", link),
        ("link in a map", {"block": link, "size": 5}),
    ]
    raw_link = link.binary.hex()
    return {
        "about": "Values of the strict profile. `value` is DAG-JSON. `refused` are encodings that no reader may accept.",
        "vectors": [vector(name, "", node(value, {}), value=dag_json(value)) for name, value in values],
        "refused": [
            refused("empty input", ""),
            refused("integer 23 in two bytes", "1817"),
            refused("integer 255 in three bytes", "1900ff"),
            refused("integer 65535 in five bytes", "1a0000ffff"),
            refused("integer 2^32 - 1 in nine bytes", "1b00000000ffffffff"),
            refused("integer -1 in two bytes", "3800"),
            refused("integer 2^63", "1b8000000000000000"),
            refused("integer -2^63 - 1", "3b8000000000000000"),
            refused("length of bytes in two bytes", "580100"),
            refused("length of text in two bytes", "780161"),
            refused("length of a list in two bytes", "980100"),
            refused("length of a map in two bytes", "b800"),
            refused("tag 42 in three bytes", "d9002a582500" + raw_link),
            refused("indefinite bytes", "5f4101ff"),
            refused("indefinite text", "7f6161ff"),
            refused("indefinite list", "9f01ff"),
            refused("indefinite map", "bf616101ff"),
            refused("break alone", "ff"),
            refused("reserved head 28", "1c"),
            refused("keys out of order by bytes", "a2616201616102"),
            refused("keys out of order by length", "a262616101616202"),
            refused("key repeated", "a2616101616102"),
            refused("integer as key", "a10101"),
            refused("bytes as key", "a1416101"),
            refused("half float 1.0", "f93c00"),
            refused("single float 1.0", "fa3f800000"),
            refused("double float 1.0", "fb3ff0000000000000"),
            refused("NaN", "f97e00"),
            refused("undefined", "f7"),
            refused("simple value 16", "f0"),
            refused("simple value 255", "f8ff"),
            refused("false in two bytes", "f814"),
            refused("tag 0 (date as text)", "c06161"),
            refused("tag 2 (big number)", "c24101"),
            refused("tag 43 over a link", "d82b582500" + raw_link),
            refused("tag 55799 (self-described)", "d9d9f700"),
            refused("bytes behind the value", "0000"),
            refused("text that is not UTF-8", "61ff"),
            refused("text with a surrogate", "63eda080"),
            refused("text with an overlong character", "62c080"),
            refused("bytes cut off", "4401"),
            refused("text cut off", "626f"),
            refused("list cut off", "8201"),
            refused("map cut off", "a16161"),
            refused("argument cut off", "19ff"),
            refused("2^64 - 1 bytes announced", "5bffffffffffffffff"),
            refused("2^64 - 1 characters announced", "7bffffffffffffffff"),
            refused("2^64 - 1 items announced", "9bffffffffffffffff"),
            refused("2^64 - 1 entries announced", "bbffffffffffffffff"),
            refused("17 nested lists around one value", "81" * 17 + "00"),
            refused("link without the zero byte", "d82a5824" + raw_link),
            refused("link with another multibase byte", "d82a582501" + raw_link),
            refused("link with an empty content", "d82a40"),
            refused("link over text", "d82a782500" + raw_link),
            refused("link over an integer", "d82a00"),
            refused("link to a CID version 0", "d82a5823001220" + "00" * 32),
            refused("link to a CID with the identity hash", "d82a58250001550020" + "00" * 32),
        ],
    }
