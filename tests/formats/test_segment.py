"""Segment nodes: parsed strictly, and checked against the one canonical cut of the manifest's geometry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from p2pkv.errors import FormatError, ManifestError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.formats.tensors import BlockPart, Dtype, LayerGeometry, LayerKind, Part, layer_parts
from p2pkv.limits import MAX_BLOCK_BYTES, MAX_CODED_BLOCK_BYTES, MAX_KV_HEADS, MAX_LAYERS, MAX_TOKENS, SEGMENT_TOKENS
from tests.support import samples, vectors
from tests.support.strategies import digests, dtypes

GOLDEN = vectors.load("segment.json")["tiny"]
WRONG_KINDS: list[dagcbor.Value] = [None, True, 7, b"seven", "seven", [7], {"seven": 7}, Cid.of_block(b"seven")]


def tree() -> Any:
    """Return the sample as plain values, to be spoilt."""
    return dagcbor.decode(samples.segment().encode())


def first_block(node: Any) -> Any:
    return node["layers"][0][0]


def decode_tree(node: Any) -> Segment:
    return Segment.decode(dagcbor.encode(node))


def test_golden_vector() -> None:
    assert samples.segment().encode() == GOLDEN.data
    assert Segment.decode(GOLDEN.data) == samples.segment()
    assert str(Cid.of_node(GOLDEN.data)) == GOLDEN.fields["cid"]


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    start = draw(st.integers(0, MAX_TOKENS // SEGMENT_TOKENS - 1)) * SEGMENT_TOKENS
    tokens = draw(st.integers(1, SEGMENT_TOKENS))
    dtype = draw(dtypes)
    sizes = st.integers(1, 64)
    geometry = draw(st.lists(st.builds(LayerGeometry, st.just(LayerKind.FULL), sizes, sizes, sizes), min_size=1, max_size=4))
    layers = []
    for layer in geometry:
        refs = []
        for part in layer_parts(layer, tokens, dtype):
            cid = Cid(Codec.RAW, HashFunction.BLAKE3, draw(digests))
            refs.append(BlockRef(part, cid, draw(st.integers(1, MAX_CODED_BLOCK_BYTES)), draw(digests)))
        layers.append(tuple(refs))
    extra: dict[str, dagcbor.Value] = draw(st.dictionaries(st.just("later"), st.integers(0, 9)))
    return Segment(draw(digests), start, start + tokens, dtype, "raw", tuple(layers), extra)


@given(segments())
def test_round_trip(segment: Segment) -> None:
    assert Segment.decode(segment.encode()) == segment
    assert segment.tokens == segment.end - segment.start
    assert list(segment.blocks()) == [block for layer in segment.layers for block in layer]


@pytest.mark.parametrize("name", sorted(tree()))
def test_missing_field(name: str) -> None:
    node = tree()
    del node[name]
    with pytest.raises(FormatError, match=f"segment.{name} is missing"):
        decode_tree(node)


@pytest.mark.parametrize("name", sorted(first_block(tree())))
def test_missing_field_of_a_block(name: str) -> None:
    node = tree()
    del first_block(node)[name]
    with pytest.raises(FormatError, match=f"{name} is missing"):
        decode_tree(node)


def wrong_kinds(node: dict[str, Any]) -> list[tuple[str, dagcbor.Value]]:
    """Return every field of ``node`` with a value of every other kind, and for lists also with a wrong item."""
    return [
        (name, wrong)
        for name, right in node.items()
        for wrong in WRONG_KINDS
        if type(wrong) is not type(right) or isinstance(right, list)
    ]


@pytest.mark.parametrize(("name", "wrong"), wrong_kinds(tree()))
def test_wrong_kind(name: str, wrong: dagcbor.Value) -> None:
    with pytest.raises(FormatError):
        decode_tree(tree() | {name: wrong})


@pytest.mark.parametrize(("name", "wrong"), wrong_kinds(first_block(tree())))
def test_wrong_kind_in_a_block(name: str, wrong: dagcbor.Value) -> None:
    node = tree()
    first_block(node)[name] = wrong
    with pytest.raises(FormatError):
        decode_tree(node)


SPOILT: dict[str, Callable[[Any], Any]] = {
    "another kind of node": lambda node: node.update(kind="p2pkv/manifest"),
    "short chain key": lambda node: node.update(chain_key=bytes(31)),
    "negative start": lambda node: node.update(start=-256),
    "start inside a segment": lambda node: node.update(start=1, end=4),
    "start behind the longest text": lambda node: node.update(start=MAX_TOKENS, end=MAX_TOKENS + 1),
    "no tokens": lambda node: node.update(end=0),
    "end before start": lambda node: node.update(start=512, end=256),
    "257 tokens": lambda node: node.update(end=257),
    "absurd end": lambda node: node.update(end=2**63 - 1),
    "unknown dtype": lambda node: node.update(dtype="fp8"),
    "too many layers": lambda node: node.update(layers=node["layers"] * (MAX_LAYERS // 2 + 1)),
    "layer that is no list": lambda node: node["layers"].append({}),
    "layer without blocks": lambda node: node["layers"].append([]),
    "block that is no map": lambda node: node["layers"][0].append(7),
    "unknown part": lambda node: first_block(node).update(part="q"),
    "no heads": lambda node: first_block(node).update(heads=[1, 1]),
    "heads backwards": lambda node: first_block(node).update(heads=[2, 1]),
    "negative heads": lambda node: first_block(node).update(heads=[-1, 2]),
    "too many heads": lambda node: first_block(node).update(heads=[0, MAX_KV_HEADS + 1]),
    "one bound of heads": lambda node: first_block(node).update(heads=[0]),
    "three bounds of heads": lambda node: first_block(node).update(heads=[0, 1, 2]),
    "booleans as heads": lambda node: first_block(node).update(heads=[False, True]),
    "text as heads": lambda node: first_block(node).update(heads=["0", "2"]),
    "link to a node": lambda node: first_block(node).update(cid=Cid.of_node(b"\xa0")),
    "empty block": lambda node: first_block(node).update(size=0),
    "coded block too large": lambda node: first_block(node).update(size=MAX_CODED_BLOCK_BYTES + 1),
    "decodes to nothing": lambda node: first_block(node).update(raw_size=0),
    "decodes to too much": lambda node: first_block(node).update(raw_size=MAX_BLOCK_BYTES + 1),
    "short digest": lambda node: first_block(node).update(digest=bytes(31)),
    "unknown field of a block": lambda node: first_block(node).update(later=1),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_node(name: str) -> None:
    node = tree()
    SPOILT[name](node)
    with pytest.raises(FormatError):
        decode_tree(node)


@pytest.mark.parametrize("version", [0, 2, 2**63 - 1])
def test_unknown_version_is_told_before_anything_else(version: int) -> None:
    with pytest.raises(UnknownVersionError, match=f"version {version}"):
        decode_tree({"kind": "p2pkv/segment", "version": version, "other": "fields"})


def test_unknown_fields_are_kept() -> None:
    node = tree() | {"later": {"depth": [1, 2]}}
    segment = decode_tree(node)
    assert segment.extra == {"later": {"depth": [1, 2]}}
    assert segment.encode() == dagcbor.encode(node)


def test_cut_and_trailing_bytes() -> None:
    data = samples.segment().encode()
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            Segment.decode(data[:cut])
    with pytest.raises(FormatError):
        Segment.decode(data + b"\x00")


@given(st.binary(max_size=64))
def test_garbage(data: bytes) -> None:
    with pytest.raises(FormatError):
        Segment.decode(data)


@given(st.integers(0, 8 * len(GOLDEN.data) - 1))
def test_a_flipped_bit_is_refused_or_another_node(position: int) -> None:
    changed = bytearray(GOLDEN.data)
    changed[position // 8] ^= 1 << position % 8
    assert not Cid.of_node(GOLDEN.data).matches(changed)
    try:
        segment = Segment.decode(bytes(changed))
    except FormatError:
        return
    assert segment != samples.segment()
    assert segment.encode() == changed


# --- the check against the manifest's geometry -------------------------------------------------------------------------

# Four heads of 512 values over 256 tokens in fp32 are 2 MiB for K and as much for V: two ranges of heads each.
WIDE = (LayerGeometry(LayerKind.FULL, 4, 512, 512),)


def wide(parts: tuple[BlockPart, ...]) -> Segment:
    """Return a segment whose one layer has ``parts``."""
    refs = tuple(BlockRef(part, Cid.of_block(b"%d" % i), part.size, bytes(32)) for i, part in enumerate(parts))
    return Segment(bytes(32), 0, SEGMENT_TOKENS, Dtype.FP32, "raw", (refs,))


CUT = layer_parts(WIDE[0], SEGMENT_TOKENS, Dtype.FP32)
HALF = MAX_BLOCK_BYTES // 2


def test_the_canonical_cut_passes() -> None:
    assert len(CUT) == 4
    wide(CUT).check(WIDE, Dtype.FP32)
    samples.segment().check(samples.LAYERS, samples.DTYPE)


WRONG_CUTS = {
    "a block is missing": CUT[:-1],
    "the first block is missing": CUT[1:],
    "a block comes twice": (*CUT, CUT[-1]),
    "blocks in another order": (CUT[1], CUT[0], *CUT[2:]),
    "V before K": (*CUT[2:], *CUT[:2]),
    "cut finer than need be": (BlockPart(Part.K, 0, 1, HALF), BlockPart(Part.K, 1, 2, HALF), *CUT[1:]),
    "cut coarser than fits": (BlockPart(Part.K, 0, 4, 2 * MAX_BLOCK_BYTES), *CUT[2:]),
    "ranges that overlap": (CUT[0], BlockPart(Part.K, 1, 3, MAX_BLOCK_BYTES), *CUT[2:]),
    "a gap between ranges": (CUT[0], BlockPart(Part.K, 3, 4, HALF), *CUT[2:]),
    "K twice and no V": (*CUT[:2], *CUT[:2]),
    "K and V together": (BlockPart(Part.KV, 0, 4, 4 * MAX_BLOCK_BYTES),),
    "another size": (replace(CUT[0], size=CUT[0].size - 1), *CUT[1:]),
    "heads beyond the last": (*CUT, BlockPart(Part.V, 4, 5, HALF)),
}


@pytest.mark.parametrize("name", WRONG_CUTS)
def test_wrong_cut(name: str) -> None:
    with pytest.raises(ManifestError, match="layer 0 do not cover it exactly"):
        wide(WRONG_CUTS[name]).check(WIDE, Dtype.FP32)


def test_another_dtype_of_the_same_size() -> None:
    with pytest.raises(ManifestError, match="bf16"):
        samples.segment().check(samples.LAYERS, Dtype.FP16)


def test_another_number_of_layers() -> None:
    for layers in (samples.LAYERS[:1], samples.LAYERS * 2, ()):
        with pytest.raises(ManifestError, match="2 layers"):
            samples.segment().check(layers, samples.DTYPE)


def test_another_number_of_tokens_than_the_blocks_hold() -> None:
    with pytest.raises(ManifestError, match="cover"):
        samples.segment(end=2).check(samples.LAYERS, samples.DTYPE)


def test_another_geometry_with_as_many_bytes() -> None:
    swapped = (LayerGeometry(LayerKind.FULL, 1, 4, 2), samples.LAYERS[1])
    with pytest.raises(ManifestError, match="layer 0"):
        samples.segment().check(swapped, samples.DTYPE)
