"""Artifacts: what is built is read back, and every claim that does not hold is refused by its own error."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv import keys
from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms, split_layer
from p2pkv.artifact.read import Artifact, decode_block, open_artifact, open_manifest
from p2pkv.codecs import BlockCodec
from p2pkv.errors import (
    CacheMismatchError,
    FormatError,
    IntegrityError,
    ManifestError,
    P2pkvError,
    SignatureError,
    UsageError,
)
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.segment import Segment
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, Part, layer_bytes
from p2pkv.limits import MAX_BLOCK_BYTES, MAX_INLINE_TOKEN_BYTES, SEGMENT_TOKENS
from tests.artifact.pieces import NODE, block_ref, tokens_of
from tests.support import samples
from tests.support.artifacts import NOW, Sample, make_sample, model
from tests.support.strategies import dtypes, segment_lengths

TOKENS = list(range(1000, 1600))
TERMS = Terms(samples.PUBLISHER, sequence=1, created=NOW)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(TOKENS)


class Written(dict[Cid, bytes]):
    """What a builder wrote."""

    def write(self, cid: Cid, data: bytes | bytearray | memoryview) -> None:
        self[cid] = bytes(data)


def random_layers(description: ModelDescription, tokens: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(layer_bytes(layer, tokens, description.dtype)) for layer in description.layers]


def build(
    token_ids: Sequence[int], description: ModelDescription | None = None, **options: Any
) -> tuple[ArtifactBuilder, Written]:
    description = description or model()
    written = Written()
    builder = ArtifactBuilder(description, token_ids, written.write, **options)
    for index, (start, end) in enumerate(pairwise(keys.segment_bounds(len(token_ids)))):
        builder.add_segment(random_layers(description, end - start, seed=index))
    return builder, written


# --- building ------------------------------------------------------------------------------------------------------------


def test_an_artifact_is_built_and_read_back() -> None:
    builder, written = build(TOKENS)
    manifest = builder.finish(TERMS, {"torch": "2.0"})
    artifact = open_manifest(Cid.of_node(b""), manifest)
    assert artifact.token_ids == tuple(TOKENS)
    assert artifact.chain_keys == tuple(keys.chain(model().model_id, TOKENS))
    assert (manifest.last_chain_key, manifest.tokens.count, manifest.producer) == (
        artifact.chain_keys[-1],
        600,
        {"torch": "2.0"},
    )
    bounds = keys.segment_bounds(600)
    for index, node in enumerate(manifest.segments):
        segment = artifact.open_segment(index, written[node])
        assert segment == builder.segments[index]
        expected = random_layers(model(), bounds[index + 1] - bounds[index], seed=index)
        for blocks, data in zip(segment.layers, expected, strict=True):
            decoded = [decode_block(ref, manifest.codec, memoryview(written[ref.cid])) for ref in blocks]
            assert b"".join(decoded) == data


def test_the_sample_of_the_golden_vectors_is_built_byte_for_byte() -> None:
    description = ModelDescription(samples.MODEL_ID, "tiny", samples.LAYERS, samples.DTYPE)
    written = Written()
    builder = ArtifactBuilder(description, samples.TOKEN_IDS, written.write)
    builder.add_segment(samples.BLOCKS)
    terms = Terms(samples.PUBLISHER, 1, samples.CREATED, samples.EXPIRES, "CC0-1.0")
    manifest = replace(builder.finish(terms, {"torch": "2.0"}), aliases={"vllm": b"\x01\x02"})
    assert manifest == samples.manifest()
    assert set(written) == {*map(Cid.of_block, samples.BLOCKS), *manifest.segments}


def test_the_builder_names_everything_it_wrote_once() -> None:
    zeros = [bytes(layer_bytes(layer, SEGMENT_TOKENS, Dtype.BF16)) for layer in model().layers]
    written = Written()
    builder = ArtifactBuilder(model(), list(range(2 * SEGMENT_TOKENS)), written.write)
    for _ in range(2):
        builder.add_segment(zeros)  # all four blocks are the same
    builder.finish(TERMS, {})
    cids = list(builder.cids)
    assert len(cids) == len(set(cids)) == 3
    assert set(cids) == set(written)


def test_equal_input_gives_equal_bytes_whatever_buffer_it_comes_in() -> None:
    layers = random_layers(model(), 5)
    forms: list[Callable[[bytes], Any]] = [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("H")]
    nodes = set()
    for form in forms:
        builder = ArtifactBuilder(model(), range(5), Written().write)
        nodes.add(builder.add_segment([form(data) for data in layers]).encode())
    assert len(nodes) == 1


def test_long_token_ids_leave_the_manifest_for_a_block() -> None:
    count = MAX_INLINE_TOKEN_BYTES // 4 + 1
    small = ModelDescription(b"\x01" * 32, "small", (LayerGeometry(LayerKind.FULL, 1, 1, 1),), Dtype.BF16)
    builder, written = build(list(range(count)), small)
    manifest = builder.finish(TERMS, {})
    assert manifest.tokens.inline is None
    assert manifest.tokens.cid is not None
    assert manifest.tokens.cid in set(builder.cids)
    block = written[manifest.tokens.cid]
    assert open_manifest(Cid.of_node(b""), manifest, block).token_ids == tuple(range(count))
    with pytest.raises(ManifestError, match="does not tell"):
        open_manifest(Cid.of_node(b""), manifest)
    for wrong in (block[:-4], block[:-1], block + b"\0\0\0\0", bytes((block[0] ^ 1,)) + block[1:]):
        with pytest.raises(ManifestError, match="token ids"):
            open_manifest(Cid.of_node(b""), manifest, wrong)
    shorter, _ = build(list(range(count - 1)), small)
    assert shorter.finish(TERMS, {}).tokens.inline is not None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda good: good[:1], "1 layers given"),
        (lambda good: [*good, good[0]], "3 layers given"),
        (lambda good: [good[0], good[1][:-1]], "expected"),
        (lambda good: [good[0], good[1] + b"\0"], "expected"),
        (lambda good: [good[0], b""], "expected"),
    ],
)
def test_layers_that_do_not_fit_the_model_are_refused(layers: Callable[[list[bytes]], list[bytes]], message: str) -> None:
    builder = ArtifactBuilder(model(), range(5), Written().write)
    with pytest.raises(CacheMismatchError, match=message):
        builder.add_segment(layers(random_layers(model(), 5)))
    assert builder.segments == ()


def test_a_manifest_needs_all_segments_and_takes_no_more() -> None:
    builder = ArtifactBuilder(model(), range(SEGMENT_TOKENS + 5), Written().write)
    builder.add_segment(random_layers(model(), SEGMENT_TOKENS))
    with pytest.raises(CacheMismatchError, match="1 of 2"):
        builder.finish(TERMS, {})
    builder.add_segment(random_layers(model(), 5))
    with pytest.raises(CacheMismatchError, match="all 2 segments"):
        builder.add_segment(random_layers(model(), 5))
    builder.finish(TERMS, {})


@pytest.mark.parametrize("token_ids", [[], [-1], [2**32], ["1"]])
def test_what_is_no_token_sequence_is_refused(token_ids: list[Any]) -> None:
    with pytest.raises(UsageError):
        ArtifactBuilder(model(), token_ids, Written().write)


def test_another_codec_is_named_in_manifest_and_nodes_and_its_output_is_what_travels() -> None:
    inverse = BlockCodec(
        "inverse",
        lambda data: bytes(255 - byte for byte in data),
        lambda data, size: memoryview(bytes(255 - byte for byte in data)),
    )
    builder, written = build(range(5), codec=inverse)
    manifest = builder.finish(TERMS, {})
    assert manifest.codec == builder.segments[0].codec == "inverse"
    ref = builder.segments[0].layers[0][0]
    payload = bytes(255 - byte for byte in written[ref.cid])
    assert ref.digest == digest(payload)
    assert payload == random_layers(model(), 5)[0]


# --- the cut of a layer --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), segment_lengths, dtypes)
def test_a_layer_is_cut_into_blocks_that_make_it_up(heads: int, k_dim: int, v_dim: int, tokens: int, dtype: Dtype) -> None:
    geometry = LayerGeometry(LayerKind.FULL, heads, k_dim, v_dim)
    data = random.Random(0).randbytes(layer_bytes(geometry, tokens, dtype))
    parts = list(split_layer(memoryview(data), geometry, tokens, dtype))
    assert b"".join(payload for _, payload in parts) == data
    assert all(len(payload) == part.size for part, payload in parts)


def test_a_large_layer_is_cut_by_part_and_head_without_copies() -> None:
    geometry = LayerGeometry(LayerKind.FULL, 9, 128, 64)
    data = bytearray(random.Random(0).randbytes(layer_bytes(geometry, 256, Dtype.FP32)))
    parts = list(split_layer(memoryview(data), geometry, 256, Dtype.FP32))
    assert [(part.part, part.head_start, part.head_end) for part, _ in parts] == [
        (Part.K, 0, 8),
        (Part.K, 8, 9),
        (Part.V, 0, 9),
    ]
    assert b"".join(payload for _, payload in parts) == data
    assert all(len(payload) <= MAX_BLOCK_BYTES for _, payload in parts)
    data[0] ^= 1
    assert parts[0][1][0] == data[0]


# --- opening -------------------------------------------------------------------------------------------------------------


def test_opening_an_envelope(sample: Sample) -> None:
    artifact = open_artifact(sample.cid, sample.blocks[sample.cid])
    assert artifact == sample.artifact
    assert artifact.cid == sample.cid


def test_an_envelope_of_other_bytes_or_another_key_is_refused(sample: Sample) -> None:
    data = sample.blocks[sample.cid]
    flipped = data[:-1] + bytes((data[-1] ^ 1,))
    with pytest.raises(IntegrityError):
        open_artifact(sample.cid, flipped)
    with pytest.raises(SignatureError):
        open_artifact(Cid.of_node(flipped), flipped)
    other = replace(Envelope.decode(data), key=bytes(samples.OTHER_KEY.verify_key))
    with pytest.raises(SignatureError):
        open_artifact(other.cid, other.encode())


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_one_flipped_bit_of_an_envelope_is_never_taken(data: st.DataObject) -> None:
    envelope = bytearray(samples.envelope().encode())
    at = data.draw(st.integers(0, len(envelope) * 8 - 1))
    envelope[at // 8] ^= 1 << at % 8
    flipped = bytes(envelope)
    with pytest.raises((FormatError, SignatureError)):
        open_artifact(Cid.of_node(flipped), flipped)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"codec": "later"}, FormatError, "codec 'later' is unknown"),
        ({"tokens": tokens_of([1, 2, 3])}, ManifestError, "last chain key"),
        ({"tokens": tokens_of([1, 2, 70000], digest=bytes(32))}, ManifestError, "token ids"),
        ({"tokens": tokens_of([1, 2, 70000], count=4)}, ManifestError, "token ids"),
        ({"tokens": tokens_of([1, 2, 70000], inline=None)}, ManifestError, "does not tell"),
        ({"last_chain_key": bytes(32)}, ManifestError, "last chain key"),
        ({"model_id": bytes(32)}, ManifestError, "last chain key"),
        ({"segments": (NODE, NODE)}, ManifestError, "same node"),
    ],
)
def test_a_manifest_whose_claims_do_not_hold_is_refused(
    changes: dict[str, Any], error: type[P2pkvError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_manifest(samples.envelope().cid, samples.manifest(**changes))


def tiny_artifact(segment: Segment | None = None, **changes: Any) -> tuple[Artifact, bytes]:
    """The artifact of the vectors over ``segment``, and the segment's node."""
    node = (segment or samples.segment()).encode()
    manifest = samples.manifest(segments=(Cid.of_node(node),), **changes)
    return open_manifest(Cid.of_node(b""), manifest), node


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chain_key": bytes(32)}, "another text or model"),
        ({"start": 256, "end": 259}, "covers tokens 256 to 259"),
        ({"end": 2}, "covers tokens 0 to 2"),
        ({"codec": "later"}, "coded as 'later'"),
        ({"dtype": Dtype.FP16}, "fp16"),
        ({"layers": samples.segment().layers[:1]}, "1 layers"),
        ({"layers": samples.segment().layers[::-1]}, "layer 0"),
        ({"layers": ((block_ref(0), block_ref(0)), (block_ref(1),))}, "layer 0"),
        ({"layers": ((replace(block_ref(0), size=37),), (block_ref(1),))}, "not coded"),
        ({"layers": ((block_ref(0),), (replace(block_ref(1), digest=bytes(32)),))}, "not coded"),
    ],
)
def test_a_segment_that_does_not_fit_its_manifest_is_refused(changes: dict[str, Any], message: str) -> None:
    artifact, node = tiny_artifact(samples.segment(**changes))
    with pytest.raises(ManifestError, match=message):
        artifact.open_segment(0, node)


def test_a_node_of_other_bytes_is_refused_before_it_is_parsed() -> None:
    artifact, node = tiny_artifact()
    assert artifact.open_segment(0, node) == samples.segment()
    for wrong in (node[:-1], node + b"\0", bytes((node[0] ^ 1,)) + node[1:], b""):
        with pytest.raises(IntegrityError):
            artifact.open_segment(0, wrong)


def test_a_segment_of_another_place_is_refused(sample: Sample) -> None:
    nodes = [sample.blocks[cid] for cid in sample.artifact.manifest.segments]
    swapped = sample.artifact.manifest.segments[::-1]
    artifact = replace(sample.artifact, manifest=replace(sample.artifact.manifest, segments=swapped))
    with pytest.raises(ManifestError, match="covers tokens"):
        artifact.open_segment(0, nodes[2])
