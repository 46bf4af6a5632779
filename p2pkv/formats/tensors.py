"""Neutral tensors: how the KV of one segment and layer lies in blocks, whatever the framework (``docs/spec/blocks.md``).

K and V are ``[kv_heads, tokens, head_dim]``, contiguous, little endian, K after RoPE. One block holds K and then V of a
layer where both fit :data:`~p2pkv.limits.MAX_BLOCK_BYTES`; else K and V are blocks of their own, and where even one of them
does not fit, ranges of heads are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from p2pkv.errors import ManifestError
from p2pkv.limits import MAX_BLOCK_BYTES, MAX_HEAD_DIM, MAX_KV_HEADS, SEGMENT_TOKENS


class Dtype(StrEnum):
    """Element types of KV values."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FP32 else 2


class LayerKind(StrEnum):
    """What a layer's state is. A kind that is not listed is refused by its name."""

    FULL = "full"


class Part(StrEnum):
    """Which tensors one block holds."""

    KV = "kv"
    K = "k"
    V = "v"


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's KV: K is ``[kv_heads, tokens, k_dim]`` and V ``[kv_heads, tokens, v_dim]``."""

    kind: LayerKind
    kv_heads: int
    k_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        if not 1 <= self.kv_heads <= MAX_KV_HEADS:
            raise ManifestError(f"a layer of {self.kv_heads} KV heads; 1 to {MAX_KV_HEADS} are possible")
        for dim in (self.k_dim, self.v_dim):
            if not 1 <= dim <= MAX_HEAD_DIM:
                raise ManifestError(f"a head of {dim} values; 1 to {MAX_HEAD_DIM} are possible")


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One block's share of a layer: which tensors, which heads ``[head_start, head_end)``, and its size in bytes."""

    part: Part
    head_start: int
    head_end: int
    size: int


# A model has a handful of these, and a publisher who lies may make each of them 2,048 parts long.
@lru_cache(maxsize=64)
def layer_parts(geometry: LayerGeometry, tokens: int, dtype: Dtype) -> tuple[BlockPart, ...]:
    """Return the blocks of one layer over ``tokens`` tokens, in canonical order: there is one way to cut a layer.

    Raises ManifestError where a single head does not fit one block.
    """
    if not 1 <= tokens <= SEGMENT_TOKENS:
        raise ManifestError(f"a segment of {tokens} tokens; 1 to {SEGMENT_TOKENS} are possible")

    values_per_token = {Part.KV: geometry.k_dim + geometry.v_dim, Part.K: geometry.k_dim, Part.V: geometry.v_dim}

    def size(part: Part, heads: int) -> int:
        return heads * tokens * values_per_token[part] * dtype.itemsize

    heads = geometry.kv_heads
    if size(Part.KV, heads) <= MAX_BLOCK_BYTES:
        return (BlockPart(Part.KV, 0, heads, size(Part.KV, heads)),)
    parts: list[BlockPart] = []
    for part in (Part.K, Part.V):
        per_block = min(heads, MAX_BLOCK_BYTES // size(part, 1))
        if per_block == 0:
            raise ManifestError(f"one head of {size(part, 1)} bytes does not fit a block of {MAX_BLOCK_BYTES}")
        for start in range(0, heads, per_block):
            end = min(start + per_block, heads)
            parts.append(BlockPart(part, start, end, size(part, end - start)))
    return tuple(parts)


def layer_bytes(geometry: LayerGeometry, tokens: int, dtype: Dtype) -> int:
    """Return the decoded bytes of one layer over ``tokens`` tokens."""
    return geometry.kv_heads * tokens * (geometry.k_dim + geometry.v_dim) * dtype.itemsize
