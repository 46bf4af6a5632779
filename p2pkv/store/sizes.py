"""What artifacts take in the store. Only their nodes know it, so each node is read once and its sum remembered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2pkv.errors import FormatError, IntegrityError, NotFoundError, SignatureError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.segment import Segment
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.database import Database

_NEWEST: Final = "SELECT id, manifest_cid FROM artifacts ORDER BY id DESC LIMIT ?"
_HELD: Final = """
    SELECT node_cid,
        EXISTS (SELECT 1 FROM segments AS other WHERE other.node_cid = mine.node_cid AND other.artifact != mine.artifact)
    FROM segments AS mine WHERE artifact = ? AND held
"""


@dataclass(frozen=True, slots=True)
class ArtifactSize:
    """Bytes of what is held of an artifact: its manifest, its token ids, and its segments with nodes and blocks.

    ``shared`` of them belong to segments that other artifacts here have as well, and count for each of these.
    """

    bytes: int
    shared: int


class ArtifactSizes:
    """The sizes of what ``database`` lists and ``blocks`` holds. At most ``reads`` manifests and nodes are read in one call.

    Any thread may call; one looks at a time. Looking at a store that has not changed costs next to nothing.
    """

    def __init__(self, database: Database, blocks: BlockPacks, *, reads: int) -> None:
        self._database = database
        self._blocks = blocks
        self._reads = reads
        self._turn = threading.Lock()
        self._version: int | None = None  # of the index, once everything is known of it
        self._sizes: dict[Cid, ArtifactSize] = {}
        self._known: dict[bytes, int] = {}  # what belongs to a manifest alone, or to a node, by binary CID

    def newest(self, count: int) -> dict[Cid, ArtifactSize]:
        """Return the sizes of the ``count`` newest artifacts, without those that are not all read yet.

        Always with the same ``count``. Raises DiskFullError, StoreError.
        """
        with self._turn:
            with self._database.reading("list artifacts") as connection:
                ((version,),) = connection.execute("PRAGMA data_version").fetchall()
                newest = connection.execute(_NEWEST, (count,)).fetchall()
            if version != self._version:
                self._look(newest)
                all_known = len(self._sizes) == len(newest) and all(self._known.values())  # what is gone may come back
                self._version = version if all_known else None
            return self._sizes

    def _look(self, newest: Sequence[tuple[int, bytes]]) -> None:
        remembered, self._known, self._sizes = self._known, {}, {}
        left = self._reads
        for artifact, manifest in newest:
            with self._database.reading("look what is held") as connection:  # one by one: others read the index as well
                held = connection.execute(_HELD, (artifact,)).fetchall()
            parts = [(manifest, False), *((node, bool(shared)) for node, shared in held)]
            for cid, _ in parts:
                if size := remembered.get(cid):
                    self._known[cid] = size
                elif cid not in self._known and left:
                    left -= 1
                    self._known[cid] = self._measure(Cid.from_bytes(cid), is_manifest=cid == manifest)
            if all(cid in self._known for cid, _ in parts):
                total = sum(self._known[cid] for cid, _ in parts)
                shared = sum(self._known[cid] for cid, is_shared in parts if is_shared)
                self._sizes[Cid.from_bytes(manifest)] = ArtifactSize(total, shared)

    def _measure(self, cid: Cid, *, is_manifest: bool) -> int:
        """Return the bytes of a block and of what it names, but for the nodes that a manifest names; 0 where it is gone."""
        try:
            data = self._blocks.peek(cid)
        except (NotFoundError, IntegrityError):
            return 0
        try:
            return len(data) + (_token_bytes(data) if is_manifest else _block_bytes(data))
        except (FormatError, SignatureError):
            return len(data)


def _token_bytes(envelope: bytes) -> int:
    """Return the bytes of the block of token ids, sealed or not; 0 where they are in the manifest."""
    manifest = Envelope.decode(envelope).open()
    return 0 if manifest.tokens.cid is None else manifest.token_bytes


def _block_bytes(node: bytes) -> int:
    return sum({ref.cid: ref.size for ref in Segment.decode(node).blocks()}.values())
