"""Attacks on envelopes: signatures that another reader might take, and keys under which anything is signed."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from p2pkv.errors import DagCborError, ManifestError, SignatureError
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import DOMAIN, Envelope
from p2pkv.limits import MAX_NODE_BYTES
from p2pkv_node.bulk_greeting import DOMAIN as BULK_DOMAIN
from tests.hostile.attack import Attack, assert_refused
from tests.hostile.nodes import flipped
from tests.support import edwards, samples

GOOD = samples.envelope()
SECRET = edwards.secret_scalar(samples.KEY)
PUBLIC = edwards.multiply(SECRET, edwards.BASE)
SCALAR = int.from_bytes(GOOD.signature[32:], "little")
SMALL = {encoding: number for number, point in enumerate(edwards.SMALL_ORDER) for encoding in edwards.encodings(point)}
OTHER_DOMAINS = [
    b"", b"\0", DOMAIN[:-1], DOMAIN[1:], DOMAIN.upper(), DOMAIN.replace(b"v1", b"v2"), DOMAIN + b"\0", BULK_DOMAIN,
    b"p2pkv/revocations/v1\0", b"p2pkv/succession/v1\0", b"p2pkv/grant/v1\0",
]  # fmt: skip


def sign_in(domain: bytes, payload: bytes = GOOD.payload) -> bytes:
    return samples.KEY.sign(domain + payload).signature


def with_scalar(scalar: int) -> bytes:
    return GOOD.signature[:32] + scalar.to_bytes(32, "little")


CHANGES: dict[str, dict[str, bytes]] = {
    **{f"signed in the domain {domain!r}": {"signature": sign_in(domain)} for domain in OTHER_DOMAINS},
    "another payload": {"payload": samples.manifest(sequence=2).encode()},
    "an empty payload": {"payload": b""},
    "an envelope for a payload": {"payload": GOOD.encode()},
    "another key": {"key": bytes(samples.OTHER_KEY.verify_key)},
    "a negated key": {"key": flipped(GOOD.key, 255)},
    "the signature of another key": {"signature": samples.OTHER_KEY.sign(DOMAIN + GOOD.payload).signature},
    "no signature": {"signature": bytes(64)},
    "R and S exchanged": {"signature": GOOD.signature[32:] + GOOD.signature[:32]},
    "-S": {"signature": with_scalar(edwards.ORDER - SCALAR)},
    **{
        f"S + {times} L": {"signature": with_scalar(SCALAR + times * edwards.ORDER)}
        for times in range(1, 16)
        if SCALAR + times * edwards.ORDER < 2**256
    },
    **{f"bit {position} of the signature": {"signature": flipped(GOOD.signature, position)} for position in range(0, 512, 37)},
}
ATTACKS = [
    *(
        Attack(name, lambda data: Envelope.decode(data).open(), SignatureError, replace(GOOD, **changes).encode)
        for name, changes in CHANGES.items()
    ),
    Attack("sixteen nodes long", Envelope.decode, DagCborError, lambda: GOOD.encode() + bytes(16 * MAX_NODE_BYTES)),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_an_envelope_that_is_signed_around_another_is_no_manifest() -> None:
    nested = Envelope(GOOD.encode(), GOOD.key, sign_in(DOMAIN, GOOD.encode()))
    assert_refused(Attack("nested", nested.open, ManifestError))


def test_these_are_all_points_of_small_order_and_their_encodings() -> None:
    assert len(set(edwards.SMALL_ORDER)) == 8
    assert len(SMALL) == 14
    assert edwards.multiply(8 * edwards.ORDER, PUBLIC) == edwards.IDENTITY


@pytest.mark.parametrize("key", SMALL, ids=bytes.hex)
def test_a_key_of_small_order_signs_nothing(key: bytes) -> None:
    """Under such a key R of small order and S = 0 would be a signature of every eighth message, or of all."""
    payload = samples.manifest(publisher=encode_did(key)).encode()
    for r in SMALL:
        assert_refused(Attack("", Envelope(payload, key, r + bytes(32)).open, SignatureError))


@pytest.mark.parametrize("r", SMALL, ids=bytes.hex)
def test_r_of_small_order_is_refused_also_where_the_equation_holds(r: bytes) -> None:
    """A publisher could make it; whoever sees two such signatures knows its key."""
    signature = edwards.sign(SECRET, GOOD.key, DOMAIN + GOOD.payload, 0, r)
    assert_refused(Attack("", replace(GOOD, signature=signature).open, SignatureError))


@pytest.mark.parametrize("number", range(1, 8))
def test_a_key_of_mixed_order_signs_nothing(number: int) -> None:
    """Seven more names of one secret: libsodium takes some of the signatures under them, other readers all or none."""
    key = next(edwards.encodings(edwards.add(PUBLIC, edwards.SMALL_ORDER[number])))
    taken = 0
    for nonce in count(1):
        payload = samples.manifest(publisher=encode_did(key), sequence=nonce).encode()
        r = next(edwards.encodings(edwards.multiply(nonce, edwards.BASE)))
        signature = edwards.sign(SECRET, key, DOMAIN + payload, nonce, r)
        assert_refused(Attack("", Envelope(payload, key, signature).open, SignatureError))
        try:
            VerifyKey(key).verify(DOMAIN + payload, signature)
            taken += 1
        except BadSignatureError:
            pass
        if taken:
            return


def test_a_signature_that_is_made_by_hand_is_as_good_as_the_library_s() -> None:
    """Else the attacks above would be refused for a slip of the attacker."""
    r = next(edwards.encodings(edwards.multiply(7, edwards.BASE)))
    replace(GOOD, signature=edwards.sign(SECRET, GOOD.key, DOMAIN + GOOD.payload, 7, r)).open()
