"""Attacks on statements: signatures over something else, lists that lie, shrink or grow without end, keys that nobody gave.

A peer passes on whatever it likes; a thief signs whatever it likes. Neither takes anything back that was taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import permutations
from typing import Any

import pytest

from p2pkv.artifact.granting import make_grant
from p2pkv.errors import (
    DagCborError,
    FormatError,
    P2pkvError,
    SignatureError,
    StatementError,
    TruncatedError,
    UnknownVersionError,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import DOMAIN as MANIFEST_DOMAIN
from p2pkv.formats.grant import Grant
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement, Statement, StatementKind
from p2pkv.formats.succession import CONSENT_DOMAIN, Succession, consent_bytes
from p2pkv.limits import MAX_LISTS_PER_PUBLISHER, MAX_REASON_BYTES, MAX_REVOCATIONS, MAX_STATEMENT_BYTES, MAX_STATEMENTS
from p2pkv.trust.record import Record, record_from, succeeded
from p2pkv_node.bulk_greeting import DOMAIN as BULK_DOMAIN
from tests.hostile.attack import Attack, assert_refused
from tests.hostile.nodes import BEYOND, Change, changed, flipped, put, without
from tests.support import edwards, samples
from tests.support.samples import CREATED, KEY, MODEL_ID, OTHER_KEY, OTHER_PUBLISHER, PUBLISHER
from tests.support.statements import THIRD_KEY, key, revocations, succession

CID = samples.envelope().cid


def listed(*items: Revoked, sequence: int = 1) -> Revocations:
    return Revocations(publisher=PUBLISHER, sequence=sequence, created=CREATED, items=items)


STATEMENTS: dict[StatementKind, Statement] = {
    StatementKind.REVOCATIONS: listed(
        Revoked(Scope.MANIFEST, CID, "a mistake"), Revoked(Scope.MODEL, MODEL_ID, ""), Revoked(Scope.BEFORE, 7, "older ones")
    ),
    StatementKind.SUCCESSION: Succession.agreed(PUBLISHER, OTHER_KEY, last=9, created=CREATED, reason="a new year"),
    StatementKind.GRANT: make_grant(
        KEY, CID, bytes(32), MODEL_ID, samples.TOKEN_IDS, sequence=1, created=CREATED, ephemeral=bytes(range(32))
    ),
}
CLASSES: dict[StatementKind, type[Statement]] = {
    StatementKind.REVOCATIONS: Revocations,
    StatementKind.SUCCESSION: Succession,
    StatementKind.GRANT: Grant,
}
SIGNED = {kind: SignedStatement.sign(statement, KEY) for kind, statement in STATEMENTS.items()}
OTHER_DOMAINS = (b"", b"\0", MANIFEST_DOMAIN, BULK_DOMAIN, CONSENT_DOMAIN)


def open_as(kind: StatementKind, signed: SignedStatement) -> None:
    SignedStatement.decode(signed.encode()).open(CLASSES[kind])


# --- signatures ------------------------------------------------------------------------------------------------------------


def signed_in(domain: bytes, payload: bytes, kind: StatementKind) -> SignedStatement:
    return SignedStatement(kind, payload, bytes(KEY.verify_key), KEY.sign(domain + payload).signature)


def forgeries(kind: StatementKind) -> dict[str, SignedStatement]:
    """Return what is no signature of the publisher over a statement of this kind, by name."""
    good = SIGNED[kind]
    scalar = int.from_bytes(good.signature[32:], "little")
    return {
        **{f"signed in the domain {domain!r}": signed_in(domain, good.payload, kind) for domain in OTHER_DOMAINS},
        **{
            f"signed in the domain of {other.value}": signed_in(other.domain, good.payload, kind)
            for other in StatementKind
            if other is not kind
        },
        "signed in the domain without its zero": signed_in(kind.domain[:-1], good.payload, kind),
        "signed in a later version's domain": signed_in(kind.domain.replace(b"v1", b"v2"), good.payload, kind),
        "another payload": replace(good, payload=good.payload[:-1] + bytes((good.payload[-1] ^ 1,))),
        "no payload": replace(good, payload=b""),
        "another key": replace(good, key=bytes(OTHER_KEY.verify_key)),
        "a key of small order": replace(good, key=next(edwards.encodings(edwards.SMALL_ORDER[1])), signature=bytes(64)),
        "another's signature": replace(good, signature=OTHER_KEY.sign(kind.domain + good.payload).signature),
        "no signature": replace(good, signature=bytes(64)),
        "S + L": replace(good, signature=good.signature[:32] + (scalar + edwards.ORDER).to_bytes(32, "little")),
        **{f"bit {at} of the signature": replace(good, signature=flipped(good.signature, at)) for at in (0, 255, 256, 511)},
        **{f"renamed from {other.value}": replace(SIGNED[other], kind=kind) for other in StatementKind if other is not kind},
    }


def stolen_name(kind: StatementKind) -> SignedStatement:
    """Return what another key signed in the publisher's name."""
    payload = STATEMENTS[kind].encode()
    return SignedStatement(kind, payload, bytes(OTHER_KEY.verify_key), OTHER_KEY.sign(kind.domain + payload).signature)


# --- payloads --------------------------------------------------------------------------------------------------------------

NODES = {kind: dagcbor.decode_map(statement.encode()) for kind, statement in STATEMENTS.items()}
OF_ALL: dict[str, tuple[Change, type[P2pkvError]]] = {
    **{
        f"{name} of {number}": (put(name, value=number), DagCborError) for name in ("sequence", "created") for number in BEYOND
    },
    **{f"{name} of -1": (put(name, value=-1), StatementError) for name in ("sequence", "created")},
    "sequence of 0": (put("sequence", value=0), StatementError),
    "a sequence that is true": (put("sequence", value=True), StatementError),
    "a publisher who is nobody": (put("publisher", value="did:key:z6MkNobody"), FormatError),
    "a publisher who is bytes": (put("publisher", value=bytes(32)), StatementError),
    "version 2": (put("version", value=2), UnknownVersionError),
    "version 0": (put("version", value=0), UnknownVersionError),
    "the kind of a manifest": (put("kind", value="p2pkv/manifest"), StatementError),
    "the kind of the signed form": (put("kind", value="p2pkv/statement"), StatementError),
    **{f"no {name}": (without(name), StatementError) for name in ("kind", "version", "publisher", "sequence", "created")},
    "as much of a later version as makes it too large": (put("later", value=bytes(MAX_STATEMENT_BYTES)), StatementError),
}


def item(**fields: Any) -> Change:
    return put("items", value=[{"reason": "", **fields}])


OF_LISTS: dict[str, tuple[Change, type[P2pkvError]]] = {
    "no items": (without("items"), StatementError),
    "items that are a map": (put("items", value={}), StatementError),
    "an item that is a list": (put("items", value=[[]]), StatementError),
    "a million items": (put("items", value=[0] * 1_000_000), StatementError),
    "an item more than any list has": (
        put("items", value=[{"before": number, "reason": ""} for number in range(1, MAX_REVOCATIONS + 2)]),
        StatementError,
    ),
    "an item twice": (put("items", value=[{"before": 7, "reason": reason} for reason in ("a", "b")]), StatementError),
    "an item of nothing": (item(), StatementError),
    "an item of two things": (item(before=7, model=MODEL_ID), StatementError),
    "an item of a later kind": (item(licence="MIT"), StatementError),
    "an item of a known and a later kind": (item(before=7, licence="MIT"), StatementError),
    "an item without a reason": (put("items", value=[{"before": 7}]), StatementError),
    "a reason that is longer than any": (item(before=7, reason="x" * (MAX_REASON_BYTES + 1)), StatementError),
    "a reason that is bytes": (item(before=7, reason=b"x"), StatementError),
    **{f"before {number}": (item(before=number), StatementError) for number in (0, -1, -(2**63))},
    **{f"before {number}": (item(before=number), DagCborError) for number in BEYOND},
    "before true": (item(before=True), StatementError),
    "a model id of 31 bytes": (item(model=bytes(31)), StatementError),
    "a model by its name": (item(model="llama"), StatementError),
    "a manifest by its text": (item(manifest=str(CID)), StatementError),
}
OF_SUCCESSIONS: dict[str, tuple[Change, type[P2pkvError]]] = {
    "a key that follows itself": (put("successor", value=PUBLISHER), StatementError),
    "another successor than the one who agreed": (
        put("successor", value=encode_did(bytes(THIRD_KEY.verify_key))),
        SignatureError,
    ),
    "a successor of small order": (
        put("successor", value=encode_did(next(edwards.encodings(edwards.SMALL_ORDER[1])))),
        SignatureError,
    ),
    "a successor who is nobody": (put("successor", value=""), FormatError),
    "no consent": (put("consent", value=bytes(64)), SignatureError),
    "a consent of 63 bytes": (put("consent", value=bytes(63)), StatementError),
    "the publisher's own consent": (
        put("consent", value=KEY.sign(consent_bytes(bytes(KEY.verify_key), bytes(OTHER_KEY.verify_key))).signature),
        SignatureError,
    ),
    "consent to follow another": (
        put(
            "consent", value=OTHER_KEY.sign(consent_bytes(bytes(THIRD_KEY.verify_key), bytes(OTHER_KEY.verify_key))).signature
        ),
        SignatureError,
    ),
    "consent with the two keys exchanged": (
        put("consent", value=OTHER_KEY.sign(consent_bytes(bytes(OTHER_KEY.verify_key), bytes(KEY.verify_key))).signature),
        SignatureError,
    ),
    "a last number of -1": (put("last", value=-1), StatementError),
    "a last number of 2^63": (put("last", value=2**63), DagCborError),
    "a reason that is longer than any": (put("reason", value="x" * (MAX_REASON_BYTES + 1)), StatementError),
}

# --- the signed form -------------------------------------------------------------------------------------------------------

SIGNED_NODE = dagcbor.decode_map(SIGNED[StatementKind.REVOCATIONS].encode())
OF_SIGNED: dict[str, tuple[Change, type[P2pkvError]]] = {
    **{f"no {name}": (without(name), StatementError) for name in SIGNED_NODE},
    "the form of a manifest": (put("kind", value="p2pkv/envelope"), StatementError),
    "version 2": (put("version", value=2), UnknownVersionError),
    **{
        f"a statement {name!r}": (put("statement", value=name), StatementError)
        for name in ("", "revocation", "REVOCATIONS", "p2pkv/revocations", "manifest", "x" * 1000)
    },
    "a key of 31 bytes": (put("key", value=bytes(31)), StatementError),
    "a key that is a did": (put("key", value=PUBLISHER), StatementError),
    "a signature of 65 bytes": (put("signature", value=bytes(65)), StatementError),
    "a payload that is a map": (put("payload", value={}), StatementError),
    "a payload larger than any": (put("payload", value=bytes(MAX_STATEMENT_BYTES)), StatementError),
    "megabytes of payload": (put("payload", value=bytes(16_000_000)), StatementError),
    "a field of a later version": (put("later", value=1), StatementError),
}

# --- what a publisher contradicts ------------------------------------------------------------------------------------------


def hear(statements: Callable[[], Sequence[SignedStatement]]) -> None:
    record_from(PUBLISHER, statements())


def contradicting(count: int) -> list[SignedStatement]:
    return [revocations(number, 100 + number) for number in range(1, count + 1)]


@cache
def largest(count: int) -> list[SignedStatement]:
    """Return lists of which none has an item of another, each about as large as a list may be: reasons of 100 bytes."""
    return [
        SignedStatement.sign(
            listed(*(Revoked(Scope.BEFORE, 1000 * number + at, "x" * 100) for at in range(1000)), sequence=number), KEY
        )
        for number in range(1, count + 1)
    ]


OF_RECORDS: dict[str, Callable[[], Sequence[SignedStatement]]] = {
    "a list more than may contradict": lambda: contradicting(MAX_LISTS_PER_PUBLISHER + 1),
    "the largest lists, and one more": partial(largest, MAX_LISTS_PER_PUBLISHER + 1),
    "another publisher's list": lambda: [revocations(1, 7, signer=OTHER_KEY)],
    "a grant": lambda: [SIGNED[StatementKind.GRANT]],
}
ATTACKS = [
    *(
        Attack(f"{kind.value}: {name}", partial(open_as, kind, signed), SignatureError)
        for kind in StatementKind
        for name, signed in forgeries(kind).items()
    ),
    *(
        Attack(f"{kind.value} in another's name", partial(open_as, kind, stolen_name(kind)), SignatureError)
        for kind in CLASSES
    ),
    *(
        Attack(f"{one.value} for {other.value}", partial(open_as, other, SIGNED[one]), StatementError)
        for one, other in permutations(CLASSES, 2)
    ),
    *(
        # Signed by the publisher itself in the domain of the other kind: the payload says what it is.
        Attack(
            f"{one.value} signed as {other.value}",
            partial(open_as, other, signed_in(other.domain, SIGNED[one].payload, other)),
            StatementError,
        )
        for one, other in permutations(CLASSES, 2)
    ),
    *(
        Attack(f"payload of {kind.value}: {name}", CLASSES[kind].decode, error, partial(changed, NODES[kind], change))
        for kind, table in (
            *((kind, OF_ALL) for kind in CLASSES),
            (StatementKind.REVOCATIONS, OF_LISTS),
            (StatementKind.SUCCESSION, OF_SUCCESSIONS),
        )
        for name, (change, error) in table.items()
    ),
    *(
        Attack(f"signed form: {name}", SignedStatement.decode, error, partial(changed, SIGNED_NODE, change))
        for name, (change, error) in OF_SIGNED.items()
    ),
    *(Attack(f"heard: {name}", partial(hear, statements), StatementError) for name, statements in OF_RECORDS.items()),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_what_the_attacks_change_is_good() -> None:
    for kind, signed in SIGNED.items():
        open_as(kind, signed)
        CLASSES[kind].decode(changed(NODES[kind], lambda node: None))
    assert SignedStatement.decode(changed(SIGNED_NODE, lambda node: None)) == SIGNED[StatementKind.REVOCATIONS]
    hear(lambda: contradicting(MAX_LISTS_PER_PUBLISHER))
    hear(lambda: largest(MAX_LISTS_PER_PUBLISHER + 1)[:-1])
    assert len(largest(MAX_LISTS_PER_PUBLISHER + 1)[0].encode()) > 0.9 * MAX_STATEMENT_BYTES


@pytest.mark.parametrize("kind", CLASSES)
def test_cut_off_anywhere(kind: StatementKind) -> None:
    data, payload = SIGNED[kind].encode(), SIGNED[kind].payload
    for end in range(0, len(payload), 7):
        with pytest.raises(TruncatedError):
            CLASSES[kind].decode(payload[:end])
        with pytest.raises(TruncatedError):
            SignedStatement.decode(data[:end])


# --- what was taken back stays taken back ----------------------------------------------------------------------------------


def numbers_of(record: Record) -> set[object]:
    return {revoked.what for revoked in record.items}


@pytest.mark.parametrize(
    "later",
    [(2,), (2, 5), (2, 6), (1,), (1, 9), (EVERYTHING - 1,)],
    ids=["empty", "shorter", "another half", "the same number, empty", "the same number, another", "the highest, empty"],
)
def test_a_list_that_shrinks_takes_nothing_back(later: tuple[int, ...]) -> None:
    """Of whoever has the key: what it took back once is out of its hands."""
    first = revocations(1, 5, 6)
    shrunk = revocations(*later)
    for order in permutations((first, shrunk)):
        assert numbers_of(record_from(PUBLISHER, order)) == {5, 6, *later[1:]}
    again = record_from(PUBLISHER, (first, shrunk, first, shrunk))
    assert again == record_from(PUBLISHER, (first, shrunk))


def test_a_thief_cannot_fill_the_place_of_what_the_publisher_has_yet_to_say() -> None:
    """Of lists that contradict each other no fifth is kept, but one that has all of them, or takes all back, always is."""
    record = record_from(PUBLISHER, contradicting(MAX_LISTS_PER_PUBLISHER))
    longer = record.next_list(Revoked(Scope.BEFORE, 7, "older ones"), CREATED, sequence=99)
    assert numbers_of(record.heard(SignedStatement.sign(longer, KEY))) == numbers_of(record) | {7}
    full = record.heard(revocations(EVERYTHING - 1, EVERYTHING))
    assert full.burnt is not None
    assert len(full.statements) <= MAX_STATEMENTS


def test_a_thief_who_names_its_own_successor_leads_nobody_anywhere() -> None:
    rows = [succession(KEY, OTHER_KEY), succession(KEY, THIRD_KEY), *(succession(KEY, key(number)) for number in range(9, 20))]
    for order in (rows, rows[::-1]):
        record = record_from(PUBLISHER, order)
        assert record.succession is None
        assert len(record.successions) == 2
        assert list(succeeded(PUBLISHER, {PUBLISHER: record})) == [PUBLISHER]


def test_a_ring_of_keys_is_walked_once() -> None:
    ring = {
        PUBLISHER: record_from(PUBLISHER, [succession(KEY, OTHER_KEY)]),
        OTHER_PUBLISHER: record_from(OTHER_PUBLISHER, [succession(OTHER_KEY, KEY)]),
    }
    assert list(succeeded(PUBLISHER, ring)) == [PUBLISHER, OTHER_PUBLISHER]
