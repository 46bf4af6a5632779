"""Strict DAG-CBOR: one value, one encoding. ``dag_cbor`` and cbor2 are independent readers of what is written."""

from __future__ import annotations

import enum
import re
from typing import Any

import cbor2
import dag_cbor
import pytest
from hypothesis import example, given, strategies as st
from multiformats import CID

from p2pkv.errors import DagCborError, TruncatedError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.limits import MAX_NODE_BYTES, MAX_NODE_DEPTH, MAX_NODE_ITEMS
from tests.support import samples, vectors
from tests.support.strategies import texts, values

VECTORS = vectors.load("dag-cbor.json")
REFUSED = vectors.refused("dag-cbor.json")


def to_oracle(value: dagcbor.Value) -> Any:
    """Return ``value`` with the CIDs of multiformats in place of ours."""
    match value:
        case Cid():
            return CID.decode(value.binary)
        case list():
            return [to_oracle(item) for item in value]
        case dict():
            return {key: to_oracle(item) for key, item in value.items()}
        case _:
            return value


def comparable(value: Any) -> Any:
    """Return ``value`` with CIDs of either library as their bytes, and kinds that Python takes for equal kept apart."""
    match value:
        case bool():
            return ("bool", value)
        case Cid():
            return ("cid", value.binary)
        case CID():
            return ("cid", bytes(value))
        case list():
            return [comparable(item) for item in value]
        case dict():
            return {key: comparable(item) for key, item in value.items()}
        case _:
            return value


@pytest.mark.parametrize("name", VECTORS)
def test_golden_vector(name: str) -> None:
    vector = VECTORS[name]
    value = vectors.from_dag_json(vector.fields["value"])
    assert dagcbor.encode(value) == vector.data
    assert comparable(dagcbor.decode(vector.data)) == comparable(value)
    assert comparable(dag_cbor.decode(vector.data)) == comparable(value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_encoding(name: str) -> None:
    with pytest.raises((DagCborError, TruncatedError)):
        dagcbor.decode(bytes.fromhex(REFUSED[name]["hex"]))


@given(values, st.integers(0, 2**20), st.integers(0, 255))
def test_what_is_accepted_re_encodes_to_the_same_bytes(value: dagcbor.Value, place: int, byte: int) -> None:
    data = bytearray(dagcbor.encode(value))
    data[place % len(data)] = byte
    try:
        decoded = dagcbor.decode(data)
    except (DagCborError, TruncatedError):
        return
    assert dagcbor.encode(decoded) == data


@pytest.mark.parametrize(
    "head", ["9bffffffffffffffff", "bbffffffffffffffff", "9a7fffffff", "ba7fffffff", "8200", "a100", "a26161"]
)
def test_more_items_than_bytes_are_refused_by_their_count(head: str) -> None:
    data = bytes.fromhex(head)
    with pytest.raises(TruncatedError, match="more items announced"):
        dagcbor.decode(data)


@given(values)
def test_round_trip(value: dagcbor.Value) -> None:
    data = dagcbor.encode(value)
    assert comparable(dagcbor.decode(data)) == comparable(value)
    for buffer in (bytearray(data), memoryview(data)):
        assert comparable(dagcbor.decode(buffer)) == comparable(value)


@given(values)
def test_an_independent_library_reads_and_writes_the_same(value: dagcbor.Value) -> None:
    data = dagcbor.encode(value)
    assert comparable(dag_cbor.decode(data)) == comparable(value)
    assert dag_cbor.encode(to_oracle(value)) == data


@given(values)
def test_cbor2_reads_the_same(value: dagcbor.Value) -> None:
    def untag(*arguments: Any) -> Cid:
        tag = next(argument for argument in arguments if isinstance(argument, cbor2.CBORTag))
        assert tag.tag == 42
        return Cid.from_bytes(tag.value[1:])

    assert comparable(cbor2.loads(dagcbor.encode(value), tag_hook=untag)) == comparable(value)


@given(st.dictionaries(texts, st.integers(0, 9), min_size=2, max_size=12))
def test_the_order_of_keys_is_that_of_length_and_bytes(mapping: dict[str, int]) -> None:
    data = dagcbor.encode(dict(reversed(mapping.items())))
    assert data == dagcbor.encode(dict(mapping))
    decoded = dagcbor.decode_map(data)
    assert list(decoded) == sorted(mapping, key=lambda key: (len(key.encode()), key.encode()))


@given(values)
def test_three_feeds(value: dagcbor.Value) -> None:
    data = dagcbor.encode(value)
    for cut in range(len(data)):
        with pytest.raises(TruncatedError):
            dagcbor.decode(data[:cut])
    for garbage in (b"\x00", b"\xff", data):
        with pytest.raises(DagCborError):
            dagcbor.decode(data + garbage)


@given(st.binary(max_size=64))
@example(bytes.fromhex("9bffffffffffffffff"))
def test_garbage_is_refused_or_is_the_encoding_of_its_value(data: bytes) -> None:
    try:
        value = dagcbor.decode(data)
    except (DagCborError, TruncatedError):
        return
    assert dagcbor.encode(value) == data


@given(values, st.data())
def test_a_changed_byte_is_refused_or_another_value(value: dagcbor.Value, data: st.DataObject) -> None:
    encoded = bytearray(dagcbor.encode(value))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        changed = dagcbor.decode(encoded)
    except (DagCborError, TruncatedError):
        return
    assert comparable(changed) != comparable(value)


class _Int(enum.IntEnum):
    ONE = 1


class _Text(enum.StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        float("nan"),
        2**63,
        -(2**63) - 1,
        "\ud800",
        {"\udfff": 1},
        ["ok", {"ok": "a\ud83d"}],
        {1: 2},
        {b"a": 2},
        {None: 2},
        {True: 2},
        (1, 2),
        {1, 2},
        bytearray(b"x"),
        memoryview(b"x"),
        object(),
        1j,
        cbor2.CBORTag(42, b"\x00"),
        cbor2.undefined,
        [[object()]],
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),  # the same in each process
)
def test_values_outside_the_profile_are_not_encoded(value: Any) -> None:
    with pytest.raises(DagCborError):
        dagcbor.encode(value)


def test_enumerations_are_encoded_as_their_values() -> None:
    mapping: dict[str, dagcbor.Value] = {_Text.ONE: [_Int.ONE, _Text.ONE]}
    assert dagcbor.encode(mapping) == dagcbor.encode({"one": [1, "one"]})


def nested(levels: int) -> dagcbor.Value:
    value: dagcbor.Value = 0
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_depth() -> None:
    deepest = nested(MAX_NODE_DEPTH)
    assert dagcbor.decode(dagcbor.encode(deepest)) == deepest
    with pytest.raises(DagCborError, match="nesting"):
        dagcbor.encode(nested(MAX_NODE_DEPTH + 1))
    with pytest.raises(DagCborError, match="nesting"):
        dagcbor.decode(b"\x81" * 100_000)
    with pytest.raises(DagCborError, match="nesting"):
        dagcbor.decode(b"\xa1\x61a" * 100_000)


def test_a_list_that_holds_itself_is_not_encoded() -> None:
    loop: list[dagcbor.Value] = []
    loop.append(loop)
    with pytest.raises(DagCborError, match="nesting"):
        dagcbor.encode(loop)


def test_count_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    fullest: list[dagcbor.Value] = [0] * (MAX_NODE_ITEMS - 1)
    data = dagcbor.encode(fullest)
    assert dagcbor.decode(data) == fullest
    with pytest.raises(DagCborError, match="items"):
        dagcbor.encode([*fullest, 0])
    one_more = b"\x9a" + MAX_NODE_ITEMS.to_bytes(4, "big") + bytes(MAX_NODE_ITEMS)
    monkeypatch.setattr(dagcbor, "encode", lambda value: one_more)
    with pytest.raises(DagCborError, match="items"):
        dagcbor.decode(one_more)


def test_size() -> None:
    largest = bytes(MAX_NODE_BYTES - 5)
    data = dagcbor.encode(largest)
    assert len(data) == MAX_NODE_BYTES
    assert dagcbor.decode(data) == largest
    with pytest.raises(DagCborError, match="exceeds"):
        dagcbor.encode(largest + b"\x00")
    with pytest.raises(DagCborError, match="exceeds"):
        dagcbor.decode(data + b"\x00")


def test_a_map_is_asked_for() -> None:
    assert dagcbor.decode_map(b"\xa0") == {}
    with pytest.raises(DagCborError, match="expected a map"):
        dagcbor.decode_map(b"\x80")


def test_a_link_out_of_the_profile_is_refused_with_its_reason() -> None:
    truncated = Cid(Codec.RAW, HashFunction.BLAKE3, bytes(20))
    data = b"\xd8\x2a\x58\x19\x00" + truncated.binary
    with pytest.raises(DagCborError, match="36 bytes"):
        dagcbor.decode(data)


def test_every_cut_of_a_real_node_is_refused() -> None:
    data = samples.segment().encode()
    for cut in range(len(data)):
        with pytest.raises(TruncatedError):
            dagcbor.decode(data[:cut])
