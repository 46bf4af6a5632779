"""What a consumer greets with: a token, and the signature of the peer that it was made for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from libp2p.peer.id import ID
from nacl.signing import SigningKey, VerifyKey

from p2pkv.ports import BulkOffer
from p2pkv_node.bulk_greeting import DOMAIN, GREETING_BYTES, SIGNATURE_BYTES, make_greeting, takes_up, token_of
from p2pkv_node.bulk_wire import MAGIC, MAX_GREETING_BYTES
from p2pkv_node.identity import peer_id_from_seed, signer_from_seed, verify_key_of
from tests.support import vectors
from tests.support.lanes import PEER, SEED, greeting

OFFER = BulkOffer(4002, bytes(range(32)), bytes(range(32, 64)))
KEY = SigningKey(SEED).verify_key
RIGHT = greeting(OFFER)
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493  # of Ed25519

_SEEDS = st.binary(min_size=32, max_size=32)


# --- greetings ---------------------------------------------------------------------------------------------------------------


def test_the_greeting_is_that_of_the_vector() -> None:
    vector = vectors.load("exchange.json")["bulk lane, consumer's greeting"]
    assert (bytes.fromhex(vector.fields["seed"]), vector.fields["peer_id"]) == (SEED, PEER)
    assert vector.data == RIGHT
    assert takes_up(vector.data, OFFER, KEY)


@given(_SEEDS, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_who_signs_for_its_own_offer_is_known(seed: bytes, token: bytes, fingerprint: bytes) -> None:
    offer, key = BulkOffer(1, token, fingerprint), verify_key_of(peer_id_from_seed(seed))
    said = make_greeting(offer, signer_from_seed(seed))
    assert (len(said), token_of(said)) == (GREETING_BYTES, token)
    assert GREETING_BYTES <= MAX_GREETING_BYTES
    assert key is not None
    assert takes_up(said, offer, key)


@given(st.binary(min_size=GREETING_BYTES, max_size=GREETING_BYTES))
def test_any_bytes_but_the_right_ones_are_refused(said: bytes) -> None:
    assert takes_up(said, OFFER, KEY) is (said == RIGHT)


@given(st.integers(0, GREETING_BYTES - 1), st.integers(1, 255))
def test_every_byte_of_the_right_ones_counts(position: int, difference: int) -> None:
    said = bytearray(RIGHT)
    said[position] ^= difference
    assert not takes_up(bytes(said), OFFER, KEY)


@given(_SEEDS.filter(lambda seed: seed != SEED))
def test_another_key_is_another_peer(seed: bytes) -> None:
    assert not takes_up(greeting(OFFER, seed), OFFER, KEY)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(OFFER.fingerprint + OFFER.token, id="no domain"),
        pytest.param(b"p2pkv/manifest/v1\0" + OFFER.fingerprint + OFFER.token, id="another domain"),
        pytest.param(DOMAIN + OFFER.token, id="no fingerprint"),
        pytest.param(DOMAIN + OFFER.fingerprint, id="no token"),
        pytest.param(DOMAIN + OFFER.token + OFFER.fingerprint, id="in another order"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_signature_over_anything_else_is_refused(message: bytes) -> None:
    assert not takes_up(MAGIC + OFFER.token + SigningKey(SEED).sign(message).signature, OFFER, KEY)


def test_a_greeting_is_for_one_offer() -> None:
    assert not takes_up(RIGHT, replace(OFFER, token=bytes(32)), KEY)
    assert not takes_up(RIGHT, replace(OFFER, fingerprint=bytes(32)), KEY)


def test_a_signature_has_one_form() -> None:
    scalar = int.from_bytes(RIGHT[-32:], "little") + GROUP_ORDER
    assert not takes_up(RIGHT[:-32] + scalar.to_bytes(32, "little"), OFFER, KEY)


def test_a_key_for_which_anybody_can_sign_is_refused() -> None:
    """The neutral point as key and as half of the signature satisfies the equation of Ed25519 for every message."""
    neutral = b"\x01" + bytes(31)
    said = MAGIC + OFFER.token + neutral + bytes(SIGNATURE_BYTES - len(neutral))
    assert not takes_up(said, OFFER, VerifyKey(neutral))


# --- keys in peer ids ------------------------------------------------------------------------------------------------------


@given(_SEEDS)
def test_a_peer_id_carries_its_key(seed: bytes) -> None:
    assert verify_key_of(peer_id_from_seed(seed)) == SigningKey(seed).verify_key


@given(st.binary(max_size=48))
def test_only_one_form_carries_a_key(multihash: bytes) -> None:
    assert verify_key_of(ID(multihash).to_base58()) is None


@pytest.mark.parametrize(
    "multihash",
    [
        pytest.param("1220" + 32 * "07", id="hash of a key"),
        pytest.param("0025 0802 1221" + 33 * "02", id="secp256k1"),
        pytest.param("0024 0802 1220" + 32 * "07", id="another type"),
        pytest.param("0024 1220" + 32 * "07" + "0801", id="fields in another order"),
        pytest.param("0023 0801 121f" + 31 * "07", id="31 bytes"),
        pytest.param("0024 0801 1220" + 31 * "07", id="cut off"),
        pytest.param("0024 0801 1220" + 33 * "07", id="a byte behind"),
        pytest.param("", id="nothing"),
    ],
)
def test_an_id_without_an_ed25519_key_carries_none(multihash: str) -> None:
    assert verify_key_of(ID(bytes.fromhex(multihash)).to_base58()) is None


@pytest.mark.parametrize("text", ["consumer 0OIl", "ä", PEER[:-1] + "0"])
def test_what_is_no_base58_carries_no_key(text: str) -> None:
    assert verify_key_of(text) is None


def test_what_signs_does_not_show_its_secret() -> None:
    seed = b"a secret of thirty-two bytes ..."
    shown = repr(signer_from_seed(seed))
    assert seed.decode() not in shown
    assert seed.hex() not in shown
