"""Neutral tensors: a layer is cut in exactly one way, and the parts cover it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, strategies as st

from p2pkv.errors import ManifestError
from p2pkv.formats.cid import Cid
from p2pkv.formats.tensors import BlockPart, Dtype, LayerGeometry, LayerKind, Part, layer_bytes, layer_parts
from p2pkv.limits import MAX_BLOCK_BYTES, MAX_BLOCKS_PER_LAYER, MAX_HEAD_DIM, MAX_KV_HEADS, SEGMENT_TOKENS
from tests.support import samples, vectors
from tests.support.strategies import dtypes, geometries, segment_lengths

CUTS = vectors.document("blocks.json")["cuts"]
BLOCKS = vectors.load("blocks.json")
FP32_DIMS_OF_A_FULL_HEAD = MAX_BLOCK_BYTES // (SEGMENT_TOKENS * 4)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut["name"])
def test_golden_cut(cut: dict[str, Any]) -> None:
    geometry = LayerGeometry(LayerKind.FULL, cut["kv_heads"], cut["k_dim"], cut["v_dim"])
    expected = tuple(BlockPart(Part(part), start, end, size) for part, start, end, size in cut["parts"])
    assert layer_parts(geometry, cut["tokens"], Dtype(cut["dtype"])) == expected


@pytest.mark.parametrize("index", [0, 1])
def test_golden_block(index: int) -> None:
    vector = BLOCKS[f"layer {index}"]
    assert samples.BLOCKS[index] == vector.data
    assert str(Cid.of_block(vector.data)) == vector.fields["cid"]
    assert layer_bytes(samples.LAYERS[index], 3, Dtype.BF16) == len(vector.data)


@given(geometries, segment_lengths, dtypes)
@example(LayerGeometry(LayerKind.FULL, MAX_KV_HEADS, FP32_DIMS_OF_A_FULL_HEAD, 1), SEGMENT_TOKENS, Dtype.FP32)
@example(LayerGeometry(LayerKind.FULL, 8, 128, 128), SEGMENT_TOKENS, Dtype.BF16)
@example(LayerGeometry(LayerKind.FULL, 8, 128, 129), SEGMENT_TOKENS, Dtype.BF16)
def test_parts_cover_a_layer_exactly(geometry: LayerGeometry, tokens: int, dtype: Dtype) -> None:
    try:
        parts = layer_parts(geometry, tokens, dtype)
    except ManifestError:
        assert max(geometry.k_dim, geometry.v_dim) * tokens * dtype.itemsize > MAX_BLOCK_BYTES
        return
    whole = layer_bytes(geometry, tokens, dtype)
    assert sum(part.size for part in parts) == whole
    assert all(1 <= part.size <= MAX_BLOCK_BYTES for part in parts)
    assert len(parts) <= MAX_BLOCKS_PER_LAYER
    if whole <= MAX_BLOCK_BYTES:
        assert parts == (BlockPart(Part.KV, 0, geometry.kv_heads, whole),)
        return
    assert [part.part for part in parts] == sorted((part.part for part in parts), key=[Part.K, Part.V].index)
    for name, dim in ((Part.K, geometry.k_dim), (Part.V, geometry.v_dim)):
        ranges = [part for part in parts if part.part is name]
        assert ranges[0].head_start == 0
        assert ranges[-1].head_end == geometry.kv_heads
        assert all(before.head_end == after.head_start for before, after in pairwise(ranges))
        for part in ranges:
            assert part.size == (part.head_end - part.head_start) * tokens * dim * dtype.itemsize


@given(geometries, segment_lengths, dtypes)
def test_every_range_but_the_last_is_as_long_as_fits(geometry: LayerGeometry, tokens: int, dtype: Dtype) -> None:
    assume(max(geometry.k_dim, geometry.v_dim) * tokens * dtype.itemsize <= MAX_BLOCK_BYTES)
    parts = layer_parts(geometry, tokens, dtype)
    for before, after in pairwise(parts):
        if before.part is after.part:
            one_head = before.size // (before.head_end - before.head_start)
            assert before.size + one_head > MAX_BLOCK_BYTES


@pytest.mark.parametrize("tokens", [-1, 0, SEGMENT_TOKENS + 1])
def test_tokens_out_of_range(tokens: int) -> None:
    with pytest.raises(ManifestError):
        layer_parts(samples.LAYERS[0], tokens, Dtype.BF16)


@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim"),
    [
        (0, 1, 1),
        (-1, 1, 1),
        (MAX_KV_HEADS + 1, 1, 1),
        (1, 0, 1),
        (1, 1, 0),
        (1, MAX_HEAD_DIM + 1, 1),
        (1, 1, MAX_HEAD_DIM + 1),
        (2**63 - 1, 2**63 - 1, 2**63 - 1),
    ],
)
def test_absurd_geometry(heads: int, k_dim: int, v_dim: int) -> None:
    with pytest.raises(ManifestError):
        LayerGeometry(LayerKind.FULL, heads, k_dim, v_dim)


def test_a_head_that_fits_no_block() -> None:
    fits = LayerGeometry(LayerKind.FULL, 2, FP32_DIMS_OF_A_FULL_HEAD, 1)
    assert len(layer_parts(fits, SEGMENT_TOKENS, Dtype.FP32)) == 3
    too_wide = LayerGeometry(LayerKind.FULL, 2, FP32_DIMS_OF_A_FULL_HEAD + 1, 1)
    with pytest.raises(ManifestError, match="does not fit"):
        layer_parts(too_wide, SEGMENT_TOKENS, Dtype.FP32)


@given(st.sampled_from(Dtype))
def test_item_size(dtype: Dtype) -> None:
    assert dtype.itemsize == {"bf16": 2, "fp16": 2, "fp32": 4}[dtype.value]
