"""Sign what was built: a draft for the first time, or what was signed once more, under new terms."""

from __future__ import annotations

from dataclasses import replace

from nacl.signing import SigningKey

from p2pkv.artifact.build import Terms
from p2pkv.errors import ManifestError, UsageError
from p2pkv.formats.draft import NOBODY, encode_draft
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest

# The terms of a draft.
NO_TERMS = Terms(NOBODY, sequence=0, created=0)


def sign_manifest(manifest: Manifest, terms: Terms, key: SigningKey) -> Envelope:
    """Return the envelope of ``manifest`` under ``terms``, whatever terms it had.

    Raises UsageError where it had a sequence number that is not below the new one, or is a private artifact's, whose grants
    name the manifest that they open; ManifestError for another's key or terms that no manifest may have.
    """
    if manifest.private:
        raise UsageError(
            "a private artifact is not signed alone: nobody would have a grant for that manifest of it",
            advice="Renew it where its publisher's grant is (`p2pkv renew`), or publish it again with --private.",
        )
    return _sign(manifest, terms, key)


def renewed(envelope: Envelope, key: SigningKey, sequence: int, created: int, expires: int | None) -> Envelope:
    """Return the envelope of the same artifact with a later sequence number and another expiry, signed by the same key.

    Grants of a private artifact name its manifest: whoever renews it makes them again. Raises SignatureError, FormatError and
    its kin for an envelope that is none; UsageError for a sequence number that is not above the old one, ManifestError for
    another's key.
    """
    old = envelope.open()
    return _sign(old, Terms(old.publisher, sequence, created, expires, old.licence), key)


def _sign(manifest: Manifest, terms: Terms, key: SigningKey) -> Envelope:
    if manifest.publisher != NOBODY and terms.sequence <= manifest.sequence:
        raise UsageError(
            f"the sequence number {terms.sequence} does not follow {manifest.sequence}",
            advice="Sign with the key file that signed before, and the file of sequence numbers beside it.",
        )
    said = replace(
        manifest,
        publisher=terms.publisher,
        sequence=terms.sequence,
        created=terms.created,
        expires=terms.expires,
        licence=terms.licence,
    )
    envelope = Envelope.sign(said, key)
    Envelope.decode(envelope.encode()).open()  # one that nobody could open, being too large, is no use
    return envelope


def check_fits(envelope: Envelope, draft: bytes) -> Manifest:
    """Return the manifest of an envelope that signs the artifact of ``draft``. Raises ManifestError, as Envelope.open does."""
    manifest = envelope.open()
    if encode_draft(manifest) != draft:
        raise ManifestError(
            "the envelope signs another artifact than this one", advice="Sign the draft that was built with this file."
        )
    return manifest
