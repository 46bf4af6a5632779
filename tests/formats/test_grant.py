"""Grants: one reader opens them, nobody else does, and what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from nacl.public import SealedBox
from nacl.signing import SigningKey

from p2pkv.errors import FormatError, IntegrityError, SignatureError, StatementError, WrongReaderError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.grant import Grant, seal_key, start_bytes
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_STATEMENT_BYTES, MAX_TOKENS
from tests.support.artifacts import KEY, NOW, PUBLISHER

READER = SigningKey(bytes(range(50, 82)))
READER_DID = encode_did(bytes(READER.verify_key))
ARTIFACT_KEY = bytes(range(200, 232))
KEYS = st.binary(min_size=32, max_size=32)
GRANT = Grant(
    publisher=PUBLISHER,
    sequence=7,
    created=NOW,
    manifest=Cid.of_node(b"\xa0"),
    reader=READER_DID,
    sealed_key=seal_key(ARTIFACT_KEY, READER_DID, bytes(range(32))),
    model_id=bytes(32),
    token_count=600,
    start=bytes(start_bytes(600)),
    match=bytes(range(96)),
    expires=NOW + 60,
)


def test_a_signed_grant_is_opened_by_its_reader() -> None:
    signed = SignedStatement.decode(SignedStatement.sign(GRANT, KEY).encode())
    grant = signed.open(Grant)
    assert grant == GRANT
    assert grant.artifact_key(READER) == ARTIFACT_KEY


def test_another_reader_is_told_whose_it_is() -> None:
    with pytest.raises(WrongReaderError, match=READER_DID):
        GRANT.artifact_key(KEY)
    named_otherwise = replace(GRANT, reader=PUBLISHER)
    with pytest.raises(IntegrityError):
        named_otherwise.artifact_key(KEY)


def test_another_signer_and_another_payload_are_refused() -> None:
    with pytest.raises(StatementError):
        SignedStatement.sign(GRANT, READER)
    signed = SignedStatement.sign(GRANT, KEY)
    payload = replace(GRANT, expires=None).encode()
    with pytest.raises(SignatureError):
        replace(signed, payload=payload).open(Grant)


@given(key=KEYS, seed=KEYS, ephemeral=KEYS)
def test_the_sealed_key_is_a_sealed_box_of_nacl(key: bytes, seed: bytes, ephemeral: bytes) -> None:
    reader = SigningKey(seed)
    sealed = seal_key(key, encode_did(bytes(reader.verify_key)), ephemeral)
    assert SealedBox(reader.to_curve25519_private_key()).decrypt(sealed) == key
    theirs = SealedBox(reader.verify_key.to_curve25519_public_key()).encrypt(key)
    assert replace(GRANT, reader=encode_did(bytes(reader.verify_key)), sealed_key=theirs).artifact_key(reader) == key


def test_nothing_is_sealed_to_what_is_no_point() -> None:
    with pytest.raises(FormatError, match="nothing can be sealed"):
        seal_key(ARTIFACT_KEY, encode_did(b"\x02" + bytes(31)), bytes(range(32)))
    with pytest.raises(FormatError):
        seal_key(ARTIFACT_KEY, "did:key:z6MkNobody", bytes(range(32)))
    with pytest.raises(FormatError, match="32 bytes"):
        seal_key(ARTIFACT_KEY[:16], READER_DID, bytes(range(32)))


@pytest.mark.parametrize(
    "changes",
    [
        {"match": bytes(64)},
        {"match": bytes(97)},
        {"start": bytes(start_bytes(600) - 1)},
        {"start": bytes(start_bytes(600) + 4)},
        {"start": bytes(start_bytes(256) - 4)},
        {"token_count": 3, "match": bytes(32)},
        {"token_count": 0},
        {"token_count": MAX_TOKENS + 1},
        {"token_count": 513 + 256},
        {"reader": "did:key:z6MkNobody"},
        {"sealed_key": bytes(79)},
        {"model_id": bytes(31)},
        {"expires": -1},
        {"sequence": 0},
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Grant.decode(replace(GRANT, **changes).encode())


def test_unknown_fields_are_kept_and_a_grant_of_the_longest_text_fits() -> None:
    grant = replace(GRANT, extra={"note": "later"})
    assert Grant.decode(grant.encode()) == grant
    longest = replace(GRANT, token_count=MAX_TOKENS, match=bytes(MAX_TOKENS // 256 * 32))
    assert len(SignedStatement.sign(longest, KEY).encode()) < MAX_STATEMENT_BYTES


@given(garbage=st.binary(max_size=300))
def test_garbage_is_refused_by_name(garbage: bytes) -> None:
    with pytest.raises(FormatError):
        Grant.decode(garbage)
