"""The tiny model of :mod:`tests.support.llama`, its tokens and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.llama import build_model, random_tokens


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
    return random_tokens(600)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The tiny model saved in fp32."""
    folder = tmp_path / "checkpoint"
    build_model().save_pretrained(folder)
    return folder


@pytest.fixture
def cache_folder(tmp_path: Path) -> Path:
    return tmp_path / "stamps"
