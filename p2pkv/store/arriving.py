"""An artifact while its blocks come out of a file, and nothing of them is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.errors import FetchIncompleteError, FormatError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.segment import BlockRef
from p2pkv.ports import BlockReader
from p2pkv.store.stored_blocks import is_intact


class Arriving:
    """Lets in what a block before it names, and sees in the end that nothing is missing; ``open_root`` opens the first.

    So a file cannot fill the disk with blocks that belong to nothing. ``stored`` has what need not come.
    """

    def __init__(self, roots: Sequence[Cid], stored: BlockReader, open_root: Callable[[Cid, bytes], Manifest]) -> None:
        if len(roots) != 1:
            raise FormatError(f"the CAR has {len(roots)} roots, an artifact has one")
        if roots[0].codec is not Codec.DAG_CBOR:
            raise FormatError("the root of the CAR is a block, and not an envelope")
        self.root = roots[0]
        self._stored = stored
        self._open_root = open_root
        self._manifest: Manifest | None = None
        self._artifact: Artifact | None = None
        self._nodes: dict[Cid, int] = {}  # those that are still to be opened, and which segments they are
        self._missing: dict[Cid, None] = {}
        self._named: dict[Cid, None] = {self.root: None}
        self._places: dict[Cid, tuple[int, int, BlockRef]] = {}  # segment and layer of each block that may come
        self.kv_bytes = 0  # of the blocks that came

    @property
    def cids(self) -> Sequence[Cid]:
        """All that belongs to the artifact, as far as it is known; the root comes first."""
        return tuple(self._named)

    def add(self, cid: Cid, data: bytes) -> None:
        """Take a block whose hash is verified.

        Raises FormatError and its kin, IntegrityError, SignatureError for what is no artifact of this project, or not of this
        one; what ``open_root`` raises.
        """
        if cid not in self._named:
            self._open_stored()
        if cid not in self._named:
            raise FormatError(f"{cid} is neither the root of the CAR nor named by a block before it")
        self._missing.pop(cid, None)
        if self._manifest is None:
            self._manifest = self._open_root(cid, data)
            self._nodes = {node: index for index, node in enumerate(self._manifest.segments)}
            tokens = self._manifest.tokens.cid
            self._name([*([tokens] if tokens is not None else []), *self._manifest.segments])
        elif self._artifact is None and cid == self._manifest.tokens.cid:
            self._artifact = open_manifest(self.root, self._manifest, data)
        elif cid in self._nodes:
            self._open(cid, data)
        elif cid in self._places:
            self._check(cid, data)

    def finish(self, go_on: Callable[[], None]) -> Artifact:
        """Return the artifact, once all of it came or is stored; ``go_on`` is called often.

        Raises FetchIncompleteError where blocks are missing, what :meth:`add` raises.
        """
        if self._manifest is None:
            raise FormatError("the CAR does not hold its root")
        self._open_stored()
        missing = 0
        for cid in self._missing:
            missing += not is_intact(self._stored, cid)
            go_on()
        if missing:
            raise FetchIncompleteError(
                f"the CAR lacks {missing} blocks or segment nodes that are not stored here either",
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
            self._artifact = open_manifest(self.root, self._manifest, self._stored.read(cid) if cid is not None else None)
        return self._artifact

    def _open(self, node: Cid, data: bytes) -> None:
        index = self._nodes.pop(node)
        segment = self._opened().open_segment(index, data)
        self._missing.pop(node, None)
        self._name([ref.cid for ref in segment.blocks()])
        for layer, refs in enumerate(segment.layers):
            for ref in refs:
                self._places.setdefault(ref.cid, (index, layer, ref))

    def _check(self, cid: Cid, data: bytes) -> None:
        """See that a block decodes to what its place needs; of a sealed one only its size can be told without its key."""
        self.kv_bytes += len(data)
        artifact = self._opened()
        index, layer, ref = self._places[cid]
        if artifact.readable:
            artifact.decode_block(index, layer, ref, memoryview(data))
        else:
            ref.check_size(data)

    def _open_stored(self) -> None:
        """Open the nodes that are stored, of those that did not come."""
        for node in [*self._nodes]:
            if is_intact(self._stored, node):
                self._open(node, self._stored.read(node))

    def _name(self, cids: Sequence[Cid]) -> None:
        fresh = dict.fromkeys(cid for cid in cids if cid not in self._named)
        self._named |= fresh
        self._missing |= fresh
