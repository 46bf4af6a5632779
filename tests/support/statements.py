"""Signed statements of fixed keys, made once each."""

from __future__ import annotations

from functools import cache

from nacl.signing import SigningKey

from p2pkv.formats.did import encode_did
from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.formats.succession import Succession
from tests.support.samples import CREATED, KEY


@cache
def key(number: int) -> SigningKey:
    return SigningKey(number.to_bytes(32, "big"))


THIRD_KEY = key(3)


def did_of(signer: SigningKey) -> str:
    return encode_did(bytes(signer.verify_key))


@cache
def revocations(sequence: int, *before: int, signer: SigningKey = KEY) -> SignedStatement:
    """Return a signed list that takes back all before each of the sequence numbers ``before``."""
    items = tuple(Revoked(Scope.BEFORE, number, f"before {number}") for number in before)
    statement = Revocations(publisher=did_of(signer), sequence=sequence, created=CREATED, items=items)
    return SignedStatement.sign(statement, signer)


@cache
def succession(old: SigningKey, new: SigningKey, last: int = 10) -> SignedStatement:
    statement = Succession.agreed(did_of(old), new, last=last, created=CREATED, reason="a new year")
    return SignedStatement.sign(statement, old)
