"""Statements: nothing but its publisher's signature, for just this kind, makes one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from p2pkv.errors import FormatError, SignatureError, StatementError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement, Statement
from p2pkv.formats.succession import Succession
from p2pkv.limits import MAX_REASON_BYTES, MAX_REVOCATIONS, MAX_STATEMENT_BYTES
from tests.support import samples, vectors

GOLDEN = vectors.load("statements.json")
REFUSED = vectors.refused("statements.json")
CREATED = 1_767_312_000

REVOCATIONS = Revocations(
    publisher=samples.PUBLISHER,
    sequence=1,
    created=CREATED,
    items=(
        Revoked(Scope.MANIFEST, samples.envelope().cid, "made with the wrong tokenizer"),
        Revoked(Scope.MODEL, samples.MODEL_ID, ""),
        Revoked(Scope.BEFORE, 7, "the machine that made them was not ours alone"),
    ),
)
SUCCESSION = Succession.agreed(samples.PUBLISHER, samples.OTHER_KEY, last=12, created=CREATED, reason="yearly change of keys")
STATEMENTS: dict[str, Statement] = {"revocations": REVOCATIONS, "succession": SUCCESSION}
KINDS: dict[str, type[Statement]] = {"revocations": Revocations, "succession": Succession}


@pytest.mark.parametrize("name", STATEMENTS)
def test_golden_vectors(name: str) -> None:
    statement, golden = STATEMENTS[name], GOLDEN[name]
    assert statement.encode() == GOLDEN[f"{name}, payload"].data
    signed = SignedStatement.sign(statement, samples.KEY)
    assert signed.encode() == golden.data
    assert SignedStatement.decode(golden.data) == signed
    assert signed.cid == Cid.of_node(golden.data)
    assert signed.publisher == samples.PUBLISHER
    assert signed.open(KINDS[name]) == statement


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_to_be_refused(name: str) -> None:
    for kind in KINDS.values():
        with pytest.raises((FormatError, SignatureError)):
            SignedStatement.decode(bytes.fromhex(REFUSED[name]["hex"])).open(kind)


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_flipped_bit_opens(name: str) -> None:
    data = GOLDEN[name].data
    for position in range(8 * len(data)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises((SignatureError, FormatError)):
            SignedStatement.decode(changed).open(KINDS[name])


@pytest.mark.parametrize("name", STATEMENTS)
def test_cut_and_trailing_bytes(name: str) -> None:
    data = GOLDEN[name].data
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            SignedStatement.decode(data[:cut])
    with pytest.raises(FormatError):
        SignedStatement.decode(data + b"\0")


@given(st.binary(max_size=96))
def test_garbage(data: bytes) -> None:
    with pytest.raises(FormatError):
        SignedStatement.decode(data)
    for kind in KINDS.values():
        with pytest.raises(FormatError):
            kind.decode(data)


def test_a_manifest_is_no_statement_and_no_statement_a_manifest() -> None:
    envelope = samples.envelope()
    for kind in KINDS.values():
        signed = SignedStatement(kind.kind, envelope.payload, envelope.key, envelope.signature)
        with pytest.raises(SignatureError):
            signed.open(kind)
    signed = SignedStatement.sign(REVOCATIONS, samples.KEY)
    with pytest.raises(SignatureError):
        replace(envelope, payload=signed.payload, signature=signed.signature).open()


def test_another_kind_than_the_expected_one_is_told() -> None:
    with pytest.raises(StatementError, match="expected succession, found revocations"):
        SignedStatement.sign(REVOCATIONS, samples.KEY).open(Succession)


def test_only_the_publisher_signs() -> None:
    with pytest.raises(StatementError, match="publisher"):
        SignedStatement.sign(REVOCATIONS, samples.OTHER_KEY)


def test_later_fields_are_kept_and_covered() -> None:
    later = replace(REVOCATIONS, extra={"later": 1})
    signed = SignedStatement.sign(later, samples.KEY)
    assert signed.open(Revocations) == later
    with pytest.raises(SignatureError):
        replace(signed, payload=REVOCATIONS.encode()).open(Revocations)


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize("field", ["kind", "version", "publisher", "sequence", "created"])
def test_a_missing_field(name: str, field: str) -> None:
    node: Any = dagcbor.decode(STATEMENTS[name].encode())
    del node[field]
    with pytest.raises(StatementError, match=f"{field} is missing"):
        KINDS[name].decode(dagcbor.encode(node))


@pytest.mark.parametrize("name", STATEMENTS)
def test_an_unknown_version(name: str) -> None:
    node: Any = dagcbor.decode(STATEMENTS[name].encode())
    with pytest.raises(UnknownVersionError):
        KINDS[name].decode(dagcbor.encode(node | {"version": 2}))


def test_a_list_is_bounded() -> None:
    full = replace(REVOCATIONS, items=tuple(Revoked(Scope.BEFORE, number, "") for number in range(1, MAX_REVOCATIONS + 1)))
    assert SignedStatement.sign(full, samples.KEY).open(Revocations) == full
    with pytest.raises(StatementError, match="exceeds"):
        replace(full, items=tuple(replace(item, reason="x" * MAX_REASON_BYTES) for item in full.items)).encode()
    with pytest.raises(StatementError, match="exceeds"):
        SignedStatement.decode(bytes(MAX_STATEMENT_BYTES + 1))
    with pytest.raises(StatementError, match="reason"):
        SignedStatement.sign(
            replace(REVOCATIONS, items=(Revoked(Scope.BEFORE, 1, "x" * (MAX_REASON_BYTES + 1)),)), samples.KEY
        )


def test_what_an_item_covers() -> None:
    model, cid, other = samples.MODEL_ID, samples.envelope().cid, Cid.of_node(b"")
    assert Revoked(Scope.MANIFEST, cid, "").covers(cid, model, 7)
    assert not Revoked(Scope.MANIFEST, cid, "").covers(other, model, 7)
    assert Revoked(Scope.MODEL, model, "").covers(other, model, 7)
    assert not Revoked(Scope.MODEL, bytes(32), "").covers(cid, model, 7)
    assert Revoked(Scope.BEFORE, 8, "").covers(cid, model, 7)
    assert not Revoked(Scope.BEFORE, 7, "").covers(cid, model, 7)
    assert Revoked(Scope.BEFORE, EVERYTHING, "").covers(cid, model, EVERYTHING)
    assert not Revoked(Scope.BEFORE, EVERYTHING - 1, "").covers(cid, model, EVERYTHING)
