"""What is still missing of the artifact that is being fetched: nodes first, then their blocks. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from p2pkv.artifact.read import Artifact
from p2pkv.formats.cid import Cid
from p2pkv.formats.segment import BlockRef
from p2pkv.limits import SEGMENT_TOKENS


class Assembly:
    """The first ``hit_tokens`` tokens of ``artifact``, segment by segment, in ``layers`` (``None`` for all of them).

    Feed it nodes and arrived blocks in any order; a segment is complete when its node and all its blocks of these layers are
    here. A block counts for the nodes that are here: where a later node names it again, it has to be told again.
    """

    def __init__(self, artifact: Artifact, hit_tokens: int, *, layers: range | None = None, in_order: bool = False) -> None:
        self.artifact = artifact
        self.layers = range(len(artifact.manifest.layers)) if layers is None else layers
        self.hit_tokens = hit_tokens
        self.segment_count = artifact.segments_for(hit_tokens)
        self.total_bytes = 0
        self.done_bytes = 0
        self._nodes = {cid: index for index, cid in enumerate(artifact.manifest.segments[: self.segment_count])}
        self._missing: list[set[Cid] | None] = [None] * self.segment_count
        self._blocks: dict[int, tuple[Cid, ...]] = {}
        self._others: dict[int, frozenset[Cid]] = {}
        self._in_order = in_order
        self._handed_over = 0  # segments, where they are handed over in order
        self._waiting: dict[Cid, list[int]] = {}  # missing block -> the segments that hold it
        self._sizes: dict[Cid, int] = {}
        self._named = set(artifact.manifest.segments)

    @property
    def missing_nodes(self) -> Collection[Cid]:
        """The segment nodes that are not here yet, in order."""
        return self._nodes.keys()

    def names(self, cid: Cid) -> bool:
        """Return whether ``cid`` is a node of the artifact, or a block of one that is here."""
        return cid in self._named

    def add_node(self, cid: Cid, node: bytes) -> list[tuple[int, BlockRef]]:
        """Take a segment's node and return (segment, block) for its wanted blocks; none for a node that is here already.

        Raises what Artifact.open_segment raises.
        """
        index = self._nodes.get(cid)
        if index is None:
            return []
        segment = self.artifact.open_segment(index, node)
        del self._nodes[cid]
        first, end = self.layers.start, self.layers.stop
        refs = [ref for layer in segment.layers[first:end] for ref in layer]
        sizes = {ref.cid: ref.size for ref in refs}  # layers with equal bytes share a block
        others = {ref.cid for layer in (*segment.layers[:first], *segment.layers[end:]) for ref in layer}
        self._missing[index] = set(sizes)
        self._blocks[index] = (cid, *sizes)
        self._others[index] = frozenset(others - sizes.keys())
        self._named.update(sizes, others)
        for block, size in sizes.items():
            self._waiting.setdefault(block, []).append(index)
            if block not in self._sizes:
                self._sizes[block] = size
                self.total_bytes += size
        return [(index, ref) for ref in refs]

    def add_block(self, cid: Cid) -> list[int]:
        """Take a verified block; return the segments to hand over now.

        These are the segments that it completes; in order, those that are complete with all before them, each once.
        """
        completed: list[int] = []
        for index in self._waiting.pop(cid, ()):
            missing = self._missing[index]
            if missing is None:
                continue
            missing.discard(cid)
            if not missing:
                completed.append(index)
        self.done_bytes += self._sizes.pop(cid, 0)
        return self._next_in_order() if self._in_order else completed

    def _next_in_order(self) -> list[int]:
        first = self._handed_over
        while self._handed_over < self.segment_count and self.is_complete(self._handed_over):
            self._handed_over += 1
        return list(range(first, self._handed_over))

    def blocks(self, index: int) -> tuple[Cid, ...]:
        """Return the node of a segment that was added, and its wanted blocks, each once."""
        return self._blocks[index]

    def others(self, index: int) -> Collection[Cid]:
        """Return the blocks of a segment that was added which no wanted layer names."""
        return self._others[index]

    @property
    def all_layers(self) -> bool:
        """Whether every layer of the artifact is wanted."""
        return len(self.layers) == len(self.artifact.manifest.layers)

    @property
    def opened(self) -> Collection[int]:
        """The segments whose nodes are here."""
        return self._blocks.keys()

    def is_complete(self, index: int) -> bool:
        return self._missing[index] is not None and not self._missing[index]

    @property
    def complete(self) -> bool:
        """Whether every wanted segment is here."""
        return all(self.is_complete(index) for index in range(self.segment_count))

    def held(self) -> Iterator[int]:
        """Yield the segments that are complete."""
        return (index for index in range(self.segment_count) if self.is_complete(index))

    def usable(self) -> tuple[int, int]:
        """Return (segments, tokens) that are complete from the start without a gap."""
        segments = next((i for i in range(self.segment_count) if not self.is_complete(i)), self.segment_count)
        return segments, min(segments * SEGMENT_TOKENS, self.hit_tokens)
