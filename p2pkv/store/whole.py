"""An artifact of which everything is at hand: opened, with the list of all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.errors import FetchIncompleteError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest


class Blocks(Protocol):
    """Where the parts of an artifact are looked for."""

    def has(self, cid: Cid) -> bool:
        """Return whether the block is here, at once."""

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes. Raises NotFoundError, IntegrityError, StoreError."""


def open_signed(envelope: bytes) -> Manifest:
    """Return the manifest of an envelope. Raises SignatureError, FormatError and its kin."""
    return Envelope.decode(envelope).open()


def open_whole(
    cid: Cid, envelope: bytes, blocks: Blocks, open_root: Callable[[bytes], Manifest] = open_signed
) -> tuple[Artifact, Sequence[Cid]]:
    """Return the artifact whose envelope this is, and the CIDs of all of it, each once, in the order of a CAR file.

    Token ids and nodes are read and checked, of blocks it is seen that they are here. Raises FetchIncompleteError where
    something is missing, what open_artifact raises, IntegrityError, StoreError.
    """
    cid.check(envelope)
    manifest = open_root(envelope)
    tokens = [manifest.tokens.cid] if manifest.tokens.cid is not None else []
    if not all(map(blocks.has, tokens)):
        raise _incomplete(cid, "the block of its token ids is")
    artifact = open_manifest(cid, manifest, blocks.read(tokens[0]) if tokens else None)
    named = dict.fromkeys([cid, *tokens, *manifest.segments])
    missing = 0
    for index, node in enumerate(manifest.segments):
        try:
            segment = artifact.open_segment(index, blocks.read(node))
        except NotFoundError:
            missing += 1
            continue
        here = [ref.cid for ref in segment.blocks()]
        missing += sum(not blocks.has(block) for block in here)
        named |= dict.fromkeys(here)
    if missing:
        raise _incomplete(cid, f"{missing} of its blocks or segment nodes are")
    return artifact, tuple(named)


def _incomplete(cid: Cid, what: str) -> FetchIncompleteError:
    return FetchIncompleteError(
        f"{cid} is not whole: {what} not stored here", advice=f"Run `p2pkv fetch {cid}`: what is here is kept."
    )
