"""A tiny random Llama whose wrong caches show: all weights tripled, so that attention matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.cache import layer_tensors

VOCABULARY = 512


def tiny_config(**changes: Any) -> LlamaConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(fields | changes))


def build_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.to(dtype)  # type: ignore[arg-type]  # transformers wraps `to` and loses its self
    model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    return model


def random_tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def local_cache(model: PreTrainedModel, token_ids: list[int], shared: int | None = None) -> DynamicCache:
    """Return what a prefill without any network leaves: everything but the last canonical step."""
    cache = hf.open_cache(model)
    steps = hf.canonical_steps(len(token_ids), shared=shared)
    if steps[:-1]:
        hf.prefill(model, token_ids, cache, steps[:-1])
    return cache


def cache_bytes(cache: DynamicCache) -> bytes:
    """Return all keys and values of a cache, layer by layer, for comparing bit by bit."""
    tensors = [tensor for pair in layer_tensors(cache) for tensor in pair] if cache.get_seq_length() else []
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def decode_greedily(model: PreTrainedModel, cache: DynamicCache, logits: torch.Tensor, count: int) -> list[int]:
    """Return ``count`` tokens that follow ``logits``, the most likely one each time."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        with torch.no_grad():
            step = torch.tensor([[tokens[-1]]])
            logits = model(input_ids=step, use_cache=True, **{hf.cache_argument(model): cache}).logits[0, -1]
    return tokens


def assert_right(model: PreTrainedModel, token_ids: list[int], shared: int | None, found: DynamicCache) -> None:
    """Assert that ``found`` is bit for bit the local cache, and that logits and the tokens that follow are the same."""
    expected = local_cache(model, token_ids, shared)
    assert found.get_seq_length() == expected.get_seq_length()
    assert cache_bytes(found) == cache_bytes(expected)
    logits, expected_logits = (hf.last_logits(model, token_ids, cache) for cache in (found, expected))
    assert torch.equal(logits, expected_logits)
    assert decode_greedily(model, found, logits, 8) == decode_greedily(model, expected, expected_logits, 8)
