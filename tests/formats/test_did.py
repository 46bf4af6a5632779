"""``did:key`` names: one key, one text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from multiformats import multibase
from nacl.signing import SigningKey

from p2pkv.errors import FormatError
from p2pkv.formats.did import decode_did, encode_did
from tests.support import samples, vectors
from tests.support.strategies import digests

VECTORS = vectors.load("did-key.json")
REFUSED = vectors.refused("did-key.json")


@pytest.mark.parametrize("name", VECTORS)
def test_golden_vector(name: str) -> None:
    vector = VECTORS[name]
    key = vector.data[2:]
    assert bytes(SigningKey(bytes.fromhex(vector.fields["seed"])).verify_key) == key
    assert encode_did(key) == vector.fields["did"]
    assert decode_did(vector.fields["did"]) == key


@given(digests)
def test_text_equals_that_of_multiformats(key: bytes) -> None:
    did = encode_did(key)
    assert did == "did:key:" + multibase.encode(b"\xed\x01" + key, "base58btc")
    assert did.startswith("did:key:z6Mk")
    assert len(did) == 56
    assert decode_did(did) == key


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32], ids=["zeros", "ones"])
def test_smallest_and_largest_key(key: bytes) -> None:
    assert decode_did(encode_did(key)) == key


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(FormatError, match="did:key:z6Mk"):
        decode_did(REFUSED[name]["did"])


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_of_another_length(length: int) -> None:
    with pytest.raises(FormatError):
        encode_did(bytes(length))


@given(st.text(max_size=60) | st.text(max_size=60).map("did:key:z".__add__))
def test_any_text_is_canonical_or_refused(text: str) -> None:
    try:
        key = decode_did(text)
    except FormatError:
        return
    assert encode_did(key) == text


@pytest.mark.parametrize("position", range(len(samples.PUBLISHER)))
def test_a_changed_or_missing_character_is_another_key_or_refused(position: int) -> None:
    did = samples.PUBLISHER
    with pytest.raises(FormatError):
        decode_did(did[:position])
    try:
        key = decode_did(did[:position] + ("2" if did[position] != "2" else "3") + did[position + 1 :])
    except FormatError:
        return
    assert key != decode_did(did)


def test_a_long_text_is_refused_unread() -> None:
    with pytest.raises(FormatError) as caught:
        decode_did("did:key:z" + "1" * 10_000_000)
    assert len(caught.value.message) < 200
