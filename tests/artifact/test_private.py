"""Private artifacts: what is sealed opens for its reader, in its own place, and tells nobody else anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from p2pkv.artifact.build import ModelDescription, split_layer
from p2pkv.artifact.private import SegmentCipher, open_segment_keys, seal_segment_keys
from p2pkv.artifact.read import Artifact
from p2pkv.errors import GrantMissingError, IntegrityError, ManifestError
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.sealing import SEAL_BYTES, seal, unseal
from p2pkv.formats.segment import BlockRef
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.limits import MAX_BLOCK_BYTES, MAX_CODED_BLOCK_BYTES, MAX_INLINE_TOKEN_BYTES
from p2pkv.routing.boundaries import announce_keys
from tests.support.artifacts import model
from tests.support.private import ARTIFACT_KEY, NAMESPACE, PrivateSample, find_secrets, make_private, secrets_of

TOKENS = list(range(70_000, 70_600))
WIDE = replace(model(), layers=(LayerGeometry(LayerKind.FULL, kv_heads=4, k_dim=512, v_dim=512),) * 2)
"""Its layers are cut into K and V, and these into ranges of heads in fp32."""
KEYS = st.binary(min_size=32, max_size=32)


@pytest.fixture(scope="module")
def sample() -> PrivateSample:
    return make_private(TOKENS)


def decoded(artifact: Artifact, sample: PrivateSample, index: int, layer: int, ref: BlockRef) -> bytes:
    return bytes(artifact.decode_block(index, layer, ref, memoryview(sample.blocks[ref.cid])))


@pytest.mark.parametrize(("description", "count"), [(model(), 600), (replace(WIDE, dtype=Dtype.FP32), 256)])
def test_a_reader_gets_the_values_that_were_sealed(description: ModelDescription, count: int) -> None:
    sample = make_private(TOKENS[:count], description=description)
    artifact = sample.open(ARTIFACT_KEY)
    assert artifact.readable
    assert artifact.token_ids == tuple(TOKENS[:count])
    for index in range(len(sample.manifest.segments)):
        segment = artifact.open_segment(index, sample.blocks[sample.manifest.segments[index]])
        for layer, refs in enumerate(segment.layers):
            plain = memoryview(sample.layers[index][layer])
            parts = split_layer(plain, sample.manifest.layers[layer], segment.tokens, segment.dtype)
            for ref, (part, payload) in zip(refs, parts, strict=True):
                assert (ref.part, ref.size) == (part, part.size + SEAL_BYTES)
                assert decoded(artifact, sample, index, layer, ref) == payload


def test_the_token_ids_of_a_long_text_lie_in_a_sealed_block() -> None:
    count = MAX_INLINE_TOKEN_BYTES // 4 + 1
    small = replace(model(layers=1), layers=(LayerGeometry(LayerKind.FULL, kv_heads=1, k_dim=1, v_dim=1),))
    sample = make_private([5] * count, description=small)
    assert sample.manifest.tokens.inline is None
    assert sample.manifest.tokens.cid is not None
    assert len(sample.blocks[sample.manifest.tokens.cid]) == sample.manifest.token_bytes == 4 * count + SEAL_BYTES
    assert sample.open(ARTIFACT_KEY).token_ids == (5,) * count
    with pytest.raises(ManifestError, match="token ids"):
        replace(sample, blocks={**sample.blocks, sample.manifest.tokens.cid: b"short"}).open()


def test_whoever_lacks_the_key_stores_it_and_learns_nothing(sample: PrivateSample) -> None:
    artifact = sample.open()
    assert not artifact.readable
    assert (artifact.token_ids, set(artifact.chain_keys)) == ((), {b""})
    assert artifact.usable_prefix(TOKENS, None) == 0
    for index, node in enumerate(sample.manifest.segments):
        segment = artifact.open_segment(index, sample.blocks[node])
        with pytest.raises(GrantMissingError):
            decoded(artifact, sample, index, 0, segment.layers[0][0])
    everything = b"".join(sample.blocks.values())
    values = [data for layers in sample.layers for data in layers]
    known = list(secrets_of(sample.privacy, model().model_id, TOKENS, values))
    assert find_secrets(everything, known) == []
    assert find_secrets(everything + known[0][1], known) == [known[0][0]]
    assert NAMESPACE.hex() not in repr(sample.privacy) + repr(sample.open(ARTIFACT_KEY))
    assert str(sample.open(ARTIFACT_KEY).ciphers[0].key) not in repr(sample.open(ARTIFACT_KEY))


def test_it_is_announced_by_its_manifest_alone(sample: PrivateSample) -> None:
    artifact = sample.open()
    assert announce_keys(sample.cid, len(TOKENS), artifact.chain_keys) == [sample.cid.multihash]


def test_artifacts_of_a_namespace_share_a_prefix_and_no_others_do(sample: PrivateSample) -> None:
    longer = make_private([*TOKENS[:512], *range(100)], artifact_key=bytes(32))
    assert longer.manifest.segments[:2] == sample.manifest.segments[:2]
    assert longer.manifest.segments[2] != sample.manifest.segments[2]
    assert longer.manifest.segment_keys != sample.manifest.segment_keys
    elsewhere = make_private(TOKENS, namespace=bytes(32))
    assert not sample.blocks.keys() & elsewhere.blocks.keys()


def swapped(sample: PrivateSample, one: tuple[int, int, int], other: tuple[int, int, int]) -> PrivateSample:
    """Return the artifact with CID and digest of two blocks exchanged; a place is (segment, layer, number in the layer)."""
    segments = [sample.segment(index) for index in range(len(sample.manifest.segments))]
    tables = [[list(layer) for layer in segment.layers] for segment in segments]
    a, b = (tables[i][layer][n] for i, layer, n in (one, other))
    tables[one[0]][one[1]][one[2]] = replace(a, cid=b.cid, digest=b.digest)
    tables[other[0]][other[1]][other[2]] = replace(b, cid=a.cid, digest=a.digest)
    return sample.with_segments(
        [
            replace(segment, layers=tuple(tuple(layer) for layer in table))
            for segment, table in zip(segments, tables, strict=True)
        ]
    )


@pytest.mark.parametrize("keep_digest", [False, True])
@pytest.mark.parametrize("description", [model(), replace(WIDE, dtype=Dtype.FP32)], ids=["whole layers", "K, V, heads"])
def test_no_two_blocks_can_be_exchanged(description: ModelDescription, keep_digest: bool) -> None:
    sample = make_private(TOKENS[:512], description=description)
    places = [
        (index, layer, number)
        for index in range(2)
        for layer, refs in enumerate(sample.segment(index).layers)
        for number in range(len(refs))
    ]
    assert len(places) >= 4
    for one, other in combinations(places, 2):
        forged = swapped(sample, one, other)
        artifact = forged.open(ARTIFACT_KEY)
        for index, layer, number in (one, other):
            ref = artifact.open_segment(index, forged.blocks[forged.manifest.segments[index]]).layers[layer][number]
            if keep_digest:
                ref = replace(ref, digest=sample.segment(index).layers[layer][number].digest)
            with pytest.raises(IntegrityError):
                decoded(artifact, forged, index, layer, ref)


def test_segment_keys_are_as_many_as_segments() -> None:
    ciphers = [SegmentCipher(bytes([n]) * 32) for n in range(2)]
    sealed = seal_segment_keys(ARTIFACT_KEY, ciphers)
    assert open_segment_keys(ARTIFACT_KEY, sealed, 2) == tuple(ciphers)
    with pytest.raises(ManifestError, match="another number"):
        open_segment_keys(ARTIFACT_KEY, sealed, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_keys": bytes(3 * 32)},
        {"segment_keys": bytes(2 * 32 + SEAL_BYTES)},
        {"segment_keys": None},
        {"aliases": {"vllm": b"\x01"}},
    ],
)
def test_a_manifest_that_is_half_private_is_refused(sample: PrivateSample, changes: dict[str, object]) -> None:
    with pytest.raises(ManifestError):
        Manifest.decode(replace(sample.manifest, **changes).encode())  # type: ignore[arg-type]  # of many types
    assert Manifest.decode(sample.manifest.encode()) == sample.manifest


def test_a_sealed_block_of_the_largest_size_fits() -> None:
    assert MAX_BLOCK_BYTES + SEAL_BYTES <= MAX_CODED_BLOCK_BYTES


@given(key=KEYS, label=st.binary(max_size=40), content=st.binary(max_size=300))
def test_sealed_bytes_are_opened_and_follow_from_their_content(key: bytes, label: bytes, content: bytes) -> None:
    sealed = seal(key, label, content)
    assert len(sealed) == len(content) + SEAL_BYTES
    assert unseal(key, label, sealed) == content
    assert seal(key, label, memoryview(content)) == sealed


@given(key=KEYS, label=st.binary(max_size=40), content=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_change_is_refused(key: bytes, label: bytes, content: bytes, data: st.DataObject) -> None:
    sealed = seal(key, label, content)
    at = data.draw(st.integers(0, len(sealed) - 1))
    flipped = bytearray(sealed)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    other_key = bytes([key[0] ^ 1, *key[1:]])
    refused = partial(pytest.raises, IntegrityError)
    with refused():
        unseal(key, label, bytes(flipped))
    with refused():
        unseal(other_key, label, sealed)
    with refused():
        unseal(key, label + b"x", sealed)
    for length in (0, at, len(sealed) - 1):
        with refused():
            unseal(key, label, sealed[:length])
    with refused():
        unseal(key, label, sealed + b"\0")


@given(key=KEYS, label=st.binary(max_size=8), one=st.binary(max_size=64), other=st.binary(max_size=64), more=KEYS)
def test_no_nonce_meets_two_contents(key: bytes, label: bytes, one: bytes, other: bytes, more: bytes) -> None:
    nonces = {seal(k, lab, content)[:24] for k in {key, more} for lab in {label, label + b"x"} for content in {one, other}}
    assert len(nonces) == len({key, more}) * 2 * len({one, other})


@given(garbage=st.binary(max_size=200))
def test_garbage_does_not_open(garbage: bytes) -> None:
    with pytest.raises(IntegrityError):
        unseal(bytes(32), b"", garbage)
