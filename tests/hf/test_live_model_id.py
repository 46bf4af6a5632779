"""The id of a model that is loaded: its folder's as long as it is what the folder holds, else worked out anew or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from p2pkv.connectors.hf.live import model_id_of
from p2pkv.connectors.hf.model_id import checkpoint_model_id
from p2pkv.errors import ModelUnsupportedError
from p2pkv.formats.tensors import Dtype
from tests.support.checkpoints import NORM, edit_weights, write_config


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **changes)  # in evaluation mode
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_live_model_has_its_folders_id(checkpoint: Path, cache_folder: Path, dtype: torch.dtype) -> None:
    write_config(checkpoint, {"some_later_field": 1})  # the file's description, not the library's, is the folder's
    name = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}[dtype]
    expected = checkpoint_model_id(checkpoint, compute_dtype=name, cache_folder=cache_folder)
    model = load(checkpoint, dtype)
    assert model_id_of(model, cache_folder=cache_folder) == expected
    assert model_id_of(model, cache_folder=cache_folder) == expected


def test_live_model_without_a_folder_has_the_id_it_has_when_saved(
    make_model: Callable[..., LlamaForCausalLM], tmp_path: Path, cache_folder: Path
) -> None:
    for tied in (False, True):
        model = make_model(tie_word_embeddings=tied)
        live = model_id_of(model, cache_folder=cache_folder)
        folder = tmp_path / f"saved-{tied}"
        model.save_pretrained(folder)
        assert checkpoint_model_id(folder, compute_dtype=Dtype.FP32, cache_folder=cache_folder) == live
        assert model_id_of(load(folder), cache_folder=cache_folder) == live
        assert model_id_of(make_model(seed=2, tie_word_embeddings=tied), cache_folder=cache_folder) != live


def test_folder_can_be_named(checkpoint: Path, cache_folder: Path) -> None:
    write_config(checkpoint, {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "attention_bias": False})
    model = load(checkpoint)
    expected = model_id_of(model, cache_folder=cache_folder)
    model.config.name_or_path = "somebody/some-model"
    assert model_id_of(model, checkpoint=checkpoint, cache_folder=cache_folder) == expected


def add_in_place(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5


def add_through_data(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 0.5


def replace_data(model: LlamaForCausalLM) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data + 0.5


def replace_parameter(model: LlamaForCausalLM) -> None:
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.detach() * 2)


def change_config(model: LlamaForCausalLM) -> None:
    model.config.rms_norm_eps = 1e-5


def change_dtype(model: LlamaForCausalLM) -> None:
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps `to` and loses its self


@pytest.mark.parametrize(
    "change", [add_in_place, add_through_data, replace_data, replace_parameter, change_config, change_dtype]
)
@pytest.mark.parametrize("asked_before", [False, True])
def test_changed_model_loses_its_folders_id(
    checkpoint: Path, cache_folder: Path, change: Callable[[LlamaForCausalLM], None], asked_before: bool
) -> None:
    folder_id = checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=cache_folder)
    model = load(checkpoint)
    if asked_before:
        assert model_id_of(model, cache_folder=cache_folder) == folder_id
    change(model)
    assert model_id_of(model, cache_folder=cache_folder) != folder_id


def test_config_overridden_at_loading_loses_the_folders_id(checkpoint: Path, cache_folder: Path) -> None:
    model = load(checkpoint, rms_norm_eps=0.1)
    assert model_id_of(model, cache_folder=cache_folder) != model_id_of(load(checkpoint), cache_folder=cache_folder)


def test_folder_that_changed_after_loading_does_not_name_the_model(checkpoint: Path, cache_folder: Path) -> None:
    model = load(checkpoint)
    loaded = model_id_of(load(checkpoint), cache_folder=cache_folder)
    edit_weights(checkpoint, lambda tensors: tensors[NORM].add_(1))
    changed = checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=cache_folder)
    assert model_id_of(model, cache_folder=cache_folder) not in {changed}
    assert changed != loaded


class Adapter(nn.Module):
    """Stands for a layer of the adapter library, which need not be installed to be refused."""

    __module__ = "peft.tuners.lora.layer"


def test_adapters_and_hooks_are_refused(make_model: Callable[..., LlamaForCausalLM]) -> None:
    model = make_model()
    model.model.layers[0].mlp.adapter = Adapter()
    with pytest.raises(ModelUnsupportedError, match="Adapter"):
        model_id_of(model)
    model = make_model()
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelUnsupportedError, match="hook"):
        model_id_of(model)
    handle.remove()
    model.model.layers[0].mlp.forward = lambda hidden: hidden
    with pytest.raises(ModelUnsupportedError, match="hook"):
        model_id_of(model)
    with pytest.raises(ModelUnsupportedError, match="offloaded"):
        model_id_of(make_model().to("meta"))  # type: ignore[arg-type]  # transformers wraps `to` and loses its self
    model = make_model()
    model.config.quantization_config = {"bits": 4}
    with pytest.raises(ModelUnsupportedError, match="quantised"):
        model_id_of(model)
    with pytest.raises(ModelUnsupportedError, match="Linear"):
        model_id_of(nn.Linear(1, 1))  # type: ignore[arg-type]  # the point of the test
