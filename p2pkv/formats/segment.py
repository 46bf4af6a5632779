"""Segment nodes: the blocks of one segment, layer by layer (``docs/spec/segment.md``).

A segment node says nothing about who made it, so every artifact with the same prefix can share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from p2pkv.errors import FormatError, IntegrityError, ManifestError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.fields import Fields
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.tensors import BlockPart, Dtype, LayerGeometry, Part, layer_parts
from p2pkv.limits import (
    MAX_BLOCK_BYTES,
    MAX_BLOCKS_PER_LAYER,
    MAX_CODED_BLOCK_BYTES,
    MAX_KV_HEADS,
    MAX_LAYERS,
    MAX_TOKENS,
    SEGMENT_TOKENS,
)

KIND: Final = "p2pkv/segment"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block: what it holds, its CID and size as coded, and the BLAKE3-256 digest of the decoded bytes."""

    part: BlockPart
    cid: Cid
    size: int
    digest: bytes

    def check_size(self, data: bytes | memoryview) -> None:
        """Raise IntegrityError unless ``data`` has as many bytes as the segment says."""
        if len(data) != self.size:
            raise IntegrityError(f"block {self.cid} has {len(data)} bytes, its segment says {self.size}")

    def to_value(self) -> dagcbor.Value:
        return {
            "part": self.part.part.value,
            "heads": [self.part.head_start, self.part.head_end],
            "cid": self.cid,
            "size": self.size,
            "raw_size": self.part.size,
            "digest": self.digest,
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> BlockRef:
        part = fields.choice("part", Part)
        match fields.items("heads", 2):
            # A boolean is an int to Python, but another value in DAG-CBOR.
            case [int(start), int(end)] if type(start) is type(end) is int and 0 <= start < end <= MAX_KV_HEADS:
                pass
            case _:
                raise FormatError("a block's heads are a range [start, end)")
        cid = fields.link("cid")
        if cid.codec is not Codec.RAW:
            raise FormatError(f"block {cid} is not raw")
        size = fields.integer("size", 1, MAX_CODED_BLOCK_BYTES)
        raw_size = fields.integer("raw_size", 1, MAX_BLOCK_BYTES)
        digest = fields.fixed_bytes("digest", DIGEST_BYTES)
        fields.end()
        return cls(BlockPart(part, start, end, raw_size), cid, size, digest)


@dataclass(frozen=True, slots=True)
class Segment:
    """The KV of tokens ``[start, end)`` under chain key ``chain_key``; ``layers[i]`` are the blocks of layer ``i``."""

    chain_key: bytes
    start: int
    end: int
    dtype: Dtype
    codec: str
    layers: tuple[tuple[BlockRef, ...], ...]
    extra: dict[str, dagcbor.Value] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def blocks(self) -> Iterator[BlockRef]:
        """Yield all blocks, layer by layer."""
        for layer in self.layers:
            yield from layer

    def encode(self) -> bytes:
        """Return the node's bytes. Raises DagCborError where they exceed a node."""
        return dagcbor.encode(
            {
                **self.extra,
                "kind": KIND,
                "version": VERSION,
                "chain_key": self.chain_key,
                "start": self.start,
                "end": self.end,
                "dtype": self.dtype.value,
                "codec": self.codec,
                "layers": [[block.to_value() for block in layer] for layer in self.layers],
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Segment:
        """Parse a node whose bytes match its CID. Raises FormatError or a subclass."""
        fields = Fields(dagcbor.decode_map(data), "segment", FormatError)
        fields.version(KIND, VERSION)
        chain_key = fields.fixed_bytes("chain_key", DIGEST_BYTES)
        start = fields.integer("start", 0, MAX_TOKENS - 1)
        end = fields.integer("end", start + 1, start + SEGMENT_TOKENS)
        if start % SEGMENT_TOKENS:
            raise FormatError(f"a segment starts at token {start}, which is no multiple of {SEGMENT_TOKENS}")
        dtype = fields.choice("dtype", Dtype)
        codec = fields.text("codec")
        layers: list[tuple[BlockRef, ...]] = []
        for index, layer in enumerate(fields.items("layers", MAX_LAYERS)):
            if not isinstance(layer, list) or not 1 <= len(layer) <= MAX_BLOCKS_PER_LAYER:
                raise FormatError(f"segment layer {index} is not a list of blocks")
            refs: list[BlockRef] = []
            for block in layer:
                if not isinstance(block, dict):
                    raise FormatError(f"segment layer {index} holds something that is not a block")
                refs.append(BlockRef.from_fields(Fields(block, f"segment.layers[{index}]", FormatError)))
            layers.append(tuple(refs))
        return cls(chain_key, start, end, dtype, codec, tuple(layers), fields.rest())

    def check(self, layers: tuple[LayerGeometry, ...], dtype: Dtype) -> None:
        """Check that the blocks cover exactly ``layers`` in the one canonical cut. Raises ManifestError."""
        if self.dtype is not dtype:
            raise ManifestError(f"segment at token {self.start} is {self.dtype}, its manifest says {dtype}")
        if len(self.layers) != len(layers):
            raise ManifestError(f"segment at token {self.start} has {len(self.layers)} layers, its manifest {len(layers)}")
        for index, (blocks, geometry) in enumerate(zip(self.layers, layers, strict=True)):
            if tuple(block.part for block in blocks) != layer_parts(geometry, self.tokens, dtype):
                raise ManifestError(f"segment at token {self.start}: the blocks of layer {index} do not cover it exactly")
