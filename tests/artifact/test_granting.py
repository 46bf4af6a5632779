"""A reader's software finds out alone how far a granted artifact helps with a prompt, and who may have granted it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, strategies as st
from nacl.signing import SigningKey

from p2pkv.artifact.granting import Granted, check_expiry, check_granter, grant_to, granted_again, make_grant
from p2pkv.errors import GrantError, GrantExpiredError, IntegrityError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import chain
from p2pkv.limits import MAX_CLOCK_SKEW_S
from tests.support.artifacts import KEY, NOW, PUBLISHER, model
from tests.support.private import ARTIFACT_KEY, PrivateSample, find_secrets, make_private, secrets_of

TOKENS = list(range(70_000, 70_600))
READER = SigningKey(bytes(range(50, 82)))
READER_DID = encode_did(bytes(READER.verify_key))
CID = Cid.of_node(b"another")


@pytest.fixture(scope="module")
def sample() -> PrivateSample:
    return make_private(TOKENS)


def own_grant(sample: PrivateSample, tokens: list[int] | None = None) -> Granted:
    text = list(sample.token_ids) if tokens is None else tokens
    grant = make_grant(
        KEY, sample.cid, ARTIFACT_KEY, model().model_id, text, sequence=3, created=NOW, ephemeral=bytes(range(32))
    )
    return Granted(grant, ARTIFACT_KEY)


@given(data=st.data(), count=st.sampled_from([3, 255, 256, 257, 512, 600]))
def test_a_grant_knows_of_a_prompt_what_the_artifact_knows(data: st.DataObject, count: int) -> None:
    sample = make_private(TOKENS[:count])
    artifact = sample.open(ARTIFACT_KEY)
    common = data.draw(st.sampled_from(sorted({0, 1, 2, 255, 256, 257, 511, 512, count - 1, count} & set(range(count + 1)))))
    prompt = [*TOKENS[:common], *range(data.draw(st.sampled_from([0, 1, 2, 255, 256, 300])))]
    if not prompt:
        return
    shared = data.draw(st.sampled_from([None, len(prompt), *([count] if count <= len(prompt) else []), 1]))
    granted = own_grant(sample, TOKENS[:count])
    assert granted.usable_tokens(prompt, shared) == artifact.usable_prefix(prompt, shared)
    assert granted.common_tokens(prompt) in (artifact.common_prefix(prompt) // 256 * 256, count)


def test_its_match_keys_are_no_chain_keys(sample: PrivateSample) -> None:
    grant = own_grant(sample).grant
    for namespace in (b"", sample.privacy.namespace):
        assert not any(key in grant.match for key in chain(model().model_id, TOKENS, namespace=namespace))
    other = Granted(grant, bytes(32))
    assert other.common_tokens(TOKENS) == 0


@pytest.mark.parametrize(
    ("count", "prompt", "shared", "begins"),
    [
        (600, TOKENS[:1], None, True),
        (600, TOKENS[:100], None, True),
        (600, [*TOKENS[:99], 1], None, False),
        (600, [*TOKENS[:100], 1, 2], None, False),
        (600, [*TOKENS[:100], 1, 2], 100, True),
        (600, [*TOKENS[:100], 1, 2], 101, False),
        (600, [*TOKENS[:255], 1], None, False),
        (600, [*TOKENS[:256], 1], None, True),
        (600, [*TOKENS, 1, 2], 600, True),
        (3, [*TOKENS[:3], 1], None, True),
        (3, TOKENS[:2], None, True),
        (3, [*TOKENS[:2], 1], None, False),
    ],
)
def test_a_prompt_that_begins_as_the_text_is_recognised(
    count: int, prompt: list[int], shared: int | None, begins: bool
) -> None:
    granted = own_grant(make_private(TOKENS[:count]), TOKENS[:count])
    assert granted.begins(prompt, shared) is begins


def test_the_start_of_a_text_opens_with_its_artifact_key_alone(sample: PrivateSample) -> None:
    grant = own_grant(sample).grant
    assert find_secrets(grant.encode(), secrets_of(sample.privacy, model().model_id, TOKENS)) == []
    with pytest.raises(IntegrityError):
        Granted(grant, bytes(32)).begins(TOKENS, None)


def test_a_publisher_grants_and_a_reader_does_not(sample: PrivateSample) -> None:
    own = own_grant(sample)
    grant = grant_to(own, READER_DID, sequence=4, created=NOW, expires=NOW + 9, ephemeral=bytes(range(1, 33)))
    assert (grant.publisher, grant.reader, grant.expires, grant.sequence) == (PUBLISHER, READER_DID, NOW + 9, 4)
    assert sample.open(grant.artifact_key(READER)).token_ids == tuple(TOKENS)
    assert ARTIFACT_KEY.hex() not in repr(own)
    with pytest.raises(GrantError, match="only a publisher"):
        grant_to(Granted(grant, ARTIFACT_KEY), PUBLISHER, sequence=5, created=NOW, expires=None, ephemeral=bytes(32))


def test_an_expiry_is_obeyed_with_the_clock_skew_that_manifests_have(sample: PrivateSample) -> None:
    grant = replace(own_grant(sample).grant, expires=NOW)
    check_expiry(grant, NOW + MAX_CLOCK_SKEW_S)
    check_expiry(replace(grant, expires=None), 2**62)
    with pytest.raises(GrantExpiredError, match="expired"):
        check_expiry(grant, NOW + MAX_CLOCK_SKEW_S + 1)


def test_a_grant_is_of_its_publishers_artifact(sample: PrivateSample) -> None:
    grant = own_grant(sample).grant
    check_granter(grant, sample.manifest)
    for changes in ({"publisher": READER_DID}, {"model_id": bytes(32)}, {"token_count": 599}):
        with pytest.raises(GrantError):
            check_granter(replace(grant, **changes), sample.manifest)
    with pytest.raises(GrantError):
        check_granter(grant, replace(sample.manifest, segment_keys=None))


def test_the_key_that_follows_the_publishers_grants_as_well(sample: PrivateSample) -> None:
    """The old key grants the artifact to the new one, which grants it to readers; without a succession it is a reader."""
    new = SigningKey(bytes(range(51, 83)))
    new_did = encode_did(bytes(new.verify_key))
    held = grant_to(own_grant(sample), new_did, sequence=4, created=NOW, expires=None, ephemeral=bytes(range(1, 33)))
    made = partial(grant_to, Granted(held, ARTIFACT_KEY), READER_DID, sequence=5, created=NOW, expires=None)
    with pytest.raises(GrantError, match="only a publisher"):
        made(ephemeral=bytes(range(2, 34)))
    grant = made(ephemeral=bytes(range(2, 34)), signers=[PUBLISHER, new_did])
    assert (grant.publisher, grant.reader) == (new_did, READER_DID)
    assert SignedStatement.decode(SignedStatement.sign(grant, new).encode()).open(Grant).artifact_key(READER) == ARTIFACT_KEY
    check_granter(grant, sample.manifest, [PUBLISHER, new_did])
    check_granter(held, sample.manifest, [PUBLISHER, new_did])
    with pytest.raises(GrantError, match="not known to follow"):
        check_granter(grant, sample.manifest)


def test_a_grant_is_made_again_for_the_same_artifact_signed_once_more(sample: PrivateSample) -> None:
    grant = grant_to(own_grant(sample), READER_DID, sequence=4, created=NOW, expires=NOW + 9, ephemeral=bytes(range(1, 33)))
    again = granted_again(grant, CID, sequence=8, created=NOW + 1)
    assert again == replace(grant, manifest=CID, sequence=8, created=NOW + 1)
    assert again.artifact_key(READER) == ARTIFACT_KEY
