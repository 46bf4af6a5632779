"""Opens the index of a home, and makes it anew from the packs where it was lost.

Packs say what they hold, so what is stored can be listed again: each artifact whose envelope verifies, with the segments of
which node and blocks are all here. Nodes are read and hashed; of blocks it is enough that they are here, since they are hashed
whenever they are read. The new index is a file of its own until it is whole, and then takes its place: killed anywhere in it,
the next start begins again. A damaged file is moved aside, with the log and whatever else SQLite put beside it.

What only the index knows is lost: leases, unfinished downloads, when artifacts were used. Pins come from their copy
(``pins_file``). An artifact that was taken off the list is listed again while its blocks are not collected.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.errors import FormatError, IntegrityError, NotFoundError, SignatureError
from p2pkv.formats import envelope
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_SET_ASIDE_INDEXES
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.database import MISSING, Database, LostIndexError
from p2pkv.store.files import os_errors, sync_paths
from p2pkv.store.holds import Holds
from p2pkv.store.home import HomeLayout
from p2pkv.store.index import ArtifactIndex
from p2pkv.store.pins_file import PinsFile

logger = logging.getLogger(__name__)

# What SQLite puts beside a file. One that is left beside another file would be taken for that one's own.
_COMPANIONS: Final = ("-wal", "-shm", "-journal")
_ASIDE: Final = ".damaged-"
_PROGRESS_NODES: Final = 1_000
_UNUSABLE: Final = (FormatError, SignatureError, IntegrityError, NotFoundError)


def open_index(layout: HomeLayout, blocks: BlockPacks, go_on: Callable[[], None] = lambda: None) -> Database:
    """Open the index; one that is damaged, or missing although there are blocks or pins, is made anew first.

    For the process that holds the home's lock. ``go_on`` is called for each node that is read; what it raises ends the work,
    and all is as it was. Raises UnknownVersionError for the index or the pins of a newer p2pkv, DiskFullError, StoreError;
    StoreError also where the copy of the pins is damaged too.
    """
    _remove(_new(layout.index))
    try:
        return Database(layout.index, checked=True)
    except LostIndexError as lost:
        if lost.fault != MISSING or blocks.totals().blocks or layout.pins.exists():  # else it is a new home
            _rebuild(layout, blocks, go_on, lost.fault)
    return Database(layout.index)


def set_aside(index: Path) -> list[Path]:
    """Return the damaged indexes that were moved aside, the oldest first. Raises OSError."""
    pattern = re.compile(re.escape(index.name + _ASIDE) + rf"([0-9]{{1,9}})(?:{'|'.join(_COMPANIONS)})?")
    numbers = {int(match[1]) for match in map(pattern.fullmatch, os.listdir(index.parent)) if match}
    return [_aside(index, number) for number in sorted(numbers)]


def _rebuild(layout: HomeLayout, blocks: BlockPacks, go_on: Callable[[], None], fault: str) -> None:
    start = time.monotonic()
    logger.warning("the index %s %s: what the packs hold is listed anew", layout.index, fault)
    pins, contents, new = PinsFile(layout.pins).read(), _Contents(blocks, go_on), _new(layout.index)
    with closing(Database(new)) as database:
        ArtifactIndex(database).fill(contents.artifacts())
        Holds(database).fill(pins)
        database.settle()
    with os_errors(f"put a new index in the place of {layout.index}"):
        aside = _set_aside(layout.index)
        os.rename(new, layout.index)
        sync_paths([os.fspath(layout.home)])
    logger.warning(
        "the index is whole again after %.1f s: %d artifacts, %d of them complete, and %d pins; lost are leases, unfinished "
        "downloads and times of use, and what was removed but not collected is listed again%s",
        *(time.monotonic() - start, contents.listed, contents.complete, len(pins)),
        f"; the damaged file is now {aside}" if aside is not None else "",
    )


class _Contents:
    """What ``blocks`` holds, artifact by artifact, and how many there were."""

    def __init__(self, blocks: BlockPacks, go_on: Callable[[], None]) -> None:
        self._blocks = blocks
        self._go_on = go_on
        self._held: dict[tuple[Cid, bytes | int, int], bool] = {}
        self._shapes: dict[object, int] = {}
        self._unusable = 0
        self.listed = self.complete = 0

    def artifacts(self) -> Iterator[tuple[Artifact, frozenset[int]]]:
        """Yield each artifact with the positions of the segments that are held, in the order of their storing.

        An envelope of which no node is here is left out: a fetch leaves those that it refused. Raises StoreError.
        """
        nodes = self._blocks.nodes()
        for number, cid in enumerate(nodes):
            if number and not number % _PROGRESS_NODES:
                logger.info("looked at %d of %d nodes: %d artifacts", number, len(nodes), self.listed)
            artifact = self._open(cid)
            if artifact is None:
                continue
            held = self._held_of(artifact)
            if any(map(self._blocks.has, artifact.manifest.segments)):  # a damaged one is found by now, and forgotten
                self.listed += 1
                self.complete += len(held) == len(artifact.chain_keys)
                yield artifact, held
        if self._unusable:
            logger.warning("%d nodes cannot be read, or are envelopes that cannot be used", self._unusable)

    def _open(self, cid: Cid) -> Artifact | None:
        """Return the artifact whose envelope ``cid`` names, ``None`` for another node or one that cannot be used."""
        try:
            data = self._read(cid)
            if envelope.KIND.encode() not in data:
                return None
            manifest = envelope.Envelope.decode(data).open()
            tokens = manifest.tokens.cid
            return open_manifest(cid, manifest, self._read(tokens) if tokens is not None else None)
        except _UNUSABLE:
            self._unusable += 1
            return None

    def _held_of(self, artifact: Artifact) -> frozenset[int]:
        manifest = artifact.manifest
        # What a node has to fit besides its place; the artifacts of one model have the same.
        shape = self._shapes.setdefault((manifest.layers, manifest.dtype, manifest.codec), len(self._shapes))
        held: list[int] = []
        for index, (node, chain_key) in enumerate(zip(manifest.segments, artifact.chain_keys, strict=True)):
            # A chain key names a place in a text, so artifacts that share a prefix share the answer. Private ones have none.
            key = node, chain_key or index, shape
            if key not in self._held:
                self._held[key] = self._is_held(artifact, index)
            if self._held[key]:
                held.append(index)
        return frozenset(held)

    def _is_held(self, artifact: Artifact, index: int) -> bool:
        try:
            segment = artifact.open_segment(index, self._read(artifact.manifest.segments[index]))
        except _UNUSABLE:
            return False
        return all(self._blocks.has(ref.cid) for ref in segment.blocks())

    def _read(self, cid: Cid) -> bytes:
        self._go_on()
        return self._blocks.read(cid)


def _new(index: Path) -> Path:
    return index.with_name(f"{index.name}.new")


def _aside(index: Path, number: int) -> Path:
    return index.with_name(f"{index.name}{_ASIDE}{number}")


def _set_aside(index: Path) -> Path | None:
    """Move an index with its companions aside, durably, and return where to; the oldest beyond the bound are removed.

    Raises OSError, StoreError.
    """
    before = set_aside(index)
    number = int(before[-1].name.removeprefix(index.name + _ASIDE)) + 1 if before else 1
    aside = _aside(index, number)
    moved = False
    # The file goes first: without it, the next start moves the rest. Without its log, it might pass for whole.
    for companion in ("", *_COMPANIONS):
        path = f"{index}{companion}"
        with suppress(FileNotFoundError):
            if os.path.getsize(path):
                os.rename(path, f"{aside}{companion}")
                moved = True
            else:
                os.unlink(path)
    for old in before[: max(len(before) + moved - MAX_SET_ASIDE_INDEXES, 0)]:
        _remove(old)
    sync_paths([os.fspath(index.parent)])
    return aside if moved else None


def _remove(path: Path) -> None:
    """Remove a file of SQLite with its companions, where there are any. Raises StoreError."""
    with os_errors(f"remove {path}"):
        for companion in ("", *_COMPANIONS):
            with suppress(FileNotFoundError):
                os.unlink(f"{path}{companion}")
