"""Artifacts as commands get them, by manifest CID out of the home or as a file, and every check of one.

Reads the home's files only; a daemon may run beside it or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pkv.artifact.read import Artifact, decode_block, open_manifest
from p2pkv.cli.options import read_file
from p2pkv.errors import (
    CidError,
    FetchIncompleteError,
    FormatError,
    IntegrityError,
    NotFoundError,
    P2pkvError,
    SignatureError,
    UsageError,
)
from p2pkv.formats.cid import Cid
from p2pkv.formats.draft import NOBODY, open_root
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_NODE_BYTES
from p2pkv.store.car_reading import check_car, is_car, read_root
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.stored_blocks import StoredBlocks


@dataclass(frozen=True, slots=True)
class Source:
    """An envelope or a draft that nobody judged yet, and the blocks of the home where it has any, or of a CAR file."""

    cid: Cid
    envelope: bytes
    blocks: StoredBlocks | None
    stored: bool  # it was named by CID and found in the home, so its blocks are expected there
    car: Path | None = None  # the file that has its blocks


def open_source(argument: str, home: Path) -> Source:
    """Find what ``argument`` names: a manifest CID that the home stores, or the file of an envelope, a draft or a CAR.

    Raises UsageError where it is neither, NotFoundError for a CID that is not stored, FormatError, IntegrityError, StoreError.
    """
    folder = HomeLayout(home).blocks
    blocks = StoredBlocks(folder) if folder.is_dir() else None
    path = Path(argument)
    if path.is_file():
        if is_car(path):
            root = read_root(path)
            return Source(Cid.of_node(root), root, None, stored=False, car=path)
        data = read_node_file(path)
        return Source(Cid.of_node(data), data, blocks, stored=False)
    try:
        cid = Cid.parse(argument)
    except CidError as error:
        advice = "Name a CAR or envelope file, or a manifest CID as `p2pkv publish` prints it."
        raise UsageError(f"{argument!r} is neither a file nor a manifest CID ({error.message})", advice=advice) from None
    if blocks is None or not blocks.has(cid):
        raise NotFoundError(f"{cid} is not stored in {home}", advice=f"Run `p2pkv fetch {cid}`, or name another --home.")
    return Source(cid, blocks.read(cid), blocks, stored=True)


def read_node_file(path: Path) -> bytes:
    """Return the bytes of an envelope or a draft. Raises UsageError where there is no file, FormatError, StoreError."""
    data = read_file(path, MAX_NODE_BYTES, advice="Name the file of an envelope or a draft.")
    if len(data) > MAX_NODE_BYTES:
        raise FormatError(f"{path} is larger than any envelope", advice="Name the file of an envelope, a draft or a CAR.")
    return data


@dataclass(slots=True)
class Verdict:
    """What checking an artifact found. ``faults`` are in the order of their weight: the first decides the exit status.

    ``blocks`` and ``bytes`` are what was read and hashed; ``complete_segments`` are those with all blocks here and right.
    """

    cid: Cid
    manifest: Manifest | None = None
    faults: list[P2pkvError] = field(default_factory=list)
    tokens_checked: bool = False
    complete_segments: int = 0
    blocks: int = 0
    bytes: int = 0
    missing: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "manifest": str(self.cid),
            "ok": not self.faults,
            "faults": [fault.to_dict() for fault in self.faults],
            "tokens_checked": self.tokens_checked,
            "segments": len(self.manifest.segments) if self.manifest else None,
            "complete_segments": self.complete_segments,
            "blocks_checked": self.blocks,
            "bytes_checked": self.bytes,
            "missing": self.missing,
        }


def check(source: Source, trust: HomeTrust, on_segment: Callable[[int, int], None] = lambda done, total: None) -> Verdict:
    """Check format, signature and tokens, then every block that the home holds, then expiry and trust.

    ``on_segment(done, total)`` hears of each segment. Raises StoreError for a disk or trust file that cannot be read.
    """
    verdict = Verdict(source.cid)
    artifact = None
    try:
        source.cid.check(source.envelope)
        verdict.manifest = open_root(source.envelope)
        if source.car is not None:
            _check_car(source.car, verdict, on_segment)
        else:
            artifact = _open_tokens(source, verdict.manifest)
    except P2pkvError as error:
        verdict.faults.append(error)
    if artifact is not None:
        verdict.tokens_checked = True
        if source.blocks is not None:
            _check_blocks(artifact, source.blocks, verdict, on_segment)
        held = verdict.blocks or source.stored
        if verdict.missing and held:
            verdict.faults.append(
                FetchIncompleteError(
                    f"{verdict.missing} blocks or segment nodes are not stored here",
                    advice=f"Run `p2pkv fetch {source.cid}`: what is here is kept.",
                )
            )
    if verdict.manifest is not None:
        verdict.faults += standing(verdict.manifest, source.cid, trust)
    return verdict


def _check_car(path: Path, verdict: Verdict, on_segment: Callable[[int, int], None]) -> None:
    assert verdict.manifest is not None, "its root is read first"
    segments = len(verdict.manifest.segments)
    checked = check_car(path, lambda _, done, total: on_segment(segments * done // max(total, 1), segments))
    verdict.tokens_checked = True
    verdict.complete_segments = segments
    verdict.blocks, verdict.bytes = checked.blocks - 1, checked.kv_bytes


def standing(manifest: Manifest, cid: Cid, trust: HomeTrust) -> list[P2pkvError]:
    """Return every reason why this home would not use an artifact of verified signature, none where it would.

    Of a draft there is one: nobody signed it. Raises StoreError, UnknownVersionError where rules or statements cannot be read.
    """
    if manifest.publisher == NOBODY:
        return [SignatureError("it is not signed", advice="Whoever has the publisher's key signs it with `p2pkv sign`.")]
    return [*trust.judge(manifest, cid, time.time()).errors]


def _open_tokens(source: Source, manifest: Manifest) -> Artifact | None:
    """Return the artifact with its token ids verified; ``None`` where they lie in a block that is not here."""
    cid = manifest.tokens.cid
    if cid is None:
        return open_manifest(source.cid, manifest)
    if source.blocks is None or not source.blocks.has(cid):
        return None
    return open_manifest(source.cid, manifest, source.blocks.read(cid))


def _check_blocks(artifact: Artifact, blocks: StoredBlocks, verdict: Verdict, on_segment: Callable[[int, int], None]) -> None:
    nodes = artifact.manifest.segments
    for index, node in enumerate(nodes):
        before = len(verdict.faults) + verdict.missing
        try:
            segment = artifact.open_segment(index, blocks.read(node))
        except NotFoundError:
            verdict.missing += 1
            continue
        except (FormatError, IntegrityError) as error:
            verdict.faults.append(error)
            continue
        verdict.blocks += 1
        for ref in segment.blocks():
            try:
                data = memoryview(blocks.read(ref.cid))
                if artifact.readable:  # a sealed block is what its CID names, and more nobody can tell
                    decode_block(ref, segment.codec, data)
            except NotFoundError:
                verdict.missing += 1
            except (FormatError, IntegrityError) as error:
                verdict.faults.append(error)
            else:
                verdict.blocks += 1
                verdict.bytes += len(data)
        verdict.complete_segments += before == len(verdict.faults) + verdict.missing
        on_segment(index + 1, len(nodes))
