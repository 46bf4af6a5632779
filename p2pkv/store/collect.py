"""Collecting garbage: which artifacts go when the store is too large, and which blocks belong to nothing any more.

Mark and sweep. What is marked: the manifest, token ids, nodes and blocks of every artifact that is listed, and of every
manifest that is pinned or leased. Who goes is decided in one transaction with a look at pins and leases, so neither can come
in between; the artifacts go in it too, and their blocks after it, so a kill leaves blocks that nobody lists, for the next
time. A block that somebody asked for or added since the marking began is spared.

Which blocks belong to a segment says its node alone. While the node of a segment that is held cannot be read, since it was
damaged, any block that belongs to nothing else may be one of them: such blocks stay until the node was fetched again, its
artifact went, or the room is needed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from p2pkv.errors import FormatError, IntegrityError, NotFoundError, SignatureError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.segment import Segment
from p2pkv.limits import LOW_MARK_SHARE, MIN_FREE_BYTES, MIN_FREE_SHARE
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.database import Database
from p2pkv.store.files import Reserve, os_errors
from p2pkv.store.holds import held_manifests, leased_manifests
from p2pkv.units import format_bytes

logger = logging.getLogger(__name__)

# Longest unused first; of two that were used in the same second, the one that was listed first.
_ARTIFACTS: Final = "SELECT manifest_cid, model_name, last_used FROM artifacts ORDER BY last_used, id"
_NODES: Final = "SELECT manifest_cid, node_cid FROM segments JOIN artifacts ON artifact = id"
# What is here by the index: of these, whatever cannot be read was damaged.
_EXPECTED: Final = "SELECT manifest_cid FROM artifacts UNION SELECT node_cid FROM segments WHERE held"


@dataclass(frozen=True, slots=True)
class Marks:
    """Bytes of blocks: from ``high`` on artifacts go, until ``low`` are left."""

    high: int
    low: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """An artifact that goes. ``bytes`` are of blocks that no other artifact has; ``last_used`` in seconds since the epoch."""

    manifest_cid: Cid
    model_name: str
    bytes: int
    last_used: int


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected, or with ``dry_run`` would be.

    ``blocks`` and ``bytes`` are forgotten, ``freed`` bytes the disk got back. ``left`` bytes stay; with ``over_quota`` they
    are above the high mark, and everything that is left is pinned or leased.
    """

    evicted: tuple[Evicted, ...]
    blocks: int
    bytes: int
    freed: int
    left: int
    over_quota: bool
    dry_run: bool


class Collector:
    """Collects in ``blocks`` what ``database`` does not list. Safe from any thread; one collects at a time.

    ``reserve`` is given up where the disk has no room for noting what goes. ``quota`` bounds the bytes of blocks, 0 for the
    disk alone. ``clock`` gives seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        blocks: BlockPacks,
        reserve: Reserve,
        *,
        quota: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._blocks = blocks
        self._reserve = reserve
        self._quota = quota
        self._clock = clock
        self._turn = threading.Lock()

    def free_bytes(self) -> int:
        """Return what the disk has free for us. Raises StoreError."""
        disk = self._disk()
        return disk.f_bavail * disk.f_frsize

    def marks(self) -> Marks:
        """Return the marks as they are now: of the quota, or of what the disk has, whichever is lower. Raises StoreError."""
        disk = self._disk()
        kept_free = min(MIN_FREE_BYTES, int(MIN_FREE_SHARE * disk.f_blocks * disk.f_frsize))
        high = max(self._blocks.totals().bytes + disk.f_bavail * disk.f_frsize - kept_free, 0)
        if self._quota:
            high = min(high, self._quota)
        return Marks(high, int(LOW_MARK_SHARE * high))

    def _disk(self) -> os.statvfs_result:
        with os_errors("look how much room the disk has"):
            return os.statvfs(self._blocks.folder)

    def due(self) -> bool:
        """Return whether it is time to collect. Cheap. Raises StoreError."""
        return self._blocks.totals().bytes > self.marks().high

    def collect(self, *, dry_run: bool = False) -> Collected:
        """Collect what belongs to nothing, and artifacts where the store is above its high mark.

        Raises DiskFullError, StoreError.
        """
        with self._turn, self._blocks.noting_uses():
            references = _References(self._blocks)
            with self._database.reading("look what is listed") as connection:
                listed = _listed(connection)
            for manifest, nodes in listed.items():
                references.of(manifest, nodes)  # most of the reading is done before anybody has to wait for it
            plan = self._reserve.spend_on(partial(self._decide, references, dry_run))
            if plan.spared:
                logger.warning(
                    "%s that belong to nothing stay, since they may belong to %d damaged nodes: `p2pkv verify CID --repair` "
                    "of the artifacts that are not whole fetches these again",
                    *(format_bytes(plan.spared), plan.damaged),
                )
            if dry_run:
                return Collected(plan.evicted, len(plan.garbage), plan.bytes, 0, plan.left, plan.over_quota, dry_run=True)
            swept = self._blocks.sweep(plan.garbage, plan.leased)
        self._reserve.refill()
        for evicted in plan.evicted:
            logger.info("collected %s of %s: %d bytes", evicted.manifest_cid, evicted.model_name, evicted.bytes)
        left = self._blocks.totals().bytes
        return Collected(plan.evicted, swept.blocks, swept.bytes, swept.freed, left, plan.over_quota, dry_run=False)

    def _decide(self, references: _References, dry_run: bool) -> _Plan:
        with self._database.writing("collect garbage", durable=not dry_run) as connection:
            plan = self._plan(connection, references)
            if not dry_run:
                gone = [(evicted.manifest_cid.binary,) for evicted in plan.evicted]
                connection.executemany("DELETE FROM artifacts WHERE manifest_cid = ?", gone)
        return plan

    def _plan(self, connection: sqlite3.Connection, references: _References) -> _Plan:
        rows: list[tuple[bytes, str, int]] = connection.execute(_ARTIFACTS).fetchall()
        now = self._clock()
        listed, held = _listed(connection), held_manifests(connection, now)
        marks, sizes = self.marks(), self._blocks.sizes()
        everything = {manifest: references.of(manifest, listed.get(manifest, ())) for manifest in {*listed, *held}}
        leased = frozenset[bytes]().union(*(everything[manifest] for manifest in leased_manifests(connection, now)))
        users = Counter(cid for cids in everything.values() for cid in cids)
        left = sum(sizes.get(cid, 0) for cid in users)
        evicted: list[Evicted] = []
        if left > marks.high:
            for manifest, model_name, last_used in rows:
                if left <= marks.low:
                    break
                if manifest not in held:
                    freed = self._let_go(everything[manifest], users, sizes)
                    evicted.append(Evicted(Cid.from_bytes(manifest), model_name, freed, last_used))
                    left -= freed
        stray = [cid for cid in sizes if cid not in users]
        damaged = references.unread.intersection(cid for (cid,) in connection.execute(_EXPECTED))
        spare = bool(damaged) and sum(sizes.values()) <= marks.high
        garbage = [cid for cid in stray if not (spare and cid[1] == Codec.RAW)]
        freed = sum(sizes[cid] for cid in garbage)
        spared = sum(sizes[cid] for cid in stray) - freed
        return _Plan(tuple(evicted), garbage, leased, freed, left + spared, left > marks.high, spared, len(damaged))

    @staticmethod
    def _let_go(cids: Iterable[bytes], users: Counter[bytes], sizes: dict[bytes, int]) -> int:
        freed = 0
        for cid in cids:
            users[cid] -= 1
            if not users[cid]:
                del users[cid]
                freed += sizes.get(cid, 0)
        return freed


def _listed(connection: sqlite3.Connection) -> dict[bytes, list[bytes]]:
    """Return the nodes of every artifact that is listed, by its manifest."""
    listed: dict[bytes, list[bytes]] = {manifest: [] for manifest, *_ in connection.execute(_ARTIFACTS)}
    for manifest, node in connection.execute(_NODES):
        listed[manifest].append(node)
    return listed


@dataclass(frozen=True, slots=True)
class _Plan:
    evicted: tuple[Evicted, ...]
    garbage: list[bytes]
    leased: frozenset[bytes]
    bytes: int
    left: int
    over_quota: bool
    spared: int
    damaged: int


class _References:
    """What belongs to a manifest, as far as it is here: binary CIDs, read once."""

    def __init__(self, blocks: BlockPacks) -> None:
        self._blocks = blocks
        self._by_manifest: dict[bytes, frozenset[bytes]] = {}
        self._by_node: dict[Cid, frozenset[bytes]] = {}
        self.unread: set[bytes] = set()
        """What was asked for, and is not here or damaged."""

    def of(self, manifest: bytes, nodes: Sequence[bytes]) -> frozenset[bytes]:
        """Return what belongs to ``manifest``. The index knows its ``nodes`` too: a damaged manifest costs itself alone."""
        if manifest not in self._by_manifest:
            tokens, named = self._read(Cid.from_bytes(manifest))
            below = dict.fromkeys([*named, *map(Cid.from_bytes, nodes)])
            found = frozenset([manifest, *tokens]).union(*map(self._below, below))
            if self.unread.intersection([manifest, *(node.binary for node in below)]):
                return found  # more may arrive before this is asked again
            self._by_manifest[manifest] = found
        return self._by_manifest[manifest]

    def _read(self, cid: Cid) -> tuple[Sequence[bytes], Sequence[Cid]]:
        """Return the block of token ids, where there is one, and the nodes that a manifest names."""
        envelope = self._peek(cid)
        if envelope is None:
            return (), ()
        try:
            manifest = Envelope.decode(envelope).open()
        except (FormatError, SignatureError):
            return (), ()
        return [] if manifest.tokens.cid is None else [manifest.tokens.cid.binary], manifest.segments

    def _below(self, node: Cid) -> frozenset[bytes]:
        if node not in self._by_node:
            data = self._peek(node)
            try:
                refs = Segment.decode(data).blocks() if data is not None else ()
            except FormatError:
                refs = ()
            found = frozenset([node.binary, *(ref.cid.binary for ref in refs)])
            if data is None:
                return found
            self._by_node[node] = found
        return self._by_node[node]

    def _peek(self, cid: Cid) -> bytes | None:
        try:
            data = self._blocks.peek(cid)
        except (NotFoundError, IntegrityError):
            self.unread.add(cid.binary)
            return None
        self.unread.discard(cid.binary)
        return data
