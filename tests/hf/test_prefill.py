"""Canonical steps, and the prefill that computes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from transformers import LlamaForCausalLM

from p2pkv.connectors.hf.geometry import geometry, open_cache
from p2pkv.connectors.hf.prefill import canonical_steps, last_logits, prefill
from p2pkv.connectors.hf.stack import producer_stack
from p2pkv.connectors.hf.versions import cache_argument, check_version
from p2pkv.errors import CacheMismatchError, MachineError, ModelUnsupportedError, UsageError
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind


@pytest.mark.parametrize(
    ("count", "start", "shared", "expected"),
    [
        (100, 0, None, [(0, 100)]),
        (256, 0, None, [(0, 256)]),
        (600, 0, None, [(0, 256), (256, 512), (512, 600)]),
        (600, 512, None, [(512, 600)]),
        (600, 0, 300, [(0, 256), (256, 300), (300, 556), (556, 600)]),
        (600, 300, 300, [(300, 556), (556, 600)]),
        (600, 256, 512, [(256, 512), (512, 600)]),
        (300, 0, 300, [(0, 256), (256, 300)]),
        (300, 300, 300, []),
        (10, 0, 0, [(0, 10)]),
    ],
)
def test_steps(count: int, start: int, shared: int | None, expected: list[tuple[int, int]]) -> None:
    assert canonical_steps(count, start, shared) == expected


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_steps_cover_the_text_once_and_meet_the_end_of_the_shared_part(count: int, shared: int) -> None:
    shared = min(shared, count)
    steps = canonical_steps(count, 0, shared)
    assert steps[0][0] == 0
    assert steps[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(steps))
    assert all(1 <= end - start <= 256 for start, end in steps)
    assert shared in {0, *(end for _, end in steps)}
    # what a publisher of the shared part alone computes is what everybody else computes of it
    assert canonical_steps(shared) == [step for step in steps if step[1] <= shared] if shared else True


@pytest.mark.parametrize(
    ("count", "start", "shared"), [(600, 300, None), (600, 0, 601), (600, 0, -1), (600, 601, None), (2**20, 0, None)]
)
def test_steps_that_would_give_other_bits_are_refused(count: int, start: int, shared: int | None) -> None:
    with pytest.raises(UsageError):
        canonical_steps(count, start, shared)


def test_prefill_equals_one_forward_pass(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    cache = open_cache(model)
    logits = prefill(model, token_ids, cache, canonical_steps(600), lambda start, end: seen.append((start, end)))
    with torch.no_grad():
        whole = model(torch.tensor([token_ids])).logits[0, -1]
    assert logits.shape == (512,)
    assert seen == canonical_steps(600)
    assert cache.get_seq_length() == 600
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-3 if model.dtype == torch.float32 else 1.5)


def test_last_step_by_generate_has_the_same_bits(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    steps = canonical_steps(600)
    expected = prefill(model, token_ids, open_cache(model), steps)
    cache = open_cache(model)
    prefill(model, token_ids, cache, steps[:-1])
    output = model.generate(
        torch.tensor([token_ids]),
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_argument(model): cache},
    )
    assert torch.equal(output.logits[0][0], expected.float())


def test_last_logits_computes_the_rest(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    steps = canonical_steps(600)
    cache = open_cache(model)
    prefill(model, token_ids, cache, steps[:-1])
    assert torch.equal(last_logits(model, token_ids, cache), prefill(model, token_ids, open_cache(model), steps))
    with pytest.raises(UsageError):  # the cache is as long as the text: no logits are left to compute
        last_logits(model, token_ids, cache)


def test_exception_from_on_step_leaves_whole_steps(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    def stop(_start: int, end: int) -> None:
        if end == 512:
            raise KeyboardInterrupt

    cache = open_cache(model)
    with pytest.raises(KeyboardInterrupt):
        prefill(model, token_ids, cache, canonical_steps(600), stop)
    assert cache.get_seq_length() == 512
    expected = prefill(model, token_ids, open_cache(model), canonical_steps(600))
    assert torch.equal(prefill(model, token_ids, cache, canonical_steps(600, 512)), expected)


def test_cache_of_another_length_is_refused(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    cache = open_cache(model)
    prefill(model, token_ids, cache, [(0, 255)])
    with pytest.raises(CacheMismatchError, match="layer 0"):
        prefill(model, token_ids, cache, canonical_steps(600, 256))


@pytest.mark.parametrize("steps", [[], [(0, 256), (300, 600)], [(0, 601)], [(10, 10)], [(-1, 5)]])
def test_impossible_steps_are_refused(
    make_model: Callable[..., LlamaForCausalLM], token_ids: list[int], steps: list[tuple[int, int]]
) -> None:
    model = make_model()
    with pytest.raises(UsageError):
        prefill(model, token_ids, open_cache(model), steps)


def test_modes_that_change_values_are_refused(make_model: Callable[..., LlamaForCausalLM]) -> None:
    model = make_model()
    with pytest.raises(UsageError, match="512"):
        prefill(model, [1, 512], open_cache(model), [(0, 2)])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="autocast"):
        prefill(model, [1, 2], open_cache(model), [(0, 2)])
    model.train()
    with pytest.raises(UsageError, match="training"):
        prefill(model, [1, 2], open_cache(model), [(0, 2)])


def test_geometry_is_the_models(make_model: Callable[..., LlamaForCausalLM]) -> None:
    shape = geometry(make_model(torch.bfloat16))
    assert shape.dtype is Dtype.BF16
    assert shape.layers == (LayerGeometry(LayerKind.FULL, 2, 32, 32),) * 4
    assert shape.bytes_of(256) == 4 * 2 * 2 * 256 * 32 * 2


def test_geometry_follows_the_dtype(make_model: Callable[..., LlamaForCausalLM]) -> None:
    model = make_model()
    assert geometry(model).dtype is Dtype.FP32
    model.to(torch.float16)  # type: ignore[arg-type]  # transformers wraps `to` and loses its self
    assert geometry(model).dtype is Dtype.FP16
    model.to(torch.float64)  # type: ignore[arg-type]  # transformers wraps `to` and loses its self
    with pytest.raises(ModelUnsupportedError, match="float64"):
        geometry(model)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sliding_attention", "DynamicSlidingWindowLayer"), ("linear_attention", "LinearAttentionLayer")],
)
def test_unknown_layer_kind_is_refused_by_name(make_model: Callable[..., LlamaForCausalLM], kind: str, name: str) -> None:
    model = make_model()
    model.config.sliding_window = 16
    model.config.layer_types = ["full_attention", kind, "full_attention", "full_attention"]
    with pytest.raises(ModelUnsupportedError, match=f"layer 1 is a {name}"):
        geometry(model)


def test_headless_model_is_refused(make_model: Callable[..., LlamaForCausalLM]) -> None:
    with pytest.raises(ModelUnsupportedError, match="LlamaModel"):
        geometry(make_model().model)


@pytest.mark.parametrize("version", ["5.18.4", "5.25.0", "4.57.1", "6.0", "5.25.0.dev0"])
def test_other_transformers_are_refused(version: str) -> None:
    with pytest.raises(MachineError, match=version):
        check_version(version)


@pytest.mark.parametrize("version", [transformers.__version__, "5.19.0", "5.24.3", "5.24.0+local"])
def test_supported_transformers(version: str) -> None:
    check_version(version)


def test_cache_argument_is_the_models(make_model: Callable[..., LlamaForCausalLM]) -> None:
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    assert cache_argument(make_model()) == ("cache" if newer else "past_key_values")


def test_stack_tells_apart_what_changes_bits(make_model: Callable[..., LlamaForCausalLM]) -> None:
    model = make_model()
    first = producer_stack(model)
    assert first == producer_stack(make_model(seed=1))
    assert first["torch"] == torch.__version__
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert producer_stack(model) != first
    finally:
        torch.set_num_threads(threads)
