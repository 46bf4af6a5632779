"""The model id changes with everything that changes KV values, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from p2pkv.connectors.hf.config import IGNORED_FIELDS, describe_config
from p2pkv.connectors.hf.model_id import adapter_digest, checkpoint_model_id, tokenizer_digest
from p2pkv.connectors.hf.weights import weight_files, weights_digest
from p2pkv.errors import FormatError, ModelUnsupportedError, StoreError, TruncatedError
from p2pkv.formats.tensors import Dtype
from tests.support.checkpoints import NORM, edit_weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 512,
}
# One row for each field that counts, with a value that makes another model of it.
CHANGES: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "gelu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "mlp_bias": True,
    "model_type": "mistral",
    "num_attention_heads": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "vocab_size": 513,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def legacy(theta: float | None = 10000.0, scaling: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    config = {name: value for name, value in CONFIG.items() if name != "rope_parameters"}
    return config | {"rope_theta": theta, "rope_scaling": scaling} | more


@pytest.mark.parametrize("name", CHANGES)
def test_field_that_counts_changes_the_description(name: str) -> None:
    assert describe_config(CONFIG | {name: CHANGES[name]}) != describe_config(CONFIG)


def test_each_field_has_a_row_or_is_known_not_to_count() -> None:
    assert CONFIG.keys() == CHANGES.keys() | (CONFIG.keys() & IGNORED_FIELDS)
    assert not CHANGES.keys() & IGNORED_FIELDS


@pytest.mark.parametrize("name", sorted(IGNORED_FIELDS))
def test_ignored_field_changes_nothing(name: str) -> None:
    assert describe_config(CONFIG | {name: "other"}) == describe_config(CONFIG)


@pytest.mark.parametrize("field", [{"sliding_window": 128}, {"sliding_window": None}, {"some_later_field": 0}])
def test_unknown_field_counts(field: dict[str, Any]) -> None:
    assert describe_config(CONFIG | field) != describe_config(CONFIG)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (legacy(), {"rope_theta": 10000, "rope_type": "default"}),
        (legacy(10000), {"rope_theta": 10000.0}),
        (legacy(scaling={"type": "linear", "factor": 2}), {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}),
        (legacy(scaling=LLAMA3), LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 2048}),
        (legacy(partial_rotary_factor=0.5), {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_old_and_new_form_of_rope_are_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert describe_config(old) == describe_config(CONFIG | {"rope_parameters": new})


@pytest.mark.parametrize(
    "other",
    [
        legacy(20000.0),
        legacy(scaling={"type": "linear", "factor": 4.0}),
        legacy(scaling=LLAMA3),
        legacy(partial_rotary_factor=0.5),
        legacy(None),
        CONFIG | {"rope_parameters": {"full_attention": {"rope_theta": 10000.0}}},
    ],
)
def test_other_rope_changes_the_description(other: dict[str, Any]) -> None:
    assert describe_config(other) != describe_config(CONFIG)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "unheard_of"])
def test_rope_that_may_look_ahead_is_refused_by_name(kind: str) -> None:
    for config in (
        legacy(scaling={"type": kind, "factor": 2.0}),
        CONFIG | {"rope_parameters": {"rope_type": kind}},
        CONFIG | {"rope_parameters": {"full_attention": {"rope_type": kind}}},
    ):
        with pytest.raises(ModelUnsupportedError, match=kind):
            describe_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["T5ForConditionalGeneration"]},
        {"architectures": ["BertForMaskedLM"]},
        {"architectures": []},
        {"architectures": None},
        {"is_encoder_decoder": True},
        {"is_decoder": False},
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"vision_config": {}},
    ],
)
def test_model_that_is_no_causal_decoder_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupportedError):
        describe_config(CONFIG | change)


def test_dtypes_are_part_of_the_id(checkpoint: Path, cache_folder: Path) -> None:
    ids = {
        checkpoint_model_id(checkpoint, compute_dtype=compute, kv_dtype=kv, cache_folder=cache_folder)
        for compute in Dtype
        for kv in Dtype
    }
    assert len(ids) == 9


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t[NORM].view(torch.int32).bitwise_xor_(torch.eye(1, 128, dtype=torch.int32)[0]), id="one bit"),
        pytest.param(lambda t: t.update({NORM: t[NORM].to(torch.bfloat16)}), id="dtype"),
        pytest.param(lambda t: t.update({NORM: t[NORM].reshape(2, 64)}), id="shape"),
        pytest.param(lambda t: t.update({"model.norm2.weight": t.pop(NORM)}), id="name"),
        pytest.param(lambda t: t.pop(NORM), id="one less"),
        pytest.param(lambda t: t.update(more=torch.zeros(1)), id="one more"),
        pytest.param(lambda t: t.update(more=torch.zeros(0)), id="one more, empty"),
    ],
)
def test_weights_change_the_digest(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    before = weights_digest(weight_files(checkpoint))
    edit_weights(checkpoint, change)
    assert weights_digest(weight_files(checkpoint)) != before


def test_shards_and_order_do_not_matter(make_model: Callable[..., LlamaForCausalLM], checkpoint: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    make_model().save_pretrained(sharded, max_shard_size="500KB")
    assert len(weight_files(sharded)) > 2
    assert weights_digest(weight_files(sharded)) == weights_digest(weight_files(checkpoint))


def spoil_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda h: h[NORM].update(shape=[127]), FormatError),
        (lambda h: h[NORM].update(shape=[-128, -1]), FormatError),
        (lambda h: h[NORM].update(shape="128"), FormatError),
        (lambda h: h[NORM].update(data_offsets=[0]), FormatError),
        (lambda h: h[NORM].update(data_offsets=[512, 0]), FormatError),
        (lambda h: h[NORM].update(data_offsets=[2**40, 2**40 + 512]), TruncatedError),
        (lambda h: h[NORM].update(dtype="F7"), ModelUnsupportedError),
        (lambda h: h.update(more=3), FormatError),
    ],
)
def test_damaged_header_is_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], object], error: type[Exception]
) -> None:
    spoil_header(checkpoint, change)
    with pytest.raises(error):
        weights_digest(weight_files(checkpoint))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", TruncatedError),
        (b"\x08", TruncatedError),
        ((2**63).to_bytes(8, "little"), FormatError),
        ((20).to_bytes(8, "little") + b"{}", TruncatedError),
        ((2).to_bytes(8, "little") + b"[]", FormatError),
        ((2).to_bytes(8, "little") + b"{]", FormatError),
        ((15).to_bytes(8, "little") + b'{"a":{},"a":{}}', FormatError),
    ],
)
def test_file_that_is_no_safetensors_is_refused(checkpoint: Path, data: bytes, error: type[Exception]) -> None:
    (checkpoint / "model.safetensors").write_bytes(data)
    with pytest.raises(error):
        weights_digest(weight_files(checkpoint))


def test_checkpoint_without_what_it_needs_is_refused(checkpoint: Path, cache_folder: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupportedError, match="safetensors"):
        checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=cache_folder)
    index = checkpoint / "model.safetensors.index.json"
    weight_maps: list[object] = [{}, {"a": "../elsewhere.safetensors"}, []]
    for weight_map in weight_maps:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FormatError):
            weight_files(checkpoint)
    index.write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(StoreError):
        checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=cache_folder)
    (checkpoint / "config.json").unlink()
    with pytest.raises(StoreError):
        checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=cache_folder)


def test_tensor_in_two_shards_is_refused(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "b.safetensors")
    with pytest.raises(FormatError, match="two files"):
        weights_digest([checkpoint / "model.safetensors", checkpoint / "b.safetensors"])


def age(folder: Path) -> None:
    """Let the weights look older than the time within which a file may change without a new stamp."""
    for file in folder.glob("*.safetensors"):
        os.utime(file, (1_000_000_000, 1_000_000_000))


def test_digest_is_remembered_beside_the_stamp(checkpoint: Path, cache_folder: Path) -> None:
    def model_id() -> bytes:
        return checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=cache_folder)

    before = sorted(checkpoint.iterdir())
    first = model_id()
    assert not list(cache_folder.rglob("*.json")), "a file that changed just now is not remembered"
    age(checkpoint)
    assert model_id() == first
    (slot,) = cache_folder.rglob("*.json")
    held = json.loads(slot.read_text())
    slot.write_text(json.dumps(held | {"weights": "00" * 32}))
    assert model_id() != first, "the remembered digest is used"
    for damaged in ("", "{", "[]", "null", json.dumps(held | {"weights": "00"}), json.dumps(held | {"weights": 7}), "{}"):
        slot.write_text(damaged)
        assert model_id() == first
    edit_weights(checkpoint, lambda tensors: tensors[NORM].add_(1))
    age(checkpoint)
    assert model_id() != first
    assert sorted(checkpoint.iterdir()) == before, "nothing is written into the checkpoint"


def test_cache_folder_that_cannot_be_written_is_no_error(checkpoint: Path, tmp_path: Path) -> None:
    age(checkpoint)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, cache_folder=blocked)


def test_adapters_count_with_config_weights_and_order(checkpoint: Path, tmp_path: Path, cache_folder: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(
            json.dumps({"r": 8, "lora_alpha": 16, "base_model_name_or_path": str(number)})
        )
        save_file({"lora_A": torch.full((2, 2), float(number))}, folder / "adapter_model.safetensors")

    def model_id(*adapters: Path) -> bytes:
        return checkpoint_model_id(checkpoint, compute_dtype=Dtype.FP32, adapters=adapters, cache_folder=cache_folder)

    a, b = folders
    assert len({model_id(), model_id(a), model_id(b), model_id(a, b), model_id(b, a)}) == 5
    before = adapter_digest(a)
    (a / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "base_model_name_or_path": "elsewhere"}))
    assert adapter_digest(a) == before
    (a / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    assert adapter_digest(a) != before


def test_tokenizer_digest(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert first is not None
    assert tokenizer_digest(tmp_path) != first


def test_reading_a_checkpoint_needs_no_torch() -> None:
    script = "import sys, p2pkv.connectors.hf.model_id; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
