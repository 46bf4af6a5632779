"""Single tokens recomputed over a given prefix: what a model computes there, whatever lies behind."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.cache import layer_tensors
from p2pkv.connectors.hf.recompute import recompute
from p2pkv.errors import CacheMismatchError, UsageError
from p2pkv.trust.spot_check import SpotCheck
from p2pkv.trust.tolerances import tolerances
from tests.support.llama import build_model, cache_bytes, random_tokens

POSITIONS = [0, 1, 255, 256, 400, 599]


@pytest.fixture(scope="module")
def cache(model: LlamaForCausalLM, token_ids: list[int]) -> DynamicCache:
    """The KV of all tokens; tests leave it as it is."""
    found = hf.open_cache(model)
    hf.prefill(model, token_ids, found, hf.canonical_steps(600))
    return found


def copy_of(model: LlamaForCausalLM, cache: DynamicCache, tokens: int | None = None) -> DynamicCache:
    copied = hf.open_cache(model)
    for layer, (keys, values) in enumerate(layer_tensors(cache)):
        copied.update(keys[:, :, :tokens].clone(), values[:, :, :tokens].clone(), layer)
    return copied


def check(model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache) -> SpotCheck:
    return hf.spot_check(model, token_ids, cache, POSITIONS, hf.producer_stack(model))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_recomputed_token_is_what_the_model_computes_after_its_prefix(token_ids: list[int], attention: str) -> None:
    model = build_model(attn_implementation=attention)
    cache = hf.open_cache(model)
    hf.prefill(model, token_ids, cache, hf.canonical_steps(600))
    recomputed = recompute(model, token_ids, cache, POSITIONS)
    for place, position in enumerate(POSITIONS):
        alone = copy_of(model, cache, position) if position else hf.open_cache(model)
        hf.prefill(model, token_ids, alone, [(position, position + 1)])
        for (keys, values), (expected_keys, expected_values) in zip(recomputed, layer_tensors(alone), strict=True):
            torch.testing.assert_close(keys[:, place], expected_keys[0, :, position], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values[:, place], expected_values[0, :, position], rtol=1e-4, atol=1e-4)


def test_the_cache_is_left_as_it_is(model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache) -> None:
    before = cache_bytes(cache)
    recompute(model, token_ids, cache, POSITIONS)
    assert cache_bytes(cache) == before


def test_nothing_from_the_position_on_is_seen(model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache) -> None:
    changed = copy_of(model, cache)
    for keys, values in layer_tensors(changed):
        keys[:, :, 400:] = 5.0
        values[:, :, 400:] = 5.0
    positions = [0, 255, 400]
    expected = recompute(model, token_ids, cache, positions)
    for ours, theirs in zip(recompute(model, token_ids, changed, positions), expected, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_an_honest_cache_passes(model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache) -> None:
    found = check(model, token_ids, cache)
    assert found.passed, str(found)
    assert found.same_stack


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_wrong_value_is_found_where_it_is(
    model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache, half: int, layer: int
) -> None:
    changed = copy_of(model, cache)
    layer_tensors(changed)[layer][half][:, :, 256] *= 1.5
    found = check(model, token_ids, changed)
    deviation = (found.keys, found.values)[half]
    assert not found.passed
    assert (deviation.within, deviation.layer, deviation.position) == (False, layer, 256)
    assert ("keys", "values")[half] in str(found)
    assert f"at token 256 in layer {layer}" in str(found)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38], ids=str)
@pytest.mark.parametrize("position", [0, 599])
def test_values_that_overflow_do_not_pass_and_are_told_in_numbers(
    model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache, value: float, position: int
) -> None:
    changed = copy_of(model, cache)
    for keys, values in layer_tensors(changed):
        keys[:, :, position] = value
        values[:, :, position] = value
    found = check(model, token_ids, changed)
    assert not found.passed
    json.dumps(asdict(found), allow_nan=False)


def test_another_stack_has_bounds_of_its_own(model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache) -> None:
    producer = {**hf.producer_stack(model), "torch": "another", "more": "is no difference"}
    found = hf.spot_check(model, token_ids, cache, POSITIONS, producer)
    assert not found.same_stack
    expected = tolerances(hf.geometry(model).dtype, 4, same_stack=False)
    assert (found.keys.tolerance, found.values.tolerance) == expected


def test_equal_caches_need_no_numbers_and_others_on_the_same_stack_no_tolerance(
    model: LlamaForCausalLM, token_ids: list[int], cache: DynamicCache
) -> None:
    stack = hf.producer_stack(model)
    assert hf.compare_caches(model, copy_of(model, cache), cache, stack) is None
    changed = copy_of(model, cache)
    value = layer_tensors(changed)[2][1][0, 1, 77]
    value[:] = torch.nextafter(value, torch.tensor(torch.inf, dtype=value.dtype))
    here, elsewhere = (hf.compare_caches(model, changed, cache, producer) for producer in (stack, {}))
    assert here is not None
    assert elsewhere is not None
    assert (here.passed, here.values.layer, here.values.position) == (False, 2, 77)
    assert elsewhere.passed


def test_what_cannot_be_recomputed_is_refused(token_ids: list[int]) -> None:
    model = build_model()
    cache = hf.open_cache(model)
    hf.prefill(model, token_ids[:10], cache, [(0, 10)])
    for positions in ([], [10], [-1]):
        with pytest.raises(UsageError):
            recompute(model, token_ids, cache, positions)
    with pytest.raises(CacheMismatchError):
        recompute(build_model(torch.bfloat16), token_ids, cache, [3])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UsageError, match="flash_attention_2"):
        recompute(model, token_ids, cache, [3])


def test_random_positions_of_an_honest_cache_pass(model: LlamaForCausalLM) -> None:
    ids = random_tokens(300, seed=9)
    cache = hf.open_cache(model)
    hf.prefill(model, ids, cache, hf.canonical_steps(300))
    positions = sorted(random.Random(4).sample(range(300), 40))
    assert hf.spot_check(model, ids, cache, positions, hf.producer_stack(model)).passed
