"""Attacks on grants: keys that anybody could open, grants of others, of the past and for somebody else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from nacl.bindings import crypto_box_beforenm, crypto_scalarmult
from nacl.public import PrivateKey, SealedBox
from nacl.secret import SecretBox
from nacl.signing import SigningKey

from p2pkv.artifact.granting import Granted, check_expiry, check_granter, grant_to, make_grant
from p2pkv.errors import (
    DagCborError,
    FormatError,
    GrantError,
    GrantExpiredError,
    IntegrityError,
    P2pkvError,
    SignatureError,
    StatementError,
    TruncatedError,
    UnknownVersionError,
    UsageError,
    WrongReaderError,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.did import encode_did
from p2pkv.formats.grant import SEALED_KEY_BYTES, Grant, seal_key
from p2pkv.formats.sealing import SEAL_BYTES, seal
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import encode_tokens
from p2pkv.limits import MAX_CLOCK_SKEW_S, MAX_TOKENS
from p2pkv.store.grants import GrantFiles
from tests.hostile.attack import Attack, assert_refused, given
from tests.hostile.nodes import BEYOND, Change, changed, flipped, put, without
from tests.support import edwards
from tests.support.artifacts import KEY, NOW, PUBLISHER, make_sample, model
from tests.support.private import ARTIFACT_KEY, make_private
from tests.support.salsa import hsalsa20

TOKENS = list(range(70_000, 70_600))
SAMPLE = make_private(TOKENS)
READER, OTHER_READER = SigningKey(bytes(range(50, 82))), SigningKey(bytes(range(90, 122)))
READER_DID, OTHER_DID = (encode_did(bytes(key.verify_key)) for key in (READER, OTHER_READER))
CHANCE = bytes(range(32))


def own_grant(tokens: list[int] = TOKENS, artifact_key: bytes = ARTIFACT_KEY) -> Grant:
    described = {"sequence": 3, "created": NOW, "ephemeral": CHANCE}
    return make_grant(KEY, SAMPLE.cid, artifact_key, model().model_id, tokens, **described)  # type: ignore[arg-type]  # of two types


GRANT = grant_to(Granted(own_grant(), ARTIFACT_KEY), READER_DID, sequence=7, created=NOW, expires=NOW + 60, ephemeral=CHANCE)
NODE = dagcbor.decode_map(GRANT.encode())

# --- payloads --------------------------------------------------------------------------------------------------------------

OF_PAYLOADS: dict[str, tuple[Change, type[P2pkvError]]] = {
    **{
        f"{name} of {number}": (put(name, value=number), DagCborError)
        for name in ("sequence", "created", "token_count", "expires", "version")
        for number in BEYOND
    },
    **{
        f"{name} of {number}": (put(name, value=number), StatementError)
        for name in ("sequence", "created", "token_count", "expires")
        for number in (-1, -(2**63))
    },
    "sequence of 0": (put("sequence", value=0), StatementError),
    **{f"{count} tokens": (put("token_count", value=count), StatementError) for count in (0, 512, 769, MAX_TOKENS + 1, 2**62)},
    "a count that is true": (put("token_count", value=True), StatementError),
    **{f"no {name}": (without(name), StatementError) for name in NODE if name != "expires"},
    "an envelope's kind": (put("kind", value="p2pkv/envelope"), StatementError),
    "a list of revocations": (put("kind", value="p2pkv/revocations"), StatementError),
    "version 2": (put("version", value=2), UnknownVersionError),
    "version true": (put("version", value=True), StatementError),
    "a reader who is nobody": (put("reader", value="did:key:z6MkNobody"), FormatError),
    "a reader who is no text": (put("reader", value=bytes(READER.verify_key)), StatementError),
    "a reader with a line end": (put("reader", value=READER_DID + "\n"), FormatError),
    "a reader in another method": (put("reader", value=READER_DID.replace("did:key", "did:web")), FormatError),
    "a publisher who is nobody": (put("publisher", value=""), FormatError),
    "a manifest that is text": (put("manifest", value=str(SAMPLE.cid)), StatementError),
    "a manifest that is bytes": (put("manifest", value=SAMPLE.cid.binary), StatementError),
    **{
        f"a sealed key of {size} bytes": (put("sealed_key", value=bytes(size)), StatementError)
        for size in (0, 32, SEALED_KEY_BYTES - 1, SEALED_KEY_BYTES + 1)
    },
    "a model id of 31 bytes": (put("model_id", value=bytes(31)), StatementError),
    **{f"{size} bytes of match keys": (put("match", value=bytes(size)), StatementError) for size in (0, 31, 95, 97, 128)},
    **{
        f"{size} bytes of the start": (put("start", value=bytes(size)), StatementError)
        for size in (0, SEAL_BYTES, 4 * 256 + SEAL_BYTES - 4, 4 * 256 + SEAL_BYTES + 1)
    },
    "a megabyte of match keys": (put("match", value=bytes(1_000_000)), StatementError),
    "a million items of a later version": (put("later", value=[0] * 1_000_000), StatementError),
    "match keys that are a list": (put("match", value=[bytes(32)] * 3), StatementError),
}

# --- the sealed key --------------------------------------------------------------------------------------------------------

P = edwards.PRIME
# The u coordinates of points of small order of curve25519 and of its twist, reduced and not (https://cr.yp.to/ecdh.html).
SMALL_U = (
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    P - 1,
    P,
    P + 1,
)
READER_X25519 = READER.to_curve25519_private_key()


def box_with(shown: bytes, shared: bytes, content: bytes = ARTIFACT_KEY) -> bytes:
    """Return the sealed box that opens where the two X25519 keys have this secret in common; ``shown`` is what it shows."""
    nonce = blake2b(shown + bytes(READER_X25519.public_key), digest_size=SecretBox.NONCE_SIZE).digest()
    return shown + bytes(SecretBox(hsalsa20(shared)).encrypt(content, nonce).ciphertext)


def open_sealed(sealed: bytes) -> bytes:
    return replace(GRANT, sealed_key=sealed).artifact_key(READER)


OTHERS_KEY = bytes(range(1, 33))
OF_SEALED: dict[str, bytes] = {
    **{
        f"a key of small order, u = {u:#x}, bit 255 {top}": box_with((u | top << 255).to_bytes(32, "little"), bytes(32))
        for u in SMALL_U
        for top in (0, 1)
    },
    "sealed to another reader": seal_key(ARTIFACT_KEY, OTHER_DID, CHANCE),
    "sealed to the publisher": seal_key(ARTIFACT_KEY, PUBLISHER, CHANCE),
    "sealed by the key alone": box_with(bytes(PrivateKey(CHANCE).public_key), CHANCE),
    "the one-time key of another": seal_key(ARTIFACT_KEY, READER_DID, OTHERS_KEY)[:32] + GRANT.sealed_key[32:],
    **{f"bit {position} changed": flipped(GRANT.sealed_key, position) for position in (0, 254, 256, 383, 384, 639)},
    "zeros": bytes(SEALED_KEY_BYTES),
}
READERS: dict[str, bytes] = {
    **{
        f"a point of small order, {encoding.hex()}": encoding
        for point in edwards.SMALL_ORDER
        for encoding in edwards.encodings(point)
    },
    **{
        f"a point of mixed order, {number}": next(
            edwards.encodings(edwards.add(edwards.multiply(edwards.secret_scalar(READER), edwards.BASE), small))
        )
        for number, small in enumerate(edwards.SMALL_ORDER)
        if number
    },
    "no point": (2).to_bytes(32, "little"),
    "y of 2^255 - 1": b"\xff" * 31 + b"\x7f",
}


OTHER_START = own_grant(list(range(600)), artifact_key=bytes(32)).start
OF_STARTS: dict[str, bytes] = {
    "the start under another key": OTHER_START,
    "a start that nobody sealed": encode_tokens(TOKENS[:256]) + bytes(SEAL_BYTES),
    "the start with another label": seal(ARTIFACT_KEY, b"p2pkv/tokens/v1", encode_tokens(TOKENS[:256])),
    **{
        f"bit {position} of the start changed": flipped(GRANT.start, position)
        for position in (0, 192, 8 * len(GRANT.start) - 1)
    },
}


def begin(start: bytes) -> None:
    Granted(replace(GRANT, start=start), ARTIFACT_KEY).begins(TOKENS, None)


def expired(ago: int, now: float) -> Attack:
    grant = replace(GRANT, expires=int(now) - ago)
    return Attack(f"expired {ago} s ago at {now:.0f}", partial(check_expiry, grant, now), GrantExpiredError)


def by_others(name: str, manifest: Any = SAMPLE.manifest, **changes: Any) -> Attack:
    return Attack(name, lambda: check_granter(replace(GRANT, **changes), manifest), GrantError)


ATTACKS = [
    *(
        Attack(f"payload: {name}", Grant.decode, error, partial(changed, NODE, change))
        for name, (change, error) in OF_PAYLOADS.items()
    ),
    *(Attack(f"sealed key: {name}", open_sealed, IntegrityError, given(sealed)) for name, sealed in OF_SEALED.items()),
    *(
        Attack(f"sealed to {name}", lambda did: seal_key(ARTIFACT_KEY, did, CHANCE), FormatError, given(encode_did(point)))
        for name, point in READERS.items()
    ),
    *(Attack(name, begin, IntegrityError, given(start)) for name, start in OF_STARTS.items()),
    Attack("opened by another reader", lambda: GRANT.artifact_key(OTHER_READER), WrongReaderError),
    Attack(
        "said to be for another reader", lambda: replace(GRANT, reader=OTHER_DID).artifact_key(OTHER_READER), IntegrityError
    ),
    *(expired(ago, NOW) for ago in (MAX_CLOCK_SKEW_S + 1, NOW)),
    expired(2**40, 2.0**41),
    by_others("by another publisher", publisher=OTHER_DID),
    by_others("of another model", model_id=bytes(32)),
    by_others("of a longer text", token_count=601),
    by_others("of a public artifact", make_sample(TOKENS).artifact.manifest),
    Attack(
        "granted on by a reader",
        lambda: grant_to(Granted(GRANT, ARTIFACT_KEY), OTHER_DID, sequence=8, created=NOW, expires=None, ephemeral=CHANCE),
        GrantError,
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_what_the_attacks_change_is_good() -> None:
    """A box that is made by hand opens, where the secret is one: else those above would be refused for the maker's slip."""
    assert Grant.decode(changed(NODE, lambda node: None)) == GRANT
    assert open_sealed(GRANT.sealed_key) == ARTIFACT_KEY
    assert open_sealed(SealedBox(READER_X25519.public_key).encrypt(ARTIFACT_KEY)) == ARTIFACT_KEY
    once = PrivateKey(CHANCE)
    shared = crypto_scalarmult(bytes(once), bytes(READER_X25519.public_key))
    assert hsalsa20(shared) == crypto_box_beforenm(bytes(READER_X25519.public_key), bytes(once))
    assert open_sealed(box_with(bytes(once.public_key), shared)) == ARTIFACT_KEY
    check_granter(GRANT, SAMPLE.manifest)
    check_expiry(GRANT, NOW)


def test_a_grant_that_is_cut_off_anywhere() -> None:
    data = GRANT.encode()
    for end in range(0, len(data), 7):
        with pytest.raises(TruncatedError):
            Grant.decode(data[:end])


def test_the_key_of_another_artifact_opens_nothing() -> None:
    """A publisher's mistake or lie: the grant opens, and what it gives is of no use here."""
    key = open_sealed(seal_key(OTHERS_KEY, READER_DID, CHANCE))
    assert key == OTHERS_KEY
    assert_refused(Attack("", lambda: SAMPLE.open(key), IntegrityError))


def test_match_keys_of_another_text_cost_a_fetch_and_give_nothing() -> None:
    """They are a hint, as a peer's match is: what counts are the token ids under the artifact key."""
    prompt = list(range(600))
    lying = Granted(own_grant(prompt), ARTIFACT_KEY)
    assert lying.usable_tokens(prompt, 600) > 0
    assert SAMPLE.open(lying.artifact_key).usable_prefix(prompt, 600) == 0


def test_an_older_grant_after_a_newer_one(tmp_path: Path) -> None:
    """One that never ends does not come back after the publisher has shortened it."""
    older, newer = (
        SignedStatement.sign(replace(GRANT, sequence=number, expires=expires), KEY).encode()
        for number, expires in ((6, None), (7, NOW))
    )
    files = GrantFiles(tmp_path)
    files.add(newer)
    assert_refused(Attack("", lambda: files.add(older), UsageError))
    assert files.get(SAMPLE.cid).expires == NOW


def test_what_another_signs_takes_no_grants_place(tmp_path: Path) -> None:
    files = GrantFiles(tmp_path)
    files.add(SignedStatement.sign(GRANT, KEY).encode())
    forged = replace(SignedStatement.sign(replace(GRANT, sequence=9), KEY), key=bytes(OTHER_READER.verify_key))
    assert_refused(Attack("", lambda: files.add(forged.encode()), SignatureError))
    assert files.get(SAMPLE.cid) == GRANT
