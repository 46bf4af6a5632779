"""Grants of private artifacts: made by the publisher, opened by the reader, matched with a prompt (``docs/spec/private.md``).

Private artifacts are in no look-up by chain key, so a reader's own software finds out which of those that it was granted helps
with a prompt. For that a grant has chain keys of the text in a namespace that follows from the artifact key: they tell
whoever has the key how long the common prefix is, and nobody else anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from nacl.signing import SigningKey

from p2pkv import keys
from p2pkv.artifact.read import usable_tokens
from p2pkv.errors import GrantError, GrantExpiredError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.grant import Grant, seal_key
from p2pkv.formats.hashing import DIGEST_BYTES, keyed_hash
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_CLOCK_SKEW_S, SEGMENT_TOKENS
from p2pkv.units import format_seconds

_MATCH_DOMAIN: Final = "p2pkv/match/v1"


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant that was opened with its reader's key."""

    grant: Grant
    artifact_key: bytes = field(repr=False)

    def usable_tokens(self, token_ids: Sequence[int], shared: int | None) -> int:
        """Return how many tokens of a prompt the artifact gives; see :meth:`Artifact.usable_prefix`."""
        return usable_tokens(self.common_tokens(token_ids), self.grant.token_count, len(token_ids), shared)

    def common_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens prompt and artifact have in common, in whole segments and the artifact's tail."""
        count = self.grant.token_count
        namespace = _match_namespace(self.artifact_key)
        text = tuple(token_ids[:count])
        if len(text) < count:  # the prompt's own tail is none of the artifact
            text = text[: len(text) - len(text) % SEGMENT_TOKENS]
        known = [self.grant.match[at : at + DIGEST_BYTES] for at in range(0, len(self.grant.match), DIGEST_BYTES)]
        first, *_ = [*keys.chain(self.grant.model_id, text[:SEGMENT_TOKENS], namespace=namespace), b""]
        if first != known[0]:  # most grants are of other texts
            return 0
        found = keys.chain(self.grant.model_id, text, namespace=namespace)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, known, strict=False)))
        return min(common * SEGMENT_TOKENS, count)


def make_grant(
    publisher: SigningKey,
    manifest: Cid,
    artifact_key: bytes,
    model_id: bytes,
    token_ids: Sequence[int],
    *,
    sequence: int,
    created: int,
    ephemeral: bytes,
) -> Grant:
    """Return the publisher's grant to itself, by which it keeps the key of a new private artifact; it does not expire.

    ``ephemeral`` are 32 bytes of chance. Times are seconds since the epoch.
    """
    did = encode_did(bytes(publisher.verify_key))
    match = b"".join(keys.chain(model_id, token_ids, namespace=_match_namespace(artifact_key)))
    return Grant(
        publisher=did,
        sequence=sequence,
        created=created,
        manifest=manifest,
        reader=did,
        sealed_key=seal_key(artifact_key, did, ephemeral),
        model_id=model_id,
        token_count=len(token_ids),
        match=match,
    )


def grant_to(own: Granted, reader: str, *, sequence: int, created: int, expires: int | None, ephemeral: bytes) -> Grant:
    """Return a grant of the same artifact to ``reader``, out of the publisher's own.

    Raises GrantError where that is somebody else's, FormatError for what is no did:key that anything can be sealed to.
    """
    grant = own.grant
    if grant.reader != grant.publisher:
        raise GrantError(
            f"the grant of {grant.manifest} is {grant.publisher}'s, and only a publisher grants",
            advice="Ask the publisher to grant it to the other reader.",
        )
    return Grant(
        publisher=grant.publisher,
        sequence=sequence,
        created=created,
        manifest=grant.manifest,
        reader=reader,
        sealed_key=seal_key(own.artifact_key, reader, ephemeral),
        model_id=grant.model_id,
        token_count=grant.token_count,
        match=grant.match,
        expires=expires,
    )


def check_expiry(grant: Grant, now: float) -> None:
    """Raise GrantExpiredError where the grant is over at ``now``, in seconds since the epoch."""
    if grant.expires is not None and now > grant.expires + MAX_CLOCK_SKEW_S:
        raise GrantExpiredError(f"the grant of {grant.manifest} expired {format_seconds(now - grant.expires)} ago")


def check_granter(grant: Grant, manifest: Manifest) -> None:
    """Raise GrantError unless the grant is by the artifact's publisher and speaks of what the manifest describes."""
    if grant.publisher != manifest.publisher:
        raise GrantError(f"{grant.publisher} granted {grant.manifest}, which {manifest.publisher} published")
    if (grant.model_id, grant.token_count) != (manifest.model_id, manifest.tokens.count) or not manifest.private:
        raise GrantError(f"the grant of {grant.manifest} is not of what its manifest describes")


def _match_namespace(artifact_key: bytes) -> bytes:
    return keyed_hash(artifact_key, _MATCH_DOMAIN)
