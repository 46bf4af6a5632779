"""Drafts: the manifest without its publisher's terms, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from p2pkv.artifact.build import Terms
from p2pkv.artifact.signing import NO_TERMS, check_fits, renewed, sign_manifest
from p2pkv.errors import FormatError, ManifestError, SignatureError, UsageError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import MAX_INT
from p2pkv.formats.did import decode_did
from p2pkv.formats.draft import NOBODY, decode_draft, encode_draft, is_draft, open_root
from p2pkv.formats.envelope import DOMAIN, Envelope
from p2pkv.formats.manifest import Manifest
from tests.support import samples, strategies, vectors
from tests.support.artifacts import KEY, PUBLISHER

GOLDEN = vectors.load("draft.json")["tiny"]
REFUSED = vectors.refused("draft.json")
MANIFEST = Manifest.decode(vectors.load("manifest.json")["tiny"].data)
TERMS = Terms(PUBLISHER, sequence=7, created=1_800_000_000, expires=1_900_000_000, licence="MIT")


def test_the_draft_of_a_manifest_is_the_golden_one() -> None:
    assert encode_draft(MANIFEST) == GOLDEN.data
    assert str(Cid.of_node(GOLDEN.data)) == GOLDEN.fields["cid"]


def test_a_draft_says_all_but_the_terms() -> None:
    opened = decode_draft(GOLDEN.data)
    assert opened == replace(MANIFEST, publisher=NOBODY, sequence=0, created=0, expires=None, licence="")
    assert (opened.publisher, opened.sequence) == (NO_TERMS.publisher, NO_TERMS.sequence)
    assert encode_draft(opened) == GOLDEN.data


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_draft_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        decode_draft(bytes.fromhex(REFUSED[name]["hex"]))


@pytest.mark.parametrize("name", ["a publisher", "a sequence number", "an expiry that is null"])
def test_terms_in_a_draft_are_told_as_that(name: str) -> None:
    with pytest.raises(ManifestError, match="for its publisher to say"):
        decode_draft(bytes.fromhex(REFUSED[name]["hex"]))


def test_nobody_can_sign_as_nobody() -> None:
    """Neither with zeros nor with a point of low order, which is what makes a signature that others take."""
    assert decode_did(NOBODY) == bytes(32), "y = 0, a point of order four"
    for signature in (bytes(64), b"\x01" + bytes(63)):
        with pytest.raises((BadSignatureError, ValueError)):
            VerifyKey(decode_did(NOBODY)).verify(DOMAIN, signature)
        unsigned = replace(MANIFEST, publisher=NOBODY).encode()
        with pytest.raises(SignatureError):
            Envelope(unsigned, decode_did(NOBODY), signature).open()


def test_a_root_is_a_draft_or_a_signed_manifest() -> None:
    envelope = Envelope.sign(MANIFEST, KEY)
    assert is_draft(GOLDEN.data)
    assert not is_draft(envelope.encode())
    assert open_root(GOLDEN.data).publisher == NOBODY
    assert open_root(envelope.encode()) == MANIFEST
    with pytest.raises(SignatureError):
        open_root(replace(envelope, signature=bytes(64)).encode())
    for data in (MANIFEST.encode(), dagcbor.encode({"kind": "p2pkv/segment", "version": 1}), b"\xa0", b""):
        with pytest.raises(FormatError):
            open_root(data)


def test_a_draft_is_signed_under_its_publishers_terms() -> None:
    signed = sign_manifest(decode_draft(GOLDEN.data), TERMS, KEY).open()
    assert (signed.publisher, signed.sequence, signed.created) == (PUBLISHER, 7, 1_800_000_000)
    assert (signed.expires, signed.licence) == (1_900_000_000, "MIT")
    assert encode_draft(signed) == GOLDEN.data


@pytest.mark.parametrize("sequence", [0, 7])
def test_what_is_signed_again_has_a_higher_sequence(sequence: int) -> None:
    envelope = sign_manifest(decode_draft(GOLDEN.data), TERMS, KEY)
    again = renewed(envelope, KEY, 8, 1_800_000_001, None).open()
    assert again == replace(envelope.open(), sequence=8, created=1_800_000_001, expires=None)
    with pytest.raises(UsageError, match="does not follow 7"):
        renewed(envelope, KEY, sequence, 1_800_000_001, None)


def test_an_envelope_fits_its_own_draft_alone() -> None:
    envelope = sign_manifest(decode_draft(GOLDEN.data), TERMS, KEY)
    assert check_fits(envelope, GOLDEN.data) == envelope.open()
    with pytest.raises(ManifestError, match="another artifact"):
        check_fits(envelope, encode_draft(replace(MANIFEST, model_name="other")))
    with pytest.raises(SignatureError):
        check_fits(replace(envelope, signature=bytes(64)), GOLDEN.data)


FIELDS = {*dagcbor.decode_map(samples.manifest().encode()), "segment_keys"}
NUMBERS = st.integers(0, MAX_INT)
MANIFESTS = st.builds(
    samples.manifest,
    model_name=strategies.texts,
    producer=st.dictionaries(strategies.texts, strategies.texts, max_size=3),
    aliases=st.dictionaries(strategies.texts, st.binary(max_size=40), max_size=3),
    tokenizer=st.none() | strategies.digests,
    extra=st.dictionaries(strategies.texts.filter(lambda name: name not in FIELDS), strategies.values, max_size=3),
)
TERMS_OF_ANY = st.builds(Terms, st.just(PUBLISHER), NUMBERS, NUMBERS, st.none() | NUMBERS, strategies.texts)


@given(MANIFESTS, TERMS_OF_ANY)
def test_terms_come_and_go_and_all_else_stays(manifest: Manifest, terms: Terms) -> None:
    draft = encode_draft(manifest)
    opened = decode_draft(draft)
    assert encode_draft(opened) == draft
    signed = check_fits(sign_manifest(opened, terms, KEY), draft)
    assert (signed.publisher, signed.sequence, signed.created) == (terms.publisher, terms.sequence, terms.created)
    assert (signed.expires, signed.licence) == (terms.expires, terms.licence)
    unsaid = {"publisher": NOBODY, "sequence": 0, "created": 0, "expires": None, "licence": ""}
    assert replace(signed, **unsaid) == opened == replace(manifest, **unsaid)  # type: ignore[arg-type]  # of many types


@given(MANIFESTS, MANIFESTS)
def test_two_artifacts_have_two_drafts(one: Manifest, other: Manifest) -> None:
    assert (encode_draft(one) == encode_draft(other)) == (one == other)


@given(st.binary(max_size=200))
def test_garbage_is_no_draft(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_draft(data)
