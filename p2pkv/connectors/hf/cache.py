"""Between transformers caches and the neutral layout of :mod:`p2pkv.formats.tensors`: extraction and injection.

transformers takes a cache that is a token short, of another dtype or full of NaN, and answers wrongly without a word. So
everything is checked here: the number and kinds of layers, and dtype, shape and length of every layer; values are checked to
be finite where they come in. Bytes move as integers of the values' width, since NumPy knows no bf16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from p2pkv.connectors.hf.geometry import TORCH_DTYPES, ModelGeometry, bits, geometry, layer_devices, open_cache, plain_layers
from p2pkv.errors import CacheMismatchError, UsageError
from p2pkv.formats.tensors import BlockPart, Dtype, LayerGeometry, Part, layer_bytes, layer_parts
from p2pkv.limits import MAX_TOKENS, SEGMENT_TOKENS

_WIRE_DTYPES: Final[dict[Dtype, np.dtype[np.signedinteger]]] = {
    Dtype.BF16: np.dtype("<i2"),
    Dtype.FP16: np.dtype("<i2"),
    Dtype.FP32: np.dtype("<i4"),
}
# The exponent's bits: all of them set is infinity or NaN.
_EXPONENTS: Final = {Dtype.BF16: 0x7F80, Dtype.FP16: 0x7C00, Dtype.FP32: 0x7F800000}


def check_cache(cache: DynamicCache, expected: ModelGeometry, tokens: int) -> None:
    """Raise CacheMismatchError unless every layer of ``cache`` holds exactly ``tokens`` tokens of geometry ``expected``."""
    layers = plain_layers(cache)
    if len(layers) != len(expected.layers):
        raise CacheMismatchError(f"the cache has {len(layers)} layers, the model {len(expected.layers)}")
    dtype = TORCH_DTYPES[expected.dtype]
    for index, (layer, shape) in enumerate(zip(layers, expected.layers, strict=True)):
        if tokens == 0 and layer.get_seq_length() == 0:
            continue
        for name, tensor, dim in (("keys", layer.keys, shape.k_dim), ("values", layer.values, shape.v_dim)):
            wanted = (1, shape.kv_heads, tokens, dim)
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != wanted:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else "nothing"
                raise CacheMismatchError(f"{name} of layer {index} hold {found}, expected {wanted}")
            if tensor.dtype != dtype:
                raise CacheMismatchError(f"{name} of layer {index} are {tensor.dtype}, the model computes {dtype}")


def layer_tensors(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of every layer. Raises CacheMismatchError for a layer of an unknown kind or without them."""
    tensors: list[tuple[Tensor, Tensor]] = []
    for index, layer in enumerate(plain_layers(cache)):
        if layer.keys is None or layer.values is None:
            raise CacheMismatchError(f"layer {index} of the cache is empty")
        tensors.append((layer.keys, layer.values))
    return tensors


def extract_layer(cache: DynamicCache, layer: int, start: int, end: int) -> memoryview:
    """Return the KV of tokens ``start`` to ``end`` of one layer in the neutral layout, as a fresh buffer of bytes.

    K ``[kv_heads, tokens, k_dim]``, then V ``[kv_heads, tokens, v_dim]``, little endian: the layer's blocks in canonical order
    are consecutive slices of it. Raises CacheMismatchError where the cache does not hold the tokens or the layer.
    """
    layers = plain_layers(cache)
    if not 0 <= layer < len(layers):
        raise CacheMismatchError(f"the cache has no layer {layer}")
    halves: list[npt.NDArray[np.signedinteger]] = []
    for tensor in (layers[layer].keys, layers[layer].values):
        if not isinstance(tensor, Tensor) or tensor.shape[0] != 1 or not 0 <= start < end <= tensor.shape[2]:
            raise CacheMismatchError(f"layer {layer} of the cache does not hold tokens {start} to {end}")
        if tensor.dtype not in TORCH_DTYPES.values():
            raise CacheMismatchError(f"layer {layer} of the cache is {tensor.dtype}")
        halves.append(bits(tensor[0, :, start:end].cpu().contiguous()).numpy().reshape(-1))
    joined = np.concatenate(halves)
    return joined.astype(joined.dtype.newbyteorder("<"), copy=False).data.cast("B")


class KVBuffer:
    """The KV of the first tokens of a text, filled block by block in any order and then turned into a cache without a copy.

    K and V of a layer are tensors ``[1, kv_heads, tokens, dim]`` of the model's dtype on the CPU, page locked for a model on a
    CUDA device. Not for use from two threads at once on the same segment and layer.
    """

    def __init__(self, shape: ModelGeometry, tokens: int, *, pin_memory: bool = False) -> None:
        if not 1 <= tokens <= MAX_TOKENS:
            raise UsageError(f"a buffer for {tokens} tokens; 1 to {MAX_TOKENS} are possible")
        self.shape = shape
        self.tokens = tokens
        dtype = TORCH_DTYPES[shape.dtype]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        for layer in shape.layers:
            for held, dim in ((self._keys, layer.k_dim), (self._values, layer.v_dim)):
                held.append(torch.empty((1, layer.kv_heads, tokens, dim), dtype=dtype, pin_memory=pin_memory))
        # Per layer and segment: the block parts that are still missing.
        self._missing = [
            {start: set(self._parts(layer, start)) for start in range(0, tokens, SEGMENT_TOKENS)} for layer in shape.layers
        ]
        self._taken = False
        self._scratch = np.empty(0, _WIRE_DTYPES[shape.dtype])

    @classmethod
    def for_model(cls, model: PreTrainedModel, tokens: int) -> KVBuffer:
        """Return an empty buffer for ``tokens`` tokens of ``model``. Raises ModelUnsupportedError."""
        return cls(geometry(model), tokens, pin_memory=model.device.type == "cuda")

    def touch(self) -> None:
        """Have the memory in place before the first block comes: fresh pages cost as much as the copying does."""
        for tensor in (*self._keys, *self._values):
            bits(tensor).numpy().fill(0)

    @property
    def filled_tokens(self) -> int:
        """How many tokens from the front are there in every layer."""
        for start in range(0, self.tokens, SEGMENT_TOKENS):
            if any(missing[start] for missing in self._missing):
                return start
        return self.tokens

    def write(self, layer: int, part: BlockPart, start: int, end: int, data: bytes | bytearray | memoryview) -> None:
        """Put one decoded block in its place: ``part`` of ``layer`` for the segment ``[start, end)``.

        Raises CacheMismatchError for a block that has no place here, whose size is wrong, or that holds NaN or infinity.
        """
        place = self._place(layer, start, end)
        if part not in self._parts(place, start):
            raise CacheMismatchError(f"layer {layer} is not cut into {part}")
        if len(data) != part.size:
            raise CacheMismatchError(f"a block of {len(data)} bytes, expected {part.size}, for layer {layer}")
        values = np.frombuffer(data, dtype=_WIRE_DTYPES[self.shape.dtype])
        if not self._finite(values):
            raise CacheMismatchError(f"the block of layer {layer}, tokens {start} to {end}, holds NaN or infinity")
        at = 0
        for half, held, dim in ((Part.K, self._keys, place.k_dim), (Part.V, self._values, place.v_dim)):
            if part.part in (half, Part.KV):
                heads = slice(part.head_start, part.head_end)
                count = (part.head_end - part.head_start) * (end - start) * dim
                target = bits(held[layer]).numpy()[0, heads, start:end]
                target[...] = values[at : at + count].reshape(target.shape)
                at += count
        self._missing[layer][start].discard(part)

    def write_layer(self, layer: int, start: int, end: int, data: bytes | bytearray | memoryview) -> None:
        """Put all of a layer's segment in its place, in the form of :func:`extract_layer`. Raises as :meth:`write` does."""
        place = self._place(layer, start, end)
        expected = layer_bytes(place, end - start, self.shape.dtype)
        if len(data) != expected:
            raise CacheMismatchError(f"{len(data)} bytes, expected {expected}, for layer {layer}")
        view, at = memoryview(data), 0
        for part in self._parts(place, start):
            self.write(layer, part, start, end, view[at : at + part.size])
            at += part.size

    def copy_from(self, cache: DynamicCache, start: int, end: int) -> None:
        """Take the segment ``[start, end)`` of all layers from a cache of the same model that computed it here.

        Raises CacheMismatchError where the cache is of another geometry or does not reach ``end``.
        """
        check_cache(cache, self.shape, cache.get_seq_length())
        if cache.get_seq_length() < end:
            raise CacheMismatchError(f"the cache holds {cache.get_seq_length()} tokens, not {end}")
        for index, (keys, values) in enumerate(layer_tensors(cache)):
            self._place(index, start, end)
            self._keys[index][:, :, start:end].copy_(keys[:, :, start:end])
            self._values[index][:, :, start:end].copy_(values[:, :, start:end])
            self._missing[index][start].clear()

    def to_cache(self, model: PreTrainedModel, tokens: int | None = None) -> DynamicCache:
        """Return a cache of ``model`` that holds the first ``tokens`` tokens, by default all. The buffer is used up by it.

        On the CPU the cache looks into the buffer's own memory; nothing is copied before the model appends to it. Raises
        CacheMismatchError where tokens are missing or the model is of another geometry; then the buffer stays as it is.
        """
        wanted = self.tokens if tokens is None else tokens
        if self._taken:
            raise CacheMismatchError("this buffer has become a cache already")
        if not 0 < wanted <= self.tokens or (wanted > self.filled_tokens):
            raise CacheMismatchError(f"{wanted} tokens are wanted, {self.filled_tokens} of {self.tokens} are there")
        if geometry(model) != self.shape:
            raise CacheMismatchError(f"the KV of this buffer is not of {type(model).__name__}'s geometry or dtype")
        cache = open_cache(model)
        for layer, held_keys, held_values, device in zip(
            plain_layers(cache), self._keys, self._values, layer_devices(model), strict=True
        ):
            # What update() does to an empty layer, less its copy; the result is checked below.
            keys, values = (held[:, :, :wanted].to(device, non_blocking=True) for held in (held_keys, held_values))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        check_cache(cache, self.shape, wanted)
        self._taken = True
        return cache

    def _finite(self, values: npt.NDArray[np.signedinteger]) -> bool:
        """Return whether no value has all bits of the exponent set, without fresh memory for each block."""
        exponents = _EXPONENTS[self.shape.dtype]
        if len(self._scratch) < len(values):
            self._scratch = np.empty(len(values), values.dtype)
        masked = np.bitwise_and(values, exponents, out=self._scratch[: len(values)])
        return int(masked.max()) != exponents

    def _parts(self, layer: LayerGeometry, start: int) -> tuple[BlockPart, ...]:
        return layer_parts(layer, min(SEGMENT_TOKENS, self.tokens - start), self.shape.dtype)

    def _place(self, layer: int, start: int, end: int) -> LayerGeometry:
        if self._taken:
            raise CacheMismatchError("this buffer has become a cache already")
        if not 0 <= layer < len(self.shape.layers):
            raise CacheMismatchError(f"there is no layer {layer} of {len(self.shape.layers)}")
        if not 0 <= start < self.tokens or start % SEGMENT_TOKENS or end != min(start + SEGMENT_TOKENS, self.tokens):
            raise CacheMismatchError(f"tokens {start} to {end} are no segment of a buffer of {self.tokens} tokens")
        return self.shape.layers[layer]
