"""Drawing positions, and judging deviations."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.formats.tensors import Dtype
from p2pkv.trust.spot_check import Deviation, draw_positions
from p2pkv.trust.tolerances import CALIBRATED_LAYERS, Tolerance, tolerances


@settings(deadline=None)  # some draws are of a thousand positions
@given(st.integers(1, 5000), st.integers(1, 1200), st.randoms(use_true_random=False))
def test_as_many_positions_as_asked_for_one_of_each_stretch(tokens: int, count: int, rng: random.Random) -> None:
    drawn = draw_positions(tokens, count, rng)
    assert len(drawn) == min(count, tokens)
    assert drawn == sorted(set(drawn))
    for index, position in enumerate(drawn):
        assert index * tokens // len(drawn) <= position < (index + 1) * tokens // len(drawn)


def test_every_position_is_as_likely_as_any_other() -> None:
    rng = random.Random(1)
    seen = Counter(position for _ in range(4000) for position in draw_positions(40, 4, rng))
    assert set(seen) == set(range(40))
    assert min(seen.values()) > 300
    assert max(seen.values()) < 500


@pytest.mark.parametrize(
    ("mean", "worst", "within"),
    [(1.0, 2.0, True), (1.1, 1.5, False), (0.5, 2.1, False), (math.nan, 1.0, False), (0.5, math.nan, False)],
)
def test_both_the_mean_and_the_worst_have_to_be_within(mean: float, worst: float, within: bool) -> None:
    assert Deviation(mean, worst, 0, 0, Tolerance(1.0, 2.0)).within is within


@pytest.mark.parametrize("dtype", Dtype)
def test_bounds_widen_with_layers_beyond_the_calibrated_ones(dtype: Dtype) -> None:
    for same_stack in (True, False):
        calibrated = tolerances(dtype, CALIBRATED_LAYERS, same_stack=same_stack)
        assert tolerances(dtype, 1, same_stack=same_stack) == calibrated
        for found, bound in zip(tolerances(dtype, 2 * CALIBRATED_LAYERS, same_stack=same_stack), calibrated, strict=True):
            assert found == Tolerance(2 * bound.mean, 2 * bound.worst)


def test_another_stack_is_allowed_at_least_as_much() -> None:
    for dtype in Dtype:
        same, other = (tolerances(dtype, 1, same_stack=same_stack) for same_stack in (True, False))
        for narrow, wide in zip(same, other, strict=True):
            assert narrow.mean <= wide.mean
            assert narrow.worst <= wide.worst
