"""Grants of private artifacts: made by the publisher, opened by the reader, matched with a prompt (``docs/spec/private.md``).

Private artifacts are in no look-up by chain key, so a reader's own software finds out which of those that it was granted helps
with a prompt. For that a grant has the start of the text, sealed, and chain keys of it in a namespace that follows from the
artifact key: they tell whoever has the key how long the common prefix is, and nobody else anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
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
from p2pkv.formats.sealing import seal, unseal
from p2pkv.limits import MAX_CLOCK_SKEW_S, SEGMENT_TOKENS
from p2pkv.units import format_seconds

_MATCH_DOMAIN: Final = "p2pkv/match/v1"
_START_LABEL: Final = b"p2pkv/start/v1"


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant that was opened with its reader's key."""

    grant: Grant
    artifact_key: bytes = field(repr=False)

    def begins(self, token_ids: Sequence[int], shared: int | None) -> bool:
        """Return whether a prompt begins as the text, and whoever can guess that could tell by a look-up who has it.

        The first segment is compared, or as much of it as text and prompt have; of a prompt with a ``shared`` part as much as
        that part has, since that part is looked up for itself. Raises IntegrityError where the start does not open.
        """
        start = keys.decode_tokens(unseal(self.artifact_key, _START_LABEL, self.grant.start))
        length = min(len(start), len(token_ids) if shared is None else shared)
        return list(token_ids[:length]) == start[:length]

    def usable_tokens(self, token_ids: Sequence[int], shared: int | None) -> int:
        """Return how many tokens of a prompt the artifact gives; see :meth:`Artifact.usable_prefix`."""
        return usable_tokens(self.common_tokens(token_ids), self.grant.token_count, len(token_ids), shared)

    def common_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens prompt and artifact have in common, in whole segments and the artifact's tail."""
        count = self.grant.token_count
        text = tuple(token_ids[:count])
        if len(text) < count:  # the prompt's own tail is none of the artifact
            text = text[: len(text) - len(text) % SEGMENT_TOKENS]
        known = [self.grant.match[at : at + DIGEST_BYTES] for at in range(0, len(self.grant.match), DIGEST_BYTES)]
        found = keys.chain(self.grant.model_id, text, namespace=_match_namespace(self.artifact_key))
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
        start=seal(artifact_key, _START_LABEL, keys.encode_tokens(token_ids[:SEGMENT_TOKENS])),
        match=match,
    )


def grant_to(
    own: Granted,
    reader: str,
    *,
    sequence: int,
    created: int,
    expires: int | None,
    ephemeral: bytes,
    signers: Collection[str] | None = None,
) -> Grant:
    """Return a grant of the same artifact to ``reader``, out of the one that its holder has.

    The holder signs it: the publisher itself, or one of ``signers``, the keys that follow the publisher's. Raises GrantError
    where the holder is a reader and no more, FormatError for what is no did:key that anything can be sealed to.
    """
    grant = own.grant
    if grant.reader not in (signers if signers is not None else (grant.publisher,)):
        raise GrantError(
            f"the grant of {grant.manifest} is {grant.publisher}'s, and only a publisher grants",
            advice="Ask the publisher to grant it to the other reader.",
        )
    return replace(
        grant,
        publisher=grant.reader,
        sequence=sequence,
        created=created,
        reader=reader,
        sealed_key=seal_key(own.artifact_key, reader, ephemeral),
        expires=expires,
        extra={},
    )


def granted_again(grant: Grant, manifest: Cid, *, sequence: int, created: int) -> Grant:
    """Return the grant for ``manifest``, which is the same artifact signed once more; reader, key and expiry stay.

    ``sequence`` is the publisher's next one, ``created`` in seconds since the epoch.
    """
    return replace(grant, manifest=manifest, sequence=sequence, created=created)


def check_expiry(grant: Grant, now: float) -> None:
    """Raise GrantExpiredError where the grant is over at ``now``, in seconds since the epoch."""
    if grant.expires is not None and now > grant.expires + MAX_CLOCK_SKEW_S:
        raise GrantExpiredError(f"the grant of {grant.manifest} expired {format_seconds(now - grant.expires)} ago")


def check_granter(grant: Grant, manifest: Manifest, signers: Collection[str] | None = None) -> None:
    """Raise GrantError unless the grant is by the artifact's publisher and speaks of what the manifest describes.

    ``signers`` are the keys that speak for the publisher: its own, by default alone, and those that follow it
    (:func:`p2pkv.trust.record.succeeded`).
    """
    if grant.publisher not in (signers if signers is not None else (manifest.publisher,)):
        raise GrantError(
            f"{grant.publisher} granted {grant.manifest}, which {manifest.publisher} published, and is not known to follow it",
            advice="If the publisher changed its key, add its statement with `p2pkv trust hear FILE`. Else ask the publisher "
            "for a grant of its own.",
        )
    if (grant.model_id, grant.token_count) != (manifest.model_id, manifest.tokens.count) or not manifest.private:
        raise GrantError(f"the grant of {grant.manifest} is not of what its manifest describes")


def _match_namespace(artifact_key: bytes) -> bytes:
    return keyed_hash(artifact_key, _MATCH_DOMAIN)
