"""The geometry of a model's KV: dtype and, per layer, kind and shape. Asked of the model itself, not read off its config.

Configs name head counts and sizes in many ways, and some models cache other shapes than theirs suggest. So one token is run
through the model into an empty cache, once per model, and what lies in the cache is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from p2pkv.connectors.hf.config import check_decoder
from p2pkv.connectors.hf.versions import cache_argument, check_version
from p2pkv.errors import CacheMismatchError, ModelUnsupportedError
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_bytes

DTYPES: Final = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16, torch.float32: Dtype.FP32}
TORCH_DTYPES: Final = {dtype: torch_dtype for torch_dtype, dtype in DTYPES.items()}
_BIT_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the KV of a model looks like: the element type of all layers, and one :class:`LayerGeometry` per decoder layer."""

    dtype: Dtype
    layers: tuple[LayerGeometry, ...]

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of the KV of ``tokens`` tokens over all layers."""
        return sum(layer_bytes(layer, tokens, self.dtype) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Probe:
    geometry: ModelGeometry
    devices: tuple[torch.device, ...]


_probes: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, torch.device, _Probe]] = WeakKeyDictionary()


def geometry(model: PreTrainedModel) -> ModelGeometry:
    """Return the KV geometry of ``model``.

    Raises ModelUnsupportedError, naming it, for a layer kind, dtype or architecture that is not known, before anything is
    fetched or published.
    """
    return _probe(model).geometry


def layer_devices(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """Return the device on which each layer keeps its KV."""
    return _probe(model).devices


def open_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache of ``model``, every layer of a known kind. Raises ModelUnsupportedError, MachineError."""
    check_version()
    try:
        cache = DynamicCache(config=model.config)
    except (KeyError, ValueError, TypeError) as error:  # transformers itself has no dynamic layer of the kind
        raise ModelUnsupportedError(f"{type(model).__name__} has no dynamic cache: {error!r}") from None
    if not cache.layers:
        raise ModelUnsupportedError(f"{type(model).__name__} caches no layers")
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:  # subclasses hold other state: sliding windows, indexes, recurrences
            raise ModelUnsupportedError(f"layer {index} is a {type(layer).__name__}, a kind that is not known")
    return cache


def plain_layers(cache: DynamicCache) -> list[DynamicLayer]:
    """Return the layers of ``cache``. Raises CacheMismatchError for one of an unknown kind."""
    layers: list[DynamicLayer] = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise CacheMismatchError(f"layer {index} of the cache is a {type(layer).__name__}")
        layers.append(layer)
    return layers


def dtype_of(dtype: torch.dtype) -> Dtype:
    """Return the neutral name of ``dtype``. Raises ModelUnsupportedError."""
    if dtype not in DTYPES:
        raise ModelUnsupportedError(f"{dtype} is none of {', '.join(DTYPES.values())}")
    return DTYPES[dtype]


def bits(tensor: Tensor) -> Tensor:
    """Return ``tensor`` seen as integers of the same width: NumPy knows no bf16, and equal bits say more than equal values."""
    return tensor.view(_BIT_DTYPES[tensor.element_size()])


def _probe(model: PreTrainedModel) -> _Probe:
    known = _probes.get(model)
    if known is not None and known[:2] == (model.dtype, model.device):
        return known[2]
    config = model.config.to_dict()
    check_decoder({**config, "architectures": [type(model).__name__]})
    cache = open_cache(model)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    layers: list[LayerGeometry] = []
    devices: list[torch.device] = []
    dtypes: set[torch.dtype] = set()
    for index, layer in enumerate(plain_layers(cache)):
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.shape[:3] != values.shape[:3] or keys.shape[0] != 1 or keys.shape[2] != 1:
            raise ModelUnsupportedError(f"layer {index} caches something else than one key and value per token")
        dtypes |= {keys.dtype, values.dtype}
        devices.append(keys.device)
        layers.append(LayerGeometry(LayerKind.FULL, keys.shape[1], keys.shape[3], values.shape[3]))
    if len(dtypes) != 1:
        raise ModelUnsupportedError(f"its layers cache different dtypes: {', '.join(sorted(map(str, dtypes)))}")
    found = _Probe(ModelGeometry(dtype_of(dtypes.pop()), tuple(layers)), tuple(devices))
    _probes[model] = (model.dtype, model.device, found)
    return found
