"""CIDs: the profile, with ``multiformats`` as the oracle."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, strategies as st
from multiformats import CID

from p2pkv.errors import CidError, IntegrityError
from p2pkv.formats.cid import CID_BYTES, Cid, Codec, HashFunction, is_binary_cid
from tests.support import vectors
from tests.support.strategies import cids

VECTORS = vectors.load("cid.json")
REFUSED = vectors.refused("cid.json")
CODEC_NAMES = {Codec.RAW: "raw", Codec.DAG_CBOR: "dag-cbor"}
HASH_NAMES = {HashFunction.BLAKE3: "blake3", HashFunction.SHA2_256: "sha2-256"}
BLOCK = Cid.of_block(b"p2pkv")


@pytest.mark.parametrize("name", VECTORS)
def test_golden_vector(name: str) -> None:
    vector = VECTORS[name]
    cid = Cid.from_bytes(vector.data)
    assert str(cid) == vector.fields["text"]
    assert cid.binary == vector.data
    assert cid.multihash == vector.data[2:]
    cid.check(bytes.fromhex(vector.fields["content"]))


def test_of_block_and_of_node_make_the_golden_cids() -> None:
    assert Cid.of_block(b"p2pkv").binary == VECTORS["block"].data
    assert Cid.of_node(b"\xa0").binary == VECTORS["node"].data


@given(cids)
def test_bytes_and_text_equal_those_of_multiformats(cid: Cid) -> None:
    theirs = CID.decode(cid.binary)
    assert theirs.version == 1
    assert theirs.codec.name == CODEC_NAMES[cid.codec]
    assert theirs.hashfun.name == HASH_NAMES[cid.hash_function]
    assert theirs.raw_digest == cid.digest
    assert bytes(theirs) == cid.binary
    assert str(theirs.set(base="base32")) == str(cid)
    assert bytes(theirs.digest) == cid.multihash


@given(cids)
def test_round_trips(cid: Cid) -> None:
    assert Cid.from_bytes(cid.binary) == cid
    assert Cid.parse(str(cid)) == cid
    assert hash(Cid.parse(str(cid))) == hash(cid)
    for buffer in (bytearray(cid.binary), memoryview(cid.binary)):
        assert Cid.from_bytes(buffer) == cid
    assert len(cid.binary) == CID_BYTES
    assert is_binary_cid(cid.binary)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_bytes(name: str) -> None:
    data = bytes.fromhex(REFUSED[name]["hex"])
    with pytest.raises(CidError):
        Cid.from_bytes(data)
    assert not is_binary_cid(data)


@given(st.binary(max_size=40) | st.binary(min_size=4, max_size=4).map(lambda head: head + bytes(32)))
def test_any_bytes_are_a_cid_of_the_profile_or_refused(data: bytes) -> None:
    try:
        cid = Cid.from_bytes(data)
    except CidError:
        assert not is_binary_cid(data)
        return
    assert is_binary_cid(data)
    assert cid.binary == data


@pytest.mark.parametrize("cut", range(CID_BYTES))
def test_cut_bytes(cut: int) -> None:
    with pytest.raises(CidError):
        Cid.from_bytes(BLOCK.binary[:cut])
    assert not is_binary_cid(BLOCK.binary[:cut])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        str(BLOCK).upper(),
        "B" + str(BLOCK)[1:].upper(),
        "z" + str(BLOCK)[1:],
        str(BLOCK)[:-1],
        str(BLOCK) + "a",
        str(BLOCK) + "=",
        " " + str(BLOCK)[:-1],
        str(BLOCK)[:-1] + "1",  # not in the alphabet
        str(BLOCK)[:-1] + "é",
        "b" + "é" * 58,
        "b" + "\ud800" * 58,
        "b" + "\u0131" * 58,  # upper() makes an ASCII letter of it
        "b" + "ß" * 58,  # upper() makes two letters of it
        str(CID.decode(BLOCK.binary).set(base="base58btc")),
        "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",
    ],
)
def test_refused_texts(text: str) -> None:
    with pytest.raises(CidError):
        Cid.parse(text)


def test_unused_bits_of_the_last_character_must_be_zero() -> None:
    last = str(BLOCK)[-1]
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    index = alphabet.index(last)
    assert index % 4 == 0
    for bits in (1, 2, 3):
        with pytest.raises(CidError):
            Cid.parse(str(BLOCK)[:-1] + alphabet[index + bits])


@given(st.text(max_size=70) | st.text(min_size=58, max_size=58).map(lambda rest: "b" + rest))
def test_any_text_is_canonical_or_refused(text: str) -> None:
    try:
        cid = Cid.parse(text)
    except CidError:
        return
    assert str(cid) == text


@given(st.binary(max_size=200), st.integers(0, 1600))
def test_a_flipped_bit_does_not_match(data: bytes, position: int) -> None:
    cids_of_data = (Cid.of_block(data), Cid(Codec.RAW, HashFunction.SHA2_256, hashlib.sha256(data).digest()))
    for cid in cids_of_data:
        assert cid.matches(data)
        cid.check(memoryview(data))
        changed = bytearray(data or b"\x00")
        changed[position // 8 % len(changed)] ^= 1 << position % 8
        assert not cid.matches(changed)
        with pytest.raises(IntegrityError):
            cid.check(changed)


def test_codec_and_hash_function_are_part_of_the_identity() -> None:
    assert Cid.of_block(b"x") != Cid.of_node(b"x")
    assert len({Cid.of_block(b"x"), Cid.of_node(b"x"), Cid.of_block(b"x")}) == 2
