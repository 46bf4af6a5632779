"""Envelopes: no bit of one can change, and nothing but its publisher's signature opens it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from nacl.signing import SigningKey, VerifyKey

from p2pkv.errors import FormatError, ManifestError, SignatureError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import DOMAIN, Envelope
from p2pkv.formats.signature import SIGNATURE_BYTES
from tests.support import samples, vectors

GOLDEN = vectors.load("envelope.json")["tiny"]


def tree() -> Any:
    return dagcbor.decode(GOLDEN.data)


def test_golden_vector() -> None:
    envelope = samples.envelope()
    assert envelope.encode() == GOLDEN.data
    assert Envelope.decode(GOLDEN.data) == envelope
    assert str(envelope.cid) == GOLDEN.fields["cid"]
    assert envelope.cid == Cid.of_node(GOLDEN.data)
    assert envelope.open() == samples.manifest()


def test_the_signature_verifies_with_the_library_alone() -> None:
    node = tree()
    key = SigningKey(bytes.fromhex(GOLDEN.fields["seed"])).verify_key
    assert bytes(key) == node["key"]
    assert VerifyKey(node["key"]).verify(b"p2pkv/manifest/v1\x00" + node["payload"], node["signature"])


def test_no_flipped_bit_opens() -> None:
    for position in range(8 * len(GOLDEN.data)):
        changed = bytearray(GOLDEN.data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises((SignatureError, FormatError)):
            Envelope.decode(changed).open()


def test_cut_and_trailing_bytes() -> None:
    for cut in range(len(GOLDEN.data)):
        with pytest.raises(FormatError):
            Envelope.decode(GOLDEN.data[:cut])
    for garbage in (b"\x00", GOLDEN.data):
        with pytest.raises(FormatError):
            Envelope.decode(GOLDEN.data + garbage)


@given(st.binary(max_size=64))
def test_garbage(data: bytes) -> None:
    with pytest.raises(FormatError):
        Envelope.decode(data)


@given(st.binary(max_size=200), st.binary(min_size=32, max_size=32), st.binary(min_size=64, max_size=64))
def test_a_made_up_signature_never_opens(payload: bytes, key: bytes, signature: bytes) -> None:
    envelope = Envelope(payload, key, signature)
    assert Envelope.decode(envelope.encode()) == envelope
    with pytest.raises(SignatureError):
        envelope.open()


@given(st.binary(max_size=200))
def test_a_signed_payload_that_is_no_manifest(payload: bytes) -> None:
    envelope = Envelope(payload, bytes(samples.KEY.verify_key), samples.KEY.sign(DOMAIN + payload).signature)
    with pytest.raises(FormatError):
        envelope.open()


def test_another_key_under_the_same_name() -> None:
    envelope = samples.envelope()
    other = bytes(samples.OTHER_KEY.verify_key)
    with pytest.raises(SignatureError):
        replace(envelope, key=other).open()
    resigned = samples.OTHER_KEY.sign(DOMAIN + envelope.payload).signature
    with pytest.raises(SignatureError, match="another key"):
        Envelope(envelope.payload, other, resigned).open()


def test_only_the_publisher_signs() -> None:
    with pytest.raises(ManifestError, match="publisher"):
        Envelope.sign(samples.manifest(), samples.OTHER_KEY)
    signed = Envelope.sign(samples.manifest(publisher=samples.OTHER_PUBLISHER), samples.OTHER_KEY)
    assert signed.open().publisher == samples.OTHER_PUBLISHER


def test_later_fields_of_the_manifest_are_covered() -> None:
    manifest = samples.manifest(extra={"later": 1})
    envelope = samples.envelope(manifest)
    assert Envelope.decode(envelope.encode()).open() == manifest
    for payload in (samples.manifest(extra={"later": 2}).encode(), samples.manifest().encode()):
        with pytest.raises(SignatureError):
            replace(envelope, payload=payload).open()


@pytest.mark.parametrize("name", ["kind", "version", "payload", "key", "signature"])
def test_missing_field(name: str) -> None:
    node = tree()
    del node[name]
    with pytest.raises(ManifestError, match=f"{name} is missing"):
        Envelope.decode(dagcbor.encode(node))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("kind", "p2pkv/manifest"),
        ("kind", b"p2pkv/envelope"),
        ("version", "1"),
        ("version", True),
        ("version", -1),
        ("payload", "text"),
        ("payload", Cid.of_node(b"\xa0")),
        ("payload", {}),
        ("key", bytes(31)),
        ("key", bytes(33)),
        ("key", samples.PUBLISHER),
        ("signature", b""),
        ("signature", bytes(SIGNATURE_BYTES - 1)),
        ("signature", bytes(SIGNATURE_BYTES + 1)),
        ("signature", None),
        ("later", 1),
    ],
)
def test_wrong_field(name: str, wrong: dagcbor.Value) -> None:
    with pytest.raises(ManifestError):
        Envelope.decode(dagcbor.encode(tree() | {name: wrong}))


@pytest.mark.parametrize("version", [0, 2])
def test_unknown_version(version: int) -> None:
    with pytest.raises(UnknownVersionError):
        Envelope.decode(dagcbor.encode({"kind": "p2pkv/envelope", "version": version, "other": "fields"}))


def test_an_unknown_version_of_the_manifest_is_told_once_the_signature_is_good() -> None:
    node: Any = dagcbor.decode(samples.manifest().encode())
    payload = dagcbor.encode(node | {"version": 2})
    signature = samples.KEY.sign(DOMAIN + payload).signature
    with pytest.raises(UnknownVersionError):
        Envelope(payload, bytes(samples.KEY.verify_key), signature).open()
    with pytest.raises(SignatureError):
        Envelope(payload, bytes(samples.KEY.verify_key), bytes(SIGNATURE_BYTES)).open()
