"""Extraction and injection: equal bits on the good way, a refusal for each trap that transformers accepts in silence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from p2pkv.connectors.hf.cache import KVBuffer, check_cache, extract_layer, layer_tensors
from p2pkv.connectors.hf.geometry import ModelGeometry, geometry, open_cache, plain_layers
from p2pkv.connectors.hf.prefill import Step, canonical_steps, last_logits, prefill
from p2pkv.errors import CacheMismatchError, UsageError
from p2pkv.formats.tensors import BlockPart, Dtype, LayerGeometry, LayerKind, Part, layer_parts

Blocks = list[tuple[int, Step, bytes]]
SEGMENTS = [(0, 256), (256, 512)]


def prefilled(model: LlamaForCausalLM, token_ids: list[int], tokens: int) -> DynamicCache:
    cache = open_cache(model)
    prefill(model, token_ids[:tokens], cache, canonical_steps(tokens))
    return cache


def extract(cache: DynamicCache, steps: list[Step]) -> Blocks:
    return [(layer, step, bytes(extract_layer(cache, layer, *step))) for step in steps for layer in range(len(cache.layers))]


def filled(model: LlamaForCausalLM, blocks: Blocks, tokens: int) -> KVBuffer:
    buffer = KVBuffer.for_model(model, tokens)
    for layer, step, data in blocks:
        buffer.write_layer(layer, *step, data)
    return buffer


def same_bits(left: DynamicCache, right: DynamicCache) -> bool:
    pairs = zip(layer_tensors(left), layer_tensors(right), strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.fixture(scope="module")
def blocks(model: LlamaForCausalLM, token_ids: list[int]) -> Blocks:
    """The two whole segments of the text, extracted."""
    return extract(prefilled(model, token_ids, 512), SEGMENTS)


def test_injected_cache_gives_the_bits_of_local_prefill(model: LlamaForCausalLM, token_ids: list[int], blocks: Blocks) -> None:
    local = open_cache(model)
    expected = prefill(model, token_ids, local, canonical_steps(600))
    shuffled = random.Random(0).sample(blocks, len(blocks))
    injected = filled(model, shuffled, 512).to_cache(model)
    assert torch.equal(last_logits(model, token_ids, injected), expected)
    assert same_bits(injected, local)


def test_tail_and_shared_part(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    published = extract(prefilled(model, token_ids, 300), canonical_steps(300))
    local = open_cache(model)
    steps = canonical_steps(600, 0, 300)
    expected = prefill(model, token_ids, local, steps)
    injected = filled(model, published, 300).to_cache(model)
    assert torch.equal(prefill(model, token_ids, injected, canonical_steps(600, 300, 300)), expected)
    assert same_bits(injected, local)


def test_local_segments_mix_with_fetched_ones(model: LlamaForCausalLM, token_ids: list[int], blocks: Blocks) -> None:
    buffer = filled(model, [block for block in blocks if block[1] == (256, 512)], 512)
    assert buffer.filled_tokens == 0
    buffer.copy_from(prefilled(model, token_ids, 256), 0, 256)
    assert buffer.filled_tokens == 512
    assert same_bits(buffer.to_cache(model), prefilled(model, token_ids, 512))


def test_prefix_of_a_buffer_is_a_cache(model: LlamaForCausalLM, token_ids: list[int], blocks: Blocks) -> None:
    buffer = filled(model, [block for block in blocks if block[1] == (0, 256)], 512)
    with pytest.raises(CacheMismatchError, match="256 of 512"):
        buffer.to_cache(model)
    assert same_bits(buffer.to_cache(model, 256), prefilled(model, token_ids, 256))


def test_layout_is_heads_tokens_dim_little_endian(model: LlamaForCausalLM, blocks: Blocks, token_ids: list[int]) -> None:
    cache = prefilled(model, token_ids, 512)
    layer, (start, end), data = blocks[-1]
    size = model.dtype.itemsize
    for half, tensor in enumerate(layer_tensors(cache)[layer]):
        for head, token, dim in ((0, 0, 0), (1, 255, 31), (1, 7, 3)):
            at = size * (((half * 2 + head) * 256 + token) * 32 + dim)
            one = torch.frombuffer(bytearray(data[at : at + size]), dtype=model.dtype)
            assert torch.equal(one[0], tensor[0, head, start + token, dim])
    assert end == 512


def test_layer_split_over_blocks_comes_together_in_any_order() -> None:
    layer = LayerGeometry(LayerKind.FULL, 48, 64, 32)
    shape = ModelGeometry(Dtype.FP32, (layer,))
    parts = layer_parts(layer, 256, Dtype.FP32)
    assert {part.part for part in parts} == {Part.K, Part.V}
    keys, values = torch.randn(1, 48, 256, 64), torch.randn(1, 48, 256, 32)
    cache = DynamicCache()
    cache.update(keys, values, 0)
    data = extract_layer(cache, 0, 0, 256)
    buffer = KVBuffer(shape, 256)
    at, cut = 0, []
    for part in parts:
        cut.append((part, data[at : at + part.size]))
        at += part.size
    for part, piece in reversed(cut):
        assert buffer.filled_tokens == 0
        buffer.write(0, part, 0, 256, piece)
    assert buffer.filled_tokens == 256
    assert torch.equal(buffer._keys[0], keys)
    assert torch.equal(buffer._values[0], values)


def test_used_buffer_takes_nothing_more(model: LlamaForCausalLM, blocks: Blocks) -> None:
    buffer = filled(model, blocks, 512)
    buffer.to_cache(model)
    layer, step, data = blocks[0]
    with pytest.raises(CacheMismatchError, match="already"):
        buffer.write_layer(layer, *step, data)
    with pytest.raises(CacheMismatchError, match="already"):
        buffer.to_cache(model)


def test_buffer_of_another_dtype_is_refused(
    make_model: Callable[..., LlamaForCausalLM], model: LlamaForCausalLM, blocks: Blocks
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype != model.dtype:
            with pytest.raises(CacheMismatchError, match="dtype"):
                filled(model, blocks, 512).to_cache(make_model(dtype))


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"num_key_value_heads": 4}, {"head_dim": 16}])
def test_buffer_of_another_geometry_is_refused(
    make_model: Callable[..., LlamaForCausalLM], model: LlamaForCausalLM, blocks: Blocks, changes: dict[str, int]
) -> None:
    with pytest.raises(CacheMismatchError, match="geometry"):
        filled(model, blocks, 512).to_cache(make_model(model.dtype, **changes))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(model: LlamaForCausalLM, blocks: Blocks, value: float) -> None:
    layer, step, data = blocks[0]
    for at in (0, len(data) // model.dtype.itemsize - 1):
        values = torch.frombuffer(bytearray(data), dtype=model.dtype).clone()
        values[at] = value
        buffer = KVBuffer.for_model(model, 512)
        with pytest.raises(CacheMismatchError, match="NaN"):
            buffer.write_layer(layer, *step, values.view(torch.uint8).numpy().tobytes())


def test_blocks_without_a_place_are_refused(model: LlamaForCausalLM, blocks: Blocks) -> None:
    _, _, data = blocks[0]
    buffer = KVBuffer.for_model(model, 512)
    part = layer_parts(buffer.shape.layers[0], 256, buffer.shape.dtype)[0]
    for layer, start, end in ((4, 0, 256), (-1, 0, 256), (0, 1, 257), (0, 0, 255), (0, 512, 768), (0, -256, 0)):
        with pytest.raises(CacheMismatchError):
            buffer.write(layer, part, start, end, data)
    for wrong in (replace(part, head_end=1), replace(part, part=Part.K), BlockPart(Part.KV, 0, 2, part.size - 1)):
        with pytest.raises(CacheMismatchError, match="cut"):
            buffer.write(0, wrong, 0, 256, data)
    with pytest.raises(CacheMismatchError, match="bytes"):
        buffer.write(0, part, 0, 256, data[:-1])
    with pytest.raises(CacheMismatchError, match="bytes"):
        buffer.write_layer(0, 0, 256, data[:-1])
    with pytest.raises(UsageError):
        KVBuffer.for_model(model, 0)


Spoil = Callable[[DynamicCache], object]


def shorten(layer: int, half: str) -> Spoil:
    def spoil(cache: DynamicCache) -> None:
        setattr(cache.layers[layer], half, getattr(cache.layers[layer], half)[:, :, :-1])

    return spoil


def change(layer: int, new: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(cache: DynamicCache) -> None:
        keys, values = layer_tensors(cache)[layer]
        plain = plain_layers(cache)[layer]
        plain.keys, plain.values = new(keys), new(values)

    return spoil


def slide(cache: DynamicCache) -> None:
    layer = DynamicSlidingWindowLayer(sliding_window=1024)
    layer.update(*layer_tensors(cache)[1])
    cache.layers[1] = layer


def empty(cache: DynamicCache) -> None:
    cache.layers[1] = DynamicLayer()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(shorten(0, "keys"), id="first layer's keys one short"),
        pytest.param(shorten(3, "values"), id="last layer's values one short"),
        pytest.param(change(3, lambda t: t.to(torch.float16)), id="fp16"),
        pytest.param(change(3, lambda t: t.to(torch.float64)), id="fp64"),
        pytest.param(change(2, lambda t: t[:, :1]), id="one head"),
        pytest.param(change(2, lambda t: t[..., :16]), id="half the dimension"),
        pytest.param(change(2, lambda t: t.repeat(2, 1, 1, 1)), id="batch of two"),
        pytest.param(change(2, lambda t: t.transpose(1, 2)), id="tokens and heads swapped"),
        pytest.param(change(2, lambda t: t[:, :, :0]), id="empty layer"),
        pytest.param(lambda cache: cache.layers.pop(), id="layer missing"),
        pytest.param(lambda cache: cache.layers.append(cache.layers[0]), id="layer too many"),
        pytest.param(slide, id="sliding layer"),
        pytest.param(empty, id="layer without keys"),
    ],
)
def test_cache_that_does_not_fit_is_refused(model: LlamaForCausalLM, token_ids: list[int], spoil: Spoil) -> None:
    cache = prefilled(model, token_ids, 64)
    check_cache(cache, geometry(model), 64)
    spoil(cache)
    with pytest.raises(CacheMismatchError):
        check_cache(cache, geometry(model), 64)
    with pytest.raises(CacheMismatchError):
        prefill(model, token_ids[:70], cache, [(64, 70)])


def test_swapped_layers_change_the_answer(model: LlamaForCausalLM, token_ids: list[int], blocks: Blocks) -> None:
    """No check of shapes can see it: which block is which layer's is what the signed manifest says."""
    expected = prefill(model, token_ids, open_cache(model), canonical_steps(600))
    swapped = [({0: 1, 1: 0}.get(layer, layer), step, data) for layer, step, data in blocks]
    assert not torch.equal(last_logits(model, token_ids, filled(model, swapped, 512).to_cache(model)), expected)


@pytest.mark.parametrize(("layer", "start", "end"), [(4, 0, 10), (-1, 0, 10), (0, 0, 65), (0, 10, 10), (0, -5, 10)])
def test_extraction_beyond_the_cache_is_refused(
    model: LlamaForCausalLM, token_ids: list[int], layer: int, start: int, end: int
) -> None:
    cache = prefilled(model, token_ids, 64)
    with pytest.raises(CacheMismatchError):
        extract_layer(cache, layer, start, end)


def test_copy_from_a_shorter_cache_is_refused(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    with pytest.raises(CacheMismatchError, match="holds 64"):
        KVBuffer.for_model(model, 512).copy_from(prefilled(model, token_ids, 64), 0, 256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_injection_on_a_cuda_device(make_model: Callable[..., LlamaForCausalLM], token_ids: list[int]) -> None:
    model = make_model(torch.bfloat16)
    model.to("cuda")  # type: ignore[arg-type]  # transformers wraps `to` and loses its self
    local = open_cache(model)
    expected = prefill(model, token_ids, local, canonical_steps(600))
    buffer = filled(model, extract(prefilled(model, token_ids, 512), SEGMENTS), 512)
    injected = buffer.to_cache(model)
    assert layer_tensors(injected)[0][0].device.type == "cuda"
    assert torch.equal(last_logits(model, token_ids, injected), expected)
    assert same_bits(injected, local)
