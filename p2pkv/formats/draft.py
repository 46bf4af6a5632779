"""Drafts: manifests that nobody signed yet, without a publisher's terms (``docs/spec/draft.md``).

The machine with the model makes a draft; whoever has the key adds the terms and signs. A manifest and its draft say the same
of the artifact: the draft follows from the manifest, byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from p2pkv.errors import ManifestError
from p2pkv.formats import dagcbor
from p2pkv.formats.did import PUBLIC_KEY_BYTES, encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.fields import Fields
from p2pkv.formats.manifest import KIND as MANIFEST_KIND, VERSION as MANIFEST_VERSION, Manifest

KIND: Final = "p2pkv/draft"
VERSION: Final = 1
# The name of a point of low order: no signature verifies under it, so that terms which nobody set are nobody's.
NOBODY: Final = encode_did(bytes(PUBLIC_KEY_BYTES))
# What the publisher says, and how a manifest looks whose publisher has not said it yet.
_UNSAID: Final[Mapping[str, dagcbor.Value]] = {
    "publisher": NOBODY,
    "sequence": 0,
    "created": 0,
    "expires": None,
    "licence": "",
}


def encode_draft(manifest: Manifest) -> bytes:
    """Return the draft of a manifest: all that it says but the publisher's terms."""
    content = dagcbor.decode_map(manifest.encode())
    said = {name: value for name, value in content.items() if name not in _UNSAID}
    return dagcbor.encode({**said, "kind": KIND, "version": VERSION})


def decode_draft(data: bytes) -> Manifest:
    """Return the manifest of a draft; its publisher is :data:`NOBODY`. Raises FormatError or a subclass."""
    content = dagcbor.decode_map(data)
    Fields(content, "draft", ManifestError).version(KIND, VERSION)
    said = _UNSAID.keys() & content.keys()
    if said:
        raise ManifestError(f"the draft has the field {min(said)}, which is for its publisher to say")
    manifest = Manifest.decode(dagcbor.encode({**content, **_UNSAID, "kind": MANIFEST_KIND, "version": MANIFEST_VERSION}))
    if encode_draft(manifest) != data:
        raise ManifestError("the draft leaves out a field that is null")
    return manifest


def is_draft(data: bytes) -> bool:
    """Return whether a node calls itself a draft. Raises DagCborError for what is no map."""
    return dagcbor.decode_map(data).get("kind") == KIND


def open_root(data: bytes) -> Manifest:
    """Return the manifest of a draft, or that of an envelope whose signature verifies. Raises what decoding raises."""
    return decode_draft(data) if is_draft(data) else Envelope.decode(data).open()
