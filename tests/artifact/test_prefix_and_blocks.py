"""How far an artifact helps a prompt, and what is checked of a block before it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from p2pkv import keys
from p2pkv.artifact.match import Match, bitmap
from p2pkv.artifact.read import Artifact, check_model, decode_block
from p2pkv.codecs import RAW, codec_named
from p2pkv.errors import (
    FormatError,
    IntegrityError,
    WrongDtypeError,
    WrongModelError,
)
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.tensors import Dtype
from tests.artifact.pieces import NODE, block_ref, tokens_of
from tests.support import samples

# --- how far it helps ----------------------------------------------------------------------------------------------------


def artifact_of(count: int) -> Artifact:
    """The tokens 0, 1, 2, ... and no blocks."""
    manifest = samples.manifest(tokens=tokens_of(list(range(count))))
    return Artifact(NODE, manifest, tuple(range(count)), ())


@given(st.integers(0, 700), st.integers(0, 700), st.integers(0, 700))
def test_the_common_prefix(own: int, same: int, other: int) -> None:
    prompt = [*range(same), *([-1] * other)]
    assert artifact_of(own).common_prefix(prompt) == min(own, same)


@pytest.mark.parametrize(
    ("own", "prompt", "shared", "usable"),
    [
        (600, 700, None, 600),  # the prompt goes on where the artifact ends
        (600, 700, 600, 600),
        (600, 700, 650, 512),  # the shared part is longer: its steps are cut elsewhere
        (600, 700, 550, 512),
        (600, 700, 100, 0),
        (600, 600, None, 512),  # the last step is always computed
        (600, 500, None, 256),
        (512, 512, None, 256),
        (512, 513, None, 512),
        (512, 512, 512, 256),
        (100, 200, None, 100),
        (100, 100, None, 0),
        (100, 50, None, 0),
        (600, 0, None, 0),
    ],
)
def test_the_usable_prefix_ends_where_a_canonical_step_of_the_prompt_ends(
    own: int, prompt: int, shared: int | None, usable: int
) -> None:
    assert artifact_of(own).usable_prefix(list(range(prompt)), shared) == usable


def test_the_usable_prefix_of_a_prompt_that_leaves_the_artifact() -> None:
    assert artifact_of(900).usable_prefix([*range(700), -1, -1], None) == 512
    assert artifact_of(900).usable_prefix([-1, *range(700)], None) == 0


@given(st.integers(1, 2000), st.data())
def test_segments_for_tokens(count: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, count))
    bounds = keys.segment_bounds(count)
    segments = artifact_of(count).segments_for(tokens)
    assert bounds[segments] >= tokens
    assert segments == 0 or bounds[segments - 1] < tokens


# --- blocks and models ---------------------------------------------------------------------------------------------------


def test_a_block_of_another_size_is_refused() -> None:
    ref, block = block_ref(), samples.BLOCKS[0]
    assert decode_block(ref, "raw", memoryview(block)) == block
    for wrong in (block[:-1], block + b"\0", b""):
        with pytest.raises(IntegrityError, match="bytes"):
            decode_block(ref, "raw", memoryview(wrong))
    with pytest.raises(IntegrityError, match="declares"):
        decode_block(replace(ref, part=replace(ref.part, size=ref.size + 1)), "raw", memoryview(block))


def test_decoded_bytes_that_the_publisher_did_not_hash_are_refused() -> None:
    block = samples.BLOCKS[0]
    sha = Cid(Codec.RAW, HashFunction.SHA2_256, bytes(32))
    assert decode_block(block_ref(cid=sha), "raw", memoryview(block)) == block
    for ref in (block_ref(digest=bytes(32)), block_ref(cid=sha, digest=bytes(32))):
        with pytest.raises(IntegrityError, match="decodes to other bytes"):
            decode_block(ref, "raw", memoryview(block))


def test_an_unknown_codec_is_refused_with_advice() -> None:
    with pytest.raises(FormatError, match=r"'brotli' is unknown.*Known codecs: raw"):
        decode_block(block_ref(), "brotli", memoryview(samples.BLOCKS[0]))
    assert codec_named("raw") is RAW


def test_the_model_and_its_dtype_are_checked_apart() -> None:
    manifest: Manifest = samples.manifest()
    check_model(manifest, samples.MODEL_ID, Dtype.BF16)
    with pytest.raises(WrongDtypeError, match=r"bf16.*fp32"):
        check_model(manifest, samples.MODEL_ID, Dtype.FP32)
    with pytest.raises(WrongModelError, match="tiny"):
        check_model(manifest, bytes(32), Dtype.BF16)


@given(st.integers(1, 100), st.data())
def test_the_bitmap_of_held_segments(segments: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, segments - 1)))
    match = Match(NODE, 1, segments, bitmap(held, segments))
    assert {index for index in range(segments) if match.holds(index)} == held
    assert len(match.held) == -(-segments // 8)
