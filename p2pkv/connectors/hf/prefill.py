"""Canonical prefill: KV computed in steps whose bounds follow from the text alone, so that equal texts give equal bits.

The bits of a KV value depend on the shape of the step that computed it: kernels choose their way by the number of rows. So
what is shared is not only "the first n tokens" but "the first n tokens, computed in these steps": batch 1, from position 0,
steps that end at every multiple of 256, at the end of the shared part where the caller names it, and at the end. The last
step is always computed by the one who asks, also where all of its KV is known: a cache handed out holds everything before it,
and so hit and miss get their logits from the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from p2pkv.connectors.hf.cache import check_cache
from p2pkv.connectors.hf.geometry import geometry
from p2pkv.connectors.hf.versions import cache_argument, forward_parameters
from p2pkv.errors import UsageError
from p2pkv.limits import MAX_TOKENS, SEGMENT_TOKENS

Step = tuple[int, int]


def canonical_steps(token_count: int, start: int = 0, shared: int | None = None) -> list[Step]:
    """Return the steps ``(first token, one past the last)`` that compute tokens ``start`` to ``token_count``.

    ``shared`` is where the shared part of the text ends; behind it steps of 256 count from there. ``start`` is where a cache
    ends, and one of the bounds. Raises UsageError for numbers that cannot be: other steps would give other bits.
    """
    end_of_shared = token_count if shared is None else shared
    if not 0 <= end_of_shared <= token_count <= MAX_TOKENS:
        raise UsageError(f"a shared part of {shared} tokens in a text of {token_count} (at most {MAX_TOKENS})")
    bounds = [*range(0, end_of_shared, SEGMENT_TOKENS), *range(end_of_shared, token_count, SEGMENT_TOKENS), token_count]
    if start not in bounds:
        raise UsageError(
            f"no canonical step of {token_count} tokens begins at token {start}",
            advice="Start where a segment or the shared part ends; pass `shared` where the cache holds a tail.",
        )
    return list(pairwise(bounds[bounds.index(start) :]))


def prefill(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    cache: DynamicCache,
    steps: Sequence[Step],
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Compute ``steps`` of ``token_ids`` (the whole text) into ``cache``; return the last token's logits, ``[vocabulary]``.

    ``cache`` holds exactly the tokens before the first step. ``on_step(start, end)`` runs after each step; an exception from
    it ends the prefill and leaves the cache at the end of that step. Raises CacheMismatchError for a cache that does not fit,
    UsageError for steps, ids or a mode of the model that would compute something else.
    """
    _check_steps(steps, len(token_ids))
    check_mode(model)
    check_cache(cache, geometry(model), steps[0][0])
    ids = id_tensor(model, token_ids)
    cache_name = cache_argument(model)
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(model) else {}
    logits: Tensor | None = None
    for start, end in steps:
        positions = torch.arange(start, end, device=ids.device)[None]
        # Not inference_mode: its tensors could not take part in a caller's own forward pass later.
        with torch.no_grad():
            output = model(
                input_ids=ids[:, start:end], position_ids=positions, use_cache=True, **{cache_name: cache}, **options
            )
        logits = output.logits[0, -1]
        if on_step is not None:
            on_step(start, end)
    assert logits is not None, "at least one step was checked above"
    return logits


def last_logits(model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache) -> Tensor:
    """Compute all that ``cache`` does not hold of ``token_ids`` in one step: the last one of the text. See :func:`prefill`."""
    return prefill(model, token_ids, cache, [(cache.get_seq_length(), len(token_ids))])


def check_mode(model: PreTrainedModel) -> None:
    """Raise UsageError where the model's or torch's mode makes it compute other values than its weights say."""
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes values", advice="Call model.eval().")
    if torch.is_autocast_enabled(model.device.type):
        raise UsageError("autocast computes in another dtype than the model's", advice="Call outside of torch.autocast.")


def _check_steps(steps: Sequence[Step], token_count: int) -> None:
    if not steps:
        raise UsageError("no step to compute", advice="Leave at least one token to compute: its logits are wanted.")
    joined = all(previous[1] == following[0] for previous, following in pairwise(steps))
    if not joined or not all(0 <= start < end <= token_count for start, end in steps):
        raise UsageError(f"steps {list(steps)} do not follow one another within {token_count} tokens")


def id_tensor(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return ``token_ids`` as the model takes them, ``[1, tokens]``. Raises UsageError for an id that it does not have."""
    vocabulary = int(model.config.vocab_size)
    if min(token_ids) < 0 or max(token_ids) >= vocabulary:
        raise UsageError(f"token ids are numbers below {vocabulary}", advice="Pass the ids of this model's tokenizer.")
    return torch.tensor([list(token_ids)], dtype=torch.long, device=model.device)
