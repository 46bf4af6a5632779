"""Artifacts as commands get them, by manifest CID out of the home or as an envelope file, and every check of one.

Reads the home's files only; a daemon may run beside it or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from p2pkv.artifact.read import Artifact, decode_block, open_manifest
from p2pkv.errors import (
    CidError,
    FetchIncompleteError,
    FormatError,
    IntegrityError,
    NotFoundError,
    P2pkvError,
    UntrustedPublisherError,
    UsageError,
)
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.tensors import LayerGeometry, layer_bytes
from p2pkv.limits import MAX_NODE_BYTES
from p2pkv.store.files import os_errors
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv.store.trust_file import TrustFile
from p2pkv.trust.policy import judge
from p2pkv.units import DAY, format_seconds


@dataclass(frozen=True, slots=True)
class Source:
    """An envelope that nobody judged yet, and the blocks of the home where it has any."""

    cid: Cid
    envelope: bytes
    blocks: StoredBlocks | None
    stored: bool  # it was named by CID and found in the home, so its blocks are expected there


def open_source(argument: str, home: Path) -> Source:
    """Find what ``argument`` names: a manifest CID that the home stores, or an envelope file.

    Raises UsageError where it is neither, NotFoundError for a CID that is not stored, FormatError, IntegrityError, StoreError.
    """
    folder = HomeLayout(home).blocks
    blocks = StoredBlocks(folder) if folder.is_dir() else None
    path = Path(argument)
    if path.is_file():
        with os_errors(f"read {path}"), path.open("rb") as file:
            data = file.read(MAX_NODE_BYTES + 1)
        if len(data) > MAX_NODE_BYTES:
            raise FormatError(f"{path} is larger than any envelope", advice="Name the file of an envelope.")
        return Source(Cid.of_node(data), data, blocks, stored=False)
    try:
        cid = Cid.parse(argument)
    except CidError as error:
        advice = "Name an envelope file, or a manifest CID as `p2pkv publish` prints it."
        raise UsageError(f"{argument!r} is neither a file nor a manifest CID ({error.message})", advice=advice) from None
    if blocks is None or not blocks.has(cid):
        raise NotFoundError(f"{cid} is not stored in {home}", advice=f"Run `p2pkv fetch {cid}`, or name another --home.")
    return Source(cid, blocks.read(cid), blocks, stored=True)


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


def check(source: Source, trusted: TrustFile, on_segment: Callable[[int, int], None] = lambda done, total: None) -> Verdict:
    """Check format, signature and tokens, then every block that the home holds, then expiry and trust.

    ``on_segment(done, total)`` hears of each segment. Raises StoreError for a disk or trust file that cannot be read.
    """
    verdict = Verdict(source.cid)
    try:
        source.cid.check(source.envelope)
        verdict.manifest = Envelope.decode(source.envelope).open()
        artifact = _open_tokens(source, verdict.manifest)
    except P2pkvError as error:
        verdict.faults.append(error)
        artifact = None
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
        verdict.faults += standing(verdict.manifest, trusted)
    return verdict


def standing(manifest: Manifest, trusted: TrustFile) -> list[P2pkvError]:
    """Return why this home would not use an artifact of verified signature: expired, untrusted, both, or nothing."""
    faults: list[P2pkvError] = []
    try:
        judge(manifest, {manifest.publisher}, time.time())
    except P2pkvError as error:
        faults.append(error)
    try:
        judge(manifest, {publisher.did for publisher in trusted.list()}, manifest.created)
    except UntrustedPublisherError as error:
        faults.append(error)
    return faults


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


def describe(cid: Cid, manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says, as JSON values; the CID, then model, sizes, producer, publisher and terms."""
    return {
        "manifest": str(cid),
        "model_id": manifest.model_id.hex(),
        "model_name": manifest.model_name,
        "dtype": manifest.dtype.value,
        "codec": manifest.codec,
        "layers": [
            {"kind": layer.kind.value, "kv_heads": layer.kv_heads, "k_dim": layer.k_dim, "v_dim": layer.v_dim}
            for layer in manifest.layers
        ],
        "tokens": manifest.tokens.count,
        "segments": len(manifest.segments),
        "kv_bytes": sum(layer_bytes(layer, manifest.tokens.count, manifest.dtype) for layer in manifest.layers),
        "producer": dict(manifest.producer),
        "publisher": manifest.publisher,
        "sequence": manifest.sequence,
        "created": manifest.created,
        "expires": manifest.expires,
        "licence": manifest.licence,
    }


def layer_lines(layers: tuple[LayerGeometry, ...]) -> list[str]:
    """Return a line per stretch of equal layers: ``30 x full attention, 3 KV heads, K 64, V 64``."""
    runs: list[tuple[LayerGeometry, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = layer, runs[-1][1] + 1
        else:
            runs.append((layer, 1))
    return [
        f"{count} x {layer.kind.value} attention, KV heads: {layer.kv_heads}, K: {layer.k_dim}, V: {layer.v_dim}"
        for layer, count in runs
    ]


def date(seconds: int) -> str:
    """Return a time of a manifest for people; it may be any number that the format holds."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M UTC}"
    except (OverflowError, OSError, ValueError):
        return f"second {seconds}"


def expiry(expires: int | None) -> str:
    if expires is None:
        return "never"
    left = expires - time.time()
    return f"{date(expires)} ({f'in {_span(left)}' if left > 0 else f'{_span(-left)} ago'})"


def _span(seconds: float) -> str:
    days = int(seconds // DAY)
    return f"{days} days" if days >= 2 else format_seconds(seconds)
