"""Artifacts as CAR files (``docs/spec/car.md``): written from stored blocks, and read into a staging folder.

Nothing is believed: what is written is whole and hashed again, and what is read is checked, every block and node of it,
before anybody is asked to take it over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.errors import FetchIncompleteError, FormatError, NotFoundError, UsageError
from p2pkv.formats.car import CarDecoder, encode_header, encode_section, section_size
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.store.files import os_errors, replacement
from p2pkv.store.staging import Staging
from p2pkv.store.stored_blocks import StoredBlocks, is_intact
from p2pkv.units import MIB

Progress: TypeAlias = Callable[[int, int], None]
"""Hears ``(done, total)`` in bytes of the file."""

# A few system calls for each MiB, and little to hold.
_PIECE_BYTES: Final = MIB


def ignore(done: int, total: int) -> None:
    """Hear how far it is and do nothing."""


@dataclass(frozen=True, slots=True)
class CarArtifact:
    """An artifact that went into a CAR file or came out of one. ``cids`` is all of it; ``file_bytes`` is the file's size.

    ``staged_bytes`` are the bytes of blocks and nodes that a home lacked, and 0 for an artifact that was written.
    """

    artifact: Artifact
    cids: Sequence[Cid]
    file_bytes: int
    staged_bytes: int = 0


def write_car(cid: Cid, envelope: bytes, blocks: StoredBlocks, path: Path, on_progress: Progress = ignore) -> CarArtifact:
    """Write the artifact whose envelope this is to ``path``, which has all of it or is as it was.

    Raises FetchIncompleteError where ``blocks`` do not hold all of it, UsageError where ``path`` is a folder, what
    open_artifact raises, IntegrityError for a block that is damaged on the disk, DiskFullError, StoreError.
    """
    cid.check(envelope)
    artifact, cids = _whole_artifact(cid, Envelope.decode(envelope).open(), blocks)
    if path.is_dir():
        raise UsageError(f"{path} is a folder", advice="Name a file to write, such as book.car.")
    total = len(encode_header([cid])) + section_size(len(envelope)) + sum(section_size(blocks.size(part)) for part in cids[1:])
    done = 0
    with os_errors(f"write {path}"), replacement(path) as file:
        done += file.write(encode_header([cid]))
        for part in cids:
            done += file.write(encode_section(part, envelope if part == cid else blocks.read(part)))
            on_progress(done, total)
    return CarArtifact(artifact, cids, done)


def stage_car(
    path: Path,
    stored: StoredBlocks,
    staging: Staging,
    *,
    judge: Callable[[Manifest], None] = lambda manifest: None,
    on_progress: Progress = ignore,
) -> CarArtifact:
    """Read a CAR file, check all of it, and write into ``staging`` what of it is not among ``stored``, intact.

    ``judge`` sees the manifest as soon as its signature is verified, and may raise. Raises UsageError where ``path`` is no
    file; FormatError and its kin, IntegrityError, SignatureError for what is no artifact of this project, TruncatedError
    for a file that is cut off; FetchIncompleteError where blocks are missing in both places; DiskFullError, StoreError.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", advice="Name a CAR file, as `p2pkv export` writes it.")
    decoder = CarDecoder()
    arriving: _Arriving | None = None
    staged = done = 0
    with os_errors(f"read {path}"), path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while piece := file.read(_PIECE_BYTES):
            blocks = decoder.feed(piece)
            if arriving is None and decoder.roots:
                arriving = _Arriving(decoder.roots, stored, judge)
            for cid, data in blocks:
                assert arriving is not None, "blocks come behind the roots"
                arriving.add(cid, data)
                if not is_intact(stored, cid):
                    staging.write(cid, data)
                    staged += len(data)
            done += len(piece)
            on_progress(done, total)
    decoder.end()
    assert arriving is not None, "a CAR that ends whole has roots"
    return CarArtifact(arriving.finish(), arriving.cids, done, staged)


class _Arriving:
    """An artifact while its blocks come: lets in what a block before it names, and sees in the end that nothing is missing.

    So a file cannot fill the disk with blocks that belong to nothing.
    """

    def __init__(self, roots: Sequence[Cid], stored: StoredBlocks, judge: Callable[[Manifest], None]) -> None:
        if len(roots) != 1:
            raise FormatError(f"the CAR has {len(roots)} roots, an artifact has one")
        if roots[0].codec is not Codec.DAG_CBOR:
            raise FormatError("the root of the CAR is a block, and not an envelope")
        self._root = roots[0]
        self._stored = stored
        self._judge = judge
        self._manifest: Manifest | None = None
        self._artifact: Artifact | None = None
        self._nodes: dict[Cid, int] = {}  # those that are still to be opened, and which segments they are
        self._missing: dict[Cid, None] = {}
        self._named: dict[Cid, None] = {self._root: None}

    @property
    def cids(self) -> Sequence[Cid]:
        """All that belongs to the artifact, as far as it is known; the envelope comes first."""
        return tuple(self._named)

    def add(self, cid: Cid, data: bytes) -> None:
        """Take a block whose hash is verified. Raises as :func:`stage_car`."""
        if cid not in self._named:
            self._open_stored()
        if cid not in self._named:
            raise FormatError(f"{cid} is neither the root of the CAR nor named by a block before it")
        self._missing.pop(cid, None)
        if self._manifest is None:
            self._manifest = Envelope.decode(data).open()
            self._judge(self._manifest)
            self._nodes = {node: index for index, node in enumerate(self._manifest.segments)}
            tokens = self._manifest.tokens.cid
            self._name([*([tokens] if tokens is not None else []), *self._manifest.segments])
        elif self._artifact is None and cid == self._manifest.tokens.cid:
            self._artifact = open_manifest(self._root, self._manifest, data)
        elif cid in self._nodes:
            self._open(cid, data)

    def finish(self) -> Artifact:
        """Return the artifact, once all of it came or is stored. Raises as :func:`stage_car`."""
        if self._manifest is None:
            raise FormatError("the CAR does not hold its root")
        self._open_stored()
        missing = [cid for cid in self._missing if not is_intact(self._stored, cid)]
        if missing:
            raise FetchIncompleteError(
                f"the CAR lacks {len(missing)} blocks or segment nodes that are not stored here either",
                advice="Nothing was taken over. Export it again where it is whole.",
            )
        return self._opened()

    def _opened(self) -> Artifact:
        """Return the artifact with its token ids verified, out of a block that is stored where none came."""
        assert self._manifest is not None, "nodes come behind the manifest"
        if self._artifact is None:
            cid = self._manifest.tokens.cid
            if cid is not None and not is_intact(self._stored, cid):
                raise FormatError(f"the block of the token ids, {cid}, does not come before the segment nodes")
            self._artifact = open_manifest(self._root, self._manifest, self._stored.read(cid) if cid is not None else None)
        return self._artifact

    def _open(self, node: Cid, data: bytes) -> None:
        segment = self._opened().open_segment(self._nodes.pop(node), data)
        self._missing.pop(node, None)
        self._name([ref.cid for ref in segment.blocks()])

    def _open_stored(self) -> None:
        """Open the nodes that are stored, of those that did not come."""
        for node in [*self._nodes]:
            if is_intact(self._stored, node):
                self._open(node, self._stored.read(node))

    def _name(self, cids: Sequence[Cid]) -> None:
        fresh = dict.fromkeys(cid for cid in cids if cid not in self._named)
        self._named |= fresh
        self._missing |= fresh


def _whole_artifact(cid: Cid, manifest: Manifest, blocks: StoredBlocks) -> tuple[Artifact, Sequence[Cid]]:
    """Return an artifact of which everything is stored, and the CIDs of all of it in the order of a file."""
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
