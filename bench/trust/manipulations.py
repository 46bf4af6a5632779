"""What a publisher who lies could sign: the values of a text, manipulated in one way or another."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from bench.trust.subject import KV, Subject, compute
from p2pkv.limits import SEGMENT_TOKENS

Manipulation = Callable[[Subject, random.Random], list[KV]]
# Noise, relative to the root mean square of what it is added to.
SIZES: Final = {"1": 0.01, "10": 0.1, "100": 1.0}


def swapped_segments(found: Subject, rng: random.Random) -> list[KV]:
    """Two whole segments in one another's place, in all layers."""
    first, second = (SEGMENT_TOKENS * index for index in rng.sample(range(found.tokens // SEGMENT_TOKENS), 2))
    order = torch.arange(found.tokens)
    order[first : first + SEGMENT_TOKENS] = torch.arange(second, second + SEGMENT_TOKENS)
    order[second : second + SEGMENT_TOKENS] = torch.arange(first, first + SEGMENT_TOKENS)
    return [(keys[:, :, order], values[:, :, order]) for keys, values in found.honest]


def shifted_positions(found: Subject, rng: random.Random) -> list[KV]:
    """Keys rotated for the position behind their own: RoPE counted from one."""
    cos, sin = found.model.model.rotary_emb(found.honest[0][0], torch.tensor([[1]]))
    return [(_rotate(keys, cos, sin), values) for keys, values in found.honest]


def _rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = keys.float().chunk(2, dim=-1)
    return (keys.float() * cos.float() + torch.cat([-right, left], dim=-1) * sin.float()).to(keys.dtype)


def rolled_dimensions(found: Subject, rng: random.Random) -> list[KV]:
    """Every head's dimensions moved on by one, in keys and values."""
    return [(keys.roll(1, dims=-1), values.roll(1, dims=-1)) for keys, values in found.honest]


def noise(found: Subject, rng: random.Random, *, size: float, where: str) -> list[KV]:
    """Normal noise in all of the text, in one layer, or in one segment of all layers."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    layer = rng.randrange(len(found.honest)) if where == "layer" else None
    tokens = slice(None)
    if where == "segment":
        start = SEGMENT_TOKENS * rng.randrange(-(-found.tokens // SEGMENT_TOKENS))
        tokens = slice(start, start + SEGMENT_TOKENS)
    changed: list[KV] = []
    for index, (keys, values) in enumerate(found.honest):
        if layer in (None, index):
            keys, values = (_noised(half, tokens, size, generator) for half in (keys, values))
        changed.append((keys, values))
    return changed


def _noised(half: Tensor, tokens: slice, size: float, generator: torch.Generator) -> Tensor:
    result = half.clone()
    scale = size * half.float().square().mean().sqrt()
    place = result[:, :, tokens]
    place.add_((scale * torch.randn(place.shape, generator=generator)).to(half.dtype))
    return result


def other_model(found: Subject, rng: random.Random) -> list[KV]:
    """The KV of a model whose weights differ by 2 % of their standard deviation, as after a little more training."""
    changed = copy.deepcopy(found.model)
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    with torch.no_grad():
        for weight in changed.parameters():
            if weight.dim() == 2:
                delta = 0.02 * weight.float().std() * torch.randn(weight.shape, generator=generator)
                weight.add_(delta.to(weight.dtype))
    return compute(changed, found.token_ids)


def adapter(found: Subject, rng: random.Random) -> list[KV]:
    """The KV of the model with a low-rank change (rank 8, a tenth of the weight's norm) to keys and values of one layer."""
    changed = copy.deepcopy(found.model)
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    attention = changed.model.layers[rng.randrange(len(found.honest))].self_attn
    with torch.no_grad():
        for projection in (attention.k_proj, attention.v_proj):
            weight = projection.weight
            rows, columns = weight.shape
            delta = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
            weight.add_((0.1 * weight.float().norm() / delta.norm() * delta).to(weight.dtype))
    return compute(changed, found.token_ids)


def changed_token(found: Subject, rng: random.Random) -> list[KV]:
    """The KV of the text with one token replaced, signed for the text with the right one."""
    ids = list(found.token_ids)
    place = rng.randrange(len(ids))
    ids[place] = (ids[place] + rng.randrange(1, 1000)) % int(found.model.config.vocab_size)
    return compute(found.model, ids)


def scaled_keys(found: Subject, rng: random.Random) -> list[KV]:
    """The keys of one layer larger by a tenth."""
    layer = rng.randrange(len(found.honest))
    return [(keys * 1.1 if index == layer else keys, values) for index, (keys, values) in enumerate(found.honest)]


def honest(found: Subject, rng: random.Random) -> list[KV]:
    """Nothing manipulated: what is detected here is a false alarm."""
    return found.honest


MANIPULATIONS: Final[Mapping[str, Manipulation]] = {
    "honest": honest,
    "swapped_segments": swapped_segments,
    "shifted_positions": shifted_positions,
    "rolled_dimensions": rolled_dimensions,
    **{
        f"noise_{name}_{where}": partial(noise, size=size, where=where)
        for where in ("all", "segment", "layer")
        for name, size in SIZES.items()
    },
    "other_model": other_model,
    "adapter": adapter,
    "changed_token": changed_token,
    "scaled_keys": scaled_keys,
}
