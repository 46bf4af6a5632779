"""Attacks with what was honest once: signatures, nodes, blocks and greetings in another place or at another time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pkv.artifact.read import decode_block, open_artifact, open_manifest
from p2pkv.errors import IntegrityError, ManifestError, SignatureError, StatementError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement, StatementKind
from p2pkv.formats.succession import Succession
from p2pkv.ports import BulkOffer
from p2pkv.trust.record import record_from
from p2pkv_node.bulk_greeting import make_greeting, takes_up
from tests.hostile.attack import Attack, assert_refused
from tests.support import samples
from tests.support.artifacts import make_sample

TEXT, OTHER_TEXT = make_sample(range(1000, 1600)), make_sample(range(2000, 2600), seed=1)
LATER = make_sample(range(1000, 1600), seed=2)  # the same text, other values
OLD, NEW = samples.envelope(), samples.envelope(samples.manifest(sequence=2))


def test_an_older_envelope_under_the_name_of_a_newer_one() -> None:
    """The CID names content and signature, so nobody gets another version than the one that was asked for."""
    for name, data in ((NEW.cid, OLD.encode()), (OLD.cid, NEW.encode())):
        assert_refused(Attack("", lambda name=name, data=data: open_artifact(name, data), IntegrityError))


def test_the_signature_of_an_older_manifest_under_a_newer_one() -> None:
    for payload, signature in ((NEW.payload, OLD.signature), (OLD.payload, NEW.signature)):
        assert_refused(Attack("", replace(OLD, payload=payload, signature=signature).open, SignatureError))


def test_a_signature_over_a_manifest_is_none_over_a_statement_and_the_other_way_round() -> None:
    for kind, expected in ((StatementKind.REVOCATIONS, Revocations), (StatementKind.SUCCESSION, Succession)):
        signed = SignedStatement(kind, OLD.payload, OLD.key, OLD.signature)
        assert_refused(Attack("", lambda signed=signed, expected=expected: signed.open(expected), SignatureError))
    statement = SignedStatement.sign(revocations(1), samples.KEY)
    envelope = Envelope(statement.payload, statement.key, statement.signature)
    assert_refused(Attack("", envelope.open, SignatureError))


def test_a_statement_of_one_kind_is_none_of_another() -> None:
    statement = SignedStatement.sign(revocations(1), samples.KEY)
    assert_refused(Attack("", lambda: statement.open(Succession), StatementError))
    renamed = replace(statement, kind=StatementKind.SUCCESSION)
    assert_refused(Attack("", lambda: renamed.open(Succession), SignatureError))


def revocations(sequence: int, *scopes: int) -> Revocations:
    items = tuple(Revoked(Scope.BEFORE, number, "") for number in scopes)
    return Revocations(publisher=samples.PUBLISHER, sequence=sequence, created=samples.CREATED, items=items)


def test_an_older_list_of_revocations_takes_nothing_of_a_newer_one_back() -> None:
    older, newer = (SignedStatement.sign(revocations(*what), samples.KEY) for what in ((1, 7), (2, 7, 9)))
    for order in ((older, newer), (newer, older), (newer, older, older)):
        assert {item.what for item in record_from(samples.PUBLISHER, order).items} == {7, 9}


def test_consent_to_follow_one_key_is_no_consent_to_follow_another() -> None:
    """A thief cannot lead the trust in a key of its own to somebody's key, nor make an old consent a new one."""
    agreed = Succession.agreed(samples.OTHER_PUBLISHER, samples.KEY, last=1, created=samples.CREATED, reason="")
    stolen = replace(agreed, publisher=samples.PUBLISHER, successor=samples.OTHER_PUBLISHER)
    assert_refused(Attack("", lambda: Succession.decode(stolen.encode()), SignatureError))


@pytest.mark.parametrize("index", range(3))
def test_a_segment_of_another_text_in_the_place_of_one(index: int) -> None:
    """A publisher who signs it, by mistake or not: the node itself names the text, the model and the place that it is of."""
    link = OTHER_TEXT.artifact.manifest.segments[index]
    links = [*TEXT.artifact.manifest.segments]
    links[index] = link
    artifact = replace(TEXT.artifact, manifest=replace(TEXT.artifact.manifest, segments=tuple(links)))
    assert_refused(Attack("", lambda: artifact.open_segment(index, OTHER_TEXT.blocks[link]), ManifestError))
    other_place = TEXT.artifact.manifest.segments[(index + 1) % 3]
    assert_refused(Attack("", lambda: TEXT.artifact.open_segment(index, TEXT.blocks[other_place]), IntegrityError))


def test_a_block_of_another_version_of_the_text_in_the_place_of_one() -> None:
    refs = [
        next(sample.artifact.open_segment(0, sample.blocks[sample.artifact.manifest.segments[0]]).blocks())
        for sample in (TEXT, LATER)
    ]
    wrong = memoryview(LATER.blocks[refs[1].cid])
    assert not refs[0].cid.matches(wrong)  # this is where it is noticed first
    renamed = replace(refs[0], cid=Cid.of_block(wrong))
    assert_refused(Attack("", lambda: decode_block(renamed, "raw", wrong), IntegrityError))


def test_the_token_ids_of_another_manifest() -> None:
    manifest = replace(
        TEXT.artifact.manifest, tokens=replace(OTHER_TEXT.artifact.manifest.tokens)
    )  # signed with the chain key of the first text
    assert_refused(Attack("", lambda: open_manifest(TEXT.cid, manifest), ManifestError))


def test_a_greeting_is_good_for_one_offer_of_one_provider_to_one_peer() -> None:
    offer = BulkOffer(4002, bytes(range(32)), bytes(32))
    said = make_greeting(offer, lambda message: samples.KEY.sign(message).signature)
    assert takes_up(said, offer, samples.KEY.verify_key)
    for other in (replace(offer, token=bytes(32)), replace(offer, fingerprint=bytes(range(32)))):
        assert not takes_up(said, other, samples.KEY.verify_key)
    assert not takes_up(said, offer, samples.OTHER_KEY.verify_key)
