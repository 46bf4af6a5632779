"""The model id of a live model: its folder's where it still is what the folder holds, else one of its own weights.

Weights can change after loading (fine-tuning, merged adapters), and so can the config; neither may keep the folder's id. So
every live tensor is compared with the folder's, cast to the live dtype: all of them and bit by bit, because it happens once
per model and reads each weight once, as loading did. Later calls look whether the model is still the same by a fingerprint:
where each tensor lies, torch's version counter, and a sum over its bits, since writes through ``.data`` leave the counter as
it was. One such sum reads each weight once, as every decode step does.

Adapters that are not merged and forward hooks change KV without changing a weight: they are refused, never ignored. What the
code of the kernels does belongs to the stack, not to the id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from transformers import PreTrainedModel

from p2pkv.connectors.hf.config import describe_config
from p2pkv.connectors.hf.geometry import bits, dtype_of, geometry
from p2pkv.connectors.hf.model_id import checkpoint_model_id, described_model_id
from p2pkv.connectors.hf.weights import StoredTensor, digest_tensors, open_mapped, read_json, read_tensors, weight_files
from p2pkv.errors import ModelUnsupportedError
from p2pkv.formats import dagcbor

_SAFETENSORS_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES: Final = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


@dataclass(frozen=True, slots=True)
class _Known:
    fingerprint: bytes
    model_id: bytes


_known: WeakKeyDictionary[PreTrainedModel, _Known] = WeakKeyDictionary()


def model_id_of(model: PreTrainedModel, *, checkpoint: Path | None = None, cache_folder: Path | None = None) -> bytes:
    """Return the 32-byte id of ``model`` as it is now.

    ``checkpoint`` is the folder it was loaded from, by default the one its config remembers. Raises ModelUnsupportedError
    for a model whose KV does not follow from its config, weights and token ids.
    """
    check_live(model)
    folder = checkpoint or Path(str(model.config.name_or_path))
    fingerprint = _fingerprint(model, folder)
    known = _known.get(model)
    if known is not None and known.fingerprint == fingerprint:
        return known.model_id
    compute_dtype, kv_dtype = dtype_of(model.dtype), geometry(model).dtype
    if (folder / "config.json").is_file() and _is_still(model, folder):
        found = checkpoint_model_id(folder, compute_dtype=compute_dtype, kv_dtype=kv_dtype, cache_folder=cache_folder)
    else:
        found = described_model_id(describe_config(_live_config(model)), _live_weights(model), compute_dtype, kv_dtype)
    _known[model] = _Known(fingerprint, found)
    return found


def last_model_id(model: PreTrainedModel) -> bytes | None:
    """Return what :func:`model_id_of` found for this object the last time, unchecked; ``None`` before the first time.

    Good for beginning to look something up while :func:`model_id_of` confirms it.
    """
    known = _known.get(model)
    return None if known is None else known.model_id


def check_live(model: PreTrainedModel) -> None:
    """Raise ModelUnsupportedError for a model whose values do not follow from its config and ``state_dict`` alone."""
    if not isinstance(model, PreTrainedModel):
        raise ModelUnsupportedError(f"{type(model).__name__} is not a transformers model")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelUnsupportedError(f"{type(model).__name__} is quantised: its live weights cannot be told from a digest")
    for name, module in model.named_modules():
        if type(module).__module__.split(".")[0] == "peft":
            raise ModelUnsupportedError(
                f"an adapter ({type(module).__name__}) is active in {name}",
                advice="Merge it with `merge_and_unload()`: the merged model has an id of its own.",
            )
        placed = type(getattr(module, "_hf_hook", None)).__module__.split(".")[0] == "accelerate"  # moves tensors, no more
        if module._forward_hooks or module._forward_pre_hooks or ("forward" in vars(module) and not placed):
            raise ModelUnsupportedError(
                f"a hook in {name or type(model).__name__} may change KV values", advice="Remove the hook before the call."
            )


def _live_config(model: PreTrainedModel) -> dict[str, object]:
    """Return what ``save_pretrained`` would write into ``config.json``."""
    config: dict[str, object] = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__]
    return config


def _live_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that ``save_pretrained`` would write: tied ones once, under the name that is kept."""
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ModelUnsupportedError(f"weights of {type(model).__name__} are offloaded and cannot be read")
    return tensors


def _live_weights(model: PreTrainedModel) -> bytes:
    described: list[tuple[str, str, tuple[int, ...], bytes]] = []
    for name, tensor in _live_tensors(model).items():
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise ModelUnsupportedError(f"tensor {name} has the dtype {tensor.dtype}, which is not known")
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        content = blake3(data.data, max_threads=blake3.AUTO).digest()
        described.append((name, _SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape), content))
    return digest_tensors(described)


def _fingerprint(model: PreTrainedModel, folder: Path) -> bytes:
    hasher = blake3(str(folder).encode())
    hasher.update(dagcbor.encode(describe_config(_live_config(model))))
    for name, tensor in _live_tensors(model).items():
        version = -1 if tensor.is_inference() else tensor._version
        total = _bit_sum(tensor)
        hasher.update(repr((name, tensor.dtype, tuple(tensor.shape), tensor.data_ptr(), version, total)).encode())
    return hasher.digest()


def _bit_sum(tensor: Tensor) -> int:
    """Return a wrapping sum over the bits of ``tensor``, eight bytes at a time where they can be read so.

    On a CPU it is NumPy's, on one thread: torch would set all threads to it, and these wait for one another at each tensor
    while a node on the same machine is busy fetching.
    """
    flat = bits(tensor.reshape(-1))
    whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    if not tensor.is_contiguous() or flat.data_ptr() % 8:
        whole = 0
    if tensor.device.type != "cpu":
        return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum(dtype=torch.int64))
    values = flat.numpy()
    return int(values[:whole].view(np.int64).sum()) + int(values[whole:].sum(dtype=np.int64))


def _is_still(model: PreTrainedModel, folder: Path) -> bool:
    """Return whether config and weights of ``model`` are those of ``folder``, the weights cast to the live dtypes."""
    return _same_config(model, folder) and _same_weights(model, folder)


def _same_config(model: PreTrainedModel, folder: Path) -> bool:
    """Compare the two as this transformers understands them, so that defaults left out of the file do not matter."""
    stored = type(model.config).from_dict(read_json(folder / "config.json"))
    described: dict[str, object] = json.loads(stored.to_json_string(use_diff=True))
    described["architectures"] = [type(model).__name__]
    return describe_config(described) == describe_config(_live_config(model))


def _same_weights(model: PreTrainedModel, folder: Path) -> bool:
    """A tensor of the folder that the model does not use changes nothing; one that it lacks is a difference."""
    stored = read_tensors(weight_files(folder))
    live = _live_tensors(model)
    if not live.keys() <= stored.keys():
        return False
    tied = getattr(model, "all_tied_weights_keys", {})
    live |= {name: live[source] for name, source in tied.items() if name in stored and source in live}
    for file in {tensor.file for tensor in stored.values()}:
        data = memoryview(open_mapped(file))  # unmapped when the last tensor that looks into it is gone
        for name, tensor in live.items():
            if stored[name].file == file and not _same_tensor(tensor, stored[name], data):
                return False
    return True


def _same_tensor(live: Tensor, stored: StoredTensor, data: memoryview) -> bool:
    dtype = _TORCH_DTYPES.get(stored.dtype)
    if dtype is None or stored.shape != tuple(live.shape):
        return False
    if live.numel() == 0:
        return True
    read = torch.frombuffer(data[stored.start : stored.end], dtype=dtype).reshape(stored.shape)
    return torch.equal(bits(read.to(live.device).to(live.dtype)), bits(live))
