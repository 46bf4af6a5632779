"""Spot checks of KV values: which tokens to recompute, and what the comparison says. Models are elsewhere."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from p2pkv.trust.tolerances import Tolerance


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the given keys, or values, of some tokens lie from the recomputed ones (see :mod:`p2pkv.trust.tolerances`).

    ``layer`` and ``position`` say where the worst deviation is.
    """

    mean: float
    worst: float
    layer: int
    position: int
    tolerance: Tolerance

    @property
    def within(self) -> bool:
        """Whether honest rounding explains it; ``False`` for NaN."""
        return self.mean <= self.tolerance.mean and self.worst <= self.tolerance.worst


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """The comparison of ``positions`` tokens of all layers; ``same_stack`` says which bounds were taken."""

    positions: int
    same_stack: bool
    keys: Deviation
    values: Deviation

    @property
    def passed(self) -> bool:
        return self.keys.within and self.values.within

    def __str__(self) -> str:
        halves = (("keys", self.keys), ("values", self.values))
        name, shown = max(halves, key=lambda half: (not half[1].within, half[1].worst))
        return (
            f"{name} deviate by {shown.worst:.2g} (tolerance {shown.tolerance.worst:.2g}) at token {shown.position} in layer "
            f"{shown.layer}, on average by {shown.mean:.2g} (tolerance {shown.tolerance.mean:.2g})"
        )


def draw_positions(tokens: int, count: int, rng: random.Random) -> list[int]:
    """Return ``count`` different positions of ``tokens`` tokens in order, a random one of each of ``count`` equal stretches.

    So every token is as likely as any other, and every stretch of 2 * tokens / count tokens is hit for certain; all
    positions where ``count`` is not below ``tokens``. No position is always among them: one that is known beforehand tells
    a publisher where to be honest.
    """
    count = min(count, tokens)
    bounds = [index * tokens // count for index in range(count + 1)]
    return [rng.randrange(start, end) for start, end in pairwise(bounds)]
