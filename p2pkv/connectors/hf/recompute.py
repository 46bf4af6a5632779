"""Recompute the KV of single tokens over a given prefix: what a spot check compares with.

All positions go through the model in one forward pass. A token at position p sees the given KV of the tokens before p and its
own new KV, nothing else: neither the given KV from p on nor the other recomputed tokens. So each comes out as a model would
compute it right after the first p tokens of the cache, whatever lies behind them, and the cache is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from p2pkv.connectors.hf.cache import check_cache, layer_tensors
from p2pkv.connectors.hf.geometry import geometry
from p2pkv.connectors.hf.prefill import check_mode, id_tensor
from p2pkv.connectors.hf.versions import cache_argument, forward_parameters
from p2pkv.errors import UsageError

KV = tuple[Tensor, Tensor]
# Kernels that take a mask of any form. Others (flash attention) know causal ones alone.
_MASKABLE: Final = ("sdpa", "eager")


def check_recomputable(model: PreTrainedModel) -> None:
    """Raise UsageError for a model whose attention cannot let single tokens see a prefix of their own."""
    attention = str(model.config._attn_implementation)
    if attention not in _MASKABLE:
        raise UsageError(
            f"single tokens cannot be recomputed with {attention} attention",
            advice='Load the model with attn_implementation="sdpa", or verify by signature, quorum or full.',
        )


def recompute(model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache, positions: Sequence[int]) -> list[KV]:
    """Return the KV of the tokens at ``positions`` over ``cache``: keys and values ``[kv_heads, positions, dim]`` per layer.

    ``cache`` holds the KV of ``token_ids``, or of the first ones of them, beyond every position. Raises CacheMismatchError for
    a cache that does not fit, UsageError for other positions, ids, or a mode or kind of model that computes something else.
    """
    held = cache.get_seq_length()
    if not positions or not all(0 <= position < held <= len(token_ids) for position in positions):
        raise UsageError(f"positions {list(positions)[:8]} are not all within the {held} tokens of the cache")
    check_mode(model)
    check_recomputable(model)
    check_cache(cache, geometry(model), held)
    layers = [_Overlay(keys, values) for keys, values in layer_tensors(cache)]
    overlay = DynamicCache()
    overlay.layers = list(layers)
    ids = id_tensor(model, [token_ids[position] for position in positions])
    places = torch.tensor([list(positions)], dtype=torch.long, device=ids.device)
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(model) else {}
    with torch.no_grad():
        model(
            input_ids=ids,
            position_ids=places,
            attention_mask=_mask(places[0], held, model.dtype),
            use_cache=True,
            **{cache_argument(model): overlay},
            **options,
        )
    return [layer.recomputed() for layer in layers]


class _Overlay(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers leaves __init_subclass__ untyped
    """One layer of the given cache, which takes up nothing: what the model adds is attended to once and kept aside."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._added: KV | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        assert self.keys is not None, "given at construction"
        assert self.values is not None, "given at construction"
        self._added = (key_states, value_states)
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)

    def recomputed(self) -> KV:
        assert self._added is not None, "every layer of a model that was probed adds to its cache"
        keys, values = self._added
        return keys[0], values[0]


def _mask(positions: Tensor, held: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to attention scores, ``[1, 1, positions, held + positions]``: 0 where a token sees."""
    count = len(positions)
    before = torch.arange(held, device=positions.device)[None] < positions[:, None]
    itself = torch.eye(count, dtype=torch.bool, device=positions.device)
    hidden = ~torch.cat([before, itself], dim=1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
