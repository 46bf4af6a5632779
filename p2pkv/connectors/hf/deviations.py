"""Compare given KV with recomputed KV: the deviation of each token in each layer, in the terms of :mod:`p2pkv.trust`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from p2pkv.connectors.hf.cache import layer_tensors
from p2pkv.connectors.hf.geometry import bits, geometry
from p2pkv.connectors.hf.recompute import KV, recompute
from p2pkv.connectors.hf.stack import producer_stack
from p2pkv.trust.spot_check import Deviation, SpotCheck
from p2pkv.trust.tolerances import Tolerance, tolerances

# A deviation beyond this is no nearer to the truth than this.
FARTHEST: Final = 1e9


def spot_check(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    cache: DynamicCache,
    positions: Sequence[int],
    producer: Mapping[str, str],
) -> SpotCheck:
    """Recompute the tokens at ``positions`` over ``cache``, which stays as it is, and compare. Raises as ``recompute`` does.

    ``producer`` is the stack that a manifest names.
    """
    recomputed = recompute(model, token_ids, cache, positions)
    places = torch.tensor(positions)
    given = [
        (keys[0].index_select(1, places.to(keys.device)), values[0].index_select(1, places.to(values.device)))
        for keys, values in layer_tensors(cache)
    ]
    return judge_values(model, given, recomputed, positions, same_stack=is_same_stack(model, producer))


def compare_caches(
    model: PreTrainedModel, given: DynamicCache, computed: DynamicCache, producer: Mapping[str, str]
) -> SpotCheck | None:
    """Compare all tokens of two caches of the same length; return ``None`` where they are equal bit for bit.

    On the same stack honest caches are: one that is not deviates, by however little.
    """
    theirs, ours = layer_tensors(given), layer_tensors(computed)
    pairs = ((one[half], other[half]) for one, other in zip(theirs, ours, strict=True) for half in (0, 1))
    if all(torch.equal(bits(one), bits(other)) for one, other in pairs):
        return None
    positions = range(given.get_seq_length())
    given_kv, computed_kv = ([(keys[0], values[0]) for keys, values in layers] for layers in (theirs, ours))
    same = is_same_stack(model, producer)
    return judge_values(model, given_kv, computed_kv, positions, same_stack=same, exact=same)


def is_same_stack(model: PreTrainedModel, producer: Mapping[str, str]) -> bool:
    """Return whether ``producer``, the stack that a manifest names, is the one that ``model`` computes on."""
    return producer_stack(model).items() <= producer.items()


def judge_values(
    model: PreTrainedModel,
    given: Sequence[KV],
    recomputed: Sequence[KV],
    positions: Sequence[int],
    *,
    same_stack: bool,
    exact: bool = False,
) -> SpotCheck:
    """Compare keys and values ``[kv_heads, positions, dim]`` of all layers; ``exact`` allows no deviation at all."""
    bounds = tolerances(geometry(model).dtype, len(given), same_stack=same_stack)
    judged = []
    for half, tolerance in enumerate(bounds):
        squares = mean_squares([kv[half] for kv in given], [kv[half] for kv in recomputed])
        judged.append(summarise(relative(*squares), positions, Tolerance(0.0, 0.0) if exact else tolerance))
    return SpotCheck(len(positions), same_stack, *judged)


def mean_squares(given: Sequence[Tensor], recomputed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean squares of difference and of recomputed values over heads and dimensions, ``[layers, positions]``.

    ``given`` and ``recomputed`` are ``[kv_heads, positions, dim]`` for each layer.
    """
    difference, scale = [], []
    for theirs, ours in zip(given, recomputed, strict=True):
        reference = ours.float()
        difference.append((theirs.float() - reference).square().mean(dim=(0, 2)).cpu())
        scale.append(reference.square().mean(dim=(0, 2)).cpu())
    return torch.stack(difference), torch.stack(scale)


def relative(difference: Tensor, scale: Tensor) -> Tensor:
    """Return the deviation of each token in each layer from :func:`mean_squares`.

    The scale is that of the recomputed values, which whoever gave the others cannot choose.
    """
    return (difference / scale.mean(dim=1, keepdim=True)).sqrt()


def summarise(measured: Tensor, positions: Sequence[int], tolerance: Tolerance) -> Deviation:
    """Return the mean and the worst of ``measured``, ``[layers, positions]``.

    Values that overflow give infinity or NaN: these count as FARTHEST, since reports are JSON, which knows neither.
    """
    numbers = measured.double().nan_to_num(nan=FARTHEST, posinf=FARTHEST).clamp(max=FARTHEST)
    layer, place = divmod(int(numbers.argmax()), numbers.shape[1])
    return Deviation(float(numbers.mean()), float(numbers[layer, place]), layer, positions[place], tolerance)
