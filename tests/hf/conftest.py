"""A tiny random Llama whose wrong caches show: all weights tripled, so that attention matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    """Return a function that builds the tiny model in a dtype, from a seed, with changed config fields."""
    return build_model


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """The tiny model in each dtype; tests leave it as it is."""
    return build_model(request.param)


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    """Tokens of two whole segments and a tail."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (600,), generator=generator).tolist()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The tiny model saved in fp32."""
    folder = tmp_path / "checkpoint"
    build_model().save_pretrained(folder)
    return folder


@pytest.fixture
def cache_folder(tmp_path: Path) -> Path:
    return tmp_path / "stamps"
