"""Attacks on DAG-CBOR: each second form of a value (RFC 8949, section 4.2), all that the profile leaves out, sizes that lie.

Each stands alone, in a list and in a map.
"""

from __future__ import annotations

from itertools import chain

import cbor2
import pytest

from p2pkv.errors import DagCborError, FormatError, TruncatedError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_NODE_BYTES, MAX_NODE_DEPTH, MAX_NODE_ITEMS
from tests.hostile.attack import Attack, assert_refused, given

LINK = b"\0" + Cid.of_block(b"p2pkv").binary
MAJORS = {"integer": 0, "negative integer": 1, "byte string": 2, "text": 3, "list": 4, "map": 5, "tag": 6}


def head(major: int, argument: int, width: int) -> bytes:
    """Return the head of an item with its argument in ``width`` bytes behind the first, in none with 0."""
    if not width:
        return bytes((major << 5 | argument,))
    return bytes((major << 5 | 24 + width.bit_length() - 1,)) + argument.to_bytes(width, "big")


def content(major: int, argument: int) -> bytes:
    """Return what makes the item whole."""
    match major:
        case 2 | 3:
            return b"a" * argument
        case 4:
            return b"\0" * argument
        case 5:
            return b"".join(dagcbor.encode(f"{key:06}") + b"\0" for key in range(argument))
        case _:
            return b""


FORMS: dict[str, tuple[bytes, type[FormatError]]] = {}
for name, major in MAJORS.items():
    for argument in (0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32):
        for width in (1, 2, 4, 8):
            shortest = 0 if argument < 24 else next(fit for fit in (1, 2, 4, 8) if argument < 256**fit)
            if width > shortest and (major < 2 or (argument < 65_535 and major != 6)):
                FORMS[f"{name} {argument} in {width} bytes"] = (
                    head(major, argument, width) + content(major, argument),
                    DagCborError,
                )
    if major != 6:
        for info in (28, 29, 30, 31):
            FORMS[f"{name} with the head {info}"] = bytes((major << 5 | info,)), DagCborError
FORMS |= {
    name: (bytes.fromhex(data), DagCborError)
    for name, data in {
        "byte string in pieces": "5f4161ff",
        "text in pieces": "7f6161ff",
        "list without a length": "9f00ff",
        "map without a length": "bf616100ff",
        "an end": "ff",
        "2^63": "1b8000000000000000",
        "2^64 - 1": "1bffffffffffffffff",
        "-2^63 - 1": "3b8000000000000000",
        "-2^64": "3bffffffffffffffff",
        "half float 0": "f90000",
        "half float 1": "f93c00",
        "half float NaN": "f97e00",
        "half float NaN with a payload": "f97e01",
        "half float infinity": "f97c00",
        "single float": "fa47c35000",
        "single float NaN": "fa7fc00000",
        "double float, the one form of DAG-CBOR": "fb3ff8000000000000",
        "double float -0": "fb8000000000000000",
        "double float NaN": "fb7ff8000000000000",
        "double float -infinity": "fbfff0000000000000",
        "undefined": "f7",
        "simple value 0": "e0",
        "simple value 19": "f3",
        "simple value 32": "f820",
        "simple value 255": "f8ff",
        "false in two bytes": "f814",
        "null in two bytes": "f816",
        "reserved simple value": "fc",
        "tag 0, a date": "c074323032362d30312d30315430303a30303a30305a",
        "tag 1, a time": "c100",
        "tag 2, a large integer": "c249010000000000000000",
        "tag 2, a small one": "c24101",
        "tag 3, a large negative integer": "c349010000000000000000",
        "tag 4, a decimal": "c4820001",
        "tag 24, CBOR in CBOR": "d8184100",
        "tag 41": "d8294100",
        "tag 43": "d82b5825" + LINK.hex(),
        "tag 256": "d901004100",
        "tag 258, a set": "d9010280",
        "tag 55799, this is CBOR": "d9d9f700",
        "tag 2^64 - 1": "dbffffffffffffffff00",
        "tag 42 in three bytes": "d9002a5825" + LINK.hex(),
        "tag 42 in nine bytes": "db000000000000002a5825" + LINK.hex(),
        "a link without its zero": "d82a5824" + LINK[1:].hex(),
        "a link with another multibase": "d82a5825" + "62" + LINK[1:].hex(),
        "a link that is empty": "d82a40",
        "a link that is a zero": "d82a4100",
        "a link that is text": "d82a6000",
        "a link that is an integer": "d82a00",
        "a link that is a list": "d82a80",
        "a link in a link": "d82ad82a5825" + LINK.hex(),
        "a link with a long length": "d82a590025" + LINK.hex(),
        "a link in pieces": "d82a5f5825" + LINK.hex() + "ff",
        "a key twice": "a2616100616101",
        "keys out of order": "a2616200616101",
        "keys by bytes before length": "a262616100616201",
        "the empty key last": "a2616100" + "6001",
        "a key in a long form": "a178016100",
        "a key in pieces": "a17f6161ff00",
        "a key that is an integer": "a10000",
        "a key that is a byte string": "a1416100",
        "a key that is null": "a1f600",
        "a key that is a map": "a1a000",
        "a key that is a link": "a1d82a5825" + LINK.hex() + "00",
        "UTF-8 in a long form": "62c080",
        "UTF-8 of a surrogate": "63eda080",
        "UTF-8 beyond Unicode": "64f4908080",
        "UTF-8 cut off": "61c3",
        "UTF-8 without a beginning": "6180",
        "a key that is not UTF-8": "a161ff00",
    }.items()
}
CLAIMS: dict[str, str] = {
    "a byte string of 2^64 - 1": "5bffffffffffffffff",
    "a byte string of 2^63 - 1": "5b7fffffffffffffff",
    "a byte string of gigabytes": "5affffffff",
    "a text of gigabytes": "7affffffff",
    "a list of 2^64 - 1": "9bffffffffffffffff",
    "a list of gigabytes": "9affffffff",
    "a map of 2^64 - 1": "bbffffffffffffffff",
    "a map of 2^63": "bb8000000000000000",  # twice as many items would be 2^64
    "a map of gigabytes": "baffffffff",
    "a link of gigabytes": "d82a5affffffff",
    "no byte": "",
    "a head alone": "19",
}
FORMS |= {name: (bytes.fromhex(data), TruncatedError) for name, data in CLAIMS.items()}

WHOLE = {
    "bytes behind the value": b"\0\0",
    "a value behind the value": b"\xa0\xa0",
    "deep lists": b"\x81" * MAX_NODE_BYTES,
    "deep maps": b"\xa1\x60" * (MAX_NODE_BYTES // 2),
    "deep tags": b"\xd8\x2a" * (MAX_NODE_BYTES // 2),
    "one level too many": b"\x81" * (MAX_NODE_DEPTH + 1) + b"\0",
    "wide and deep": (b"\x82" * MAX_NODE_DEPTH + b"\0") * 1000,
    "too many items": b"\x9a" + MAX_NODE_ITEMS.to_bytes(4, "big") + b"\0" * MAX_NODE_ITEMS,
    "a million empty lists": b"\x9a" + (MAX_NODE_BYTES - 5).to_bytes(4, "big") + b"\x80" * (MAX_NODE_BYTES - 5),
    "a byte more than a node": bytes(MAX_NODE_BYTES + 1),
    "a byte string of a node and more": b"\x5a" + MAX_NODE_BYTES.to_bytes(4, "big") + bytes(MAX_NODE_BYTES),
    "sixteen nodes": b"\x80" * (16 * MAX_NODE_BYTES),
}

PLACES = {"": b"", "in a list: ": b"\x82\0", "in a map: ": b"\xa1\x61a"}
OF_FORMS = {
    name: [
        Attack(f"{where}{name}", dagcbor.decode, error, given(before + data))
        for where, before in PLACES.items()
        if len(before + data) <= MAX_NODE_BYTES
    ]
    for name, (data, error) in FORMS.items()
}
OF_NODES = [Attack(name, dagcbor.decode, DagCborError, given(data)) for name, data in WHOLE.items()]
ATTACKS = [*chain.from_iterable(OF_FORMS.values()), *OF_NODES]


@pytest.mark.parametrize("name", OF_FORMS)
def test_refused_alone_and_in_a_list_and_a_map(name: str) -> None:
    for attack in OF_FORMS[name]:
        assert_refused(attack)


@pytest.mark.parametrize("attack", OF_NODES, ids=str)
def test_a_whole_node_is_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_a_lenient_reader_takes_most_of_them() -> None:
    """So they are attacks, and no garbage: what one reader takes and another refuses splits a network."""
    taken = 0
    for data, _ in FORMS.values():
        try:
            cbor2.loads(data)
        except (ValueError, cbor2.CBORDecodeError):
            continue
        taken += 1
    assert taken > len(FORMS) / 2
