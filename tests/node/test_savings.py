"""What prefills were spared: only at a rate that was measured, and a loss counts as much as a gain."""

from __future__ import annotations

import pytest

from p2pkv.limits import MAX_PREFILL_RATES
from p2pkv_node.savings import Savings, ToldPrefill

MODEL, OTHER = b"\1" * 32, b"\2" * 32


def told(
    hit: int, loading_s: float, rate: float | None = None, *, model_id: bytes = MODEL, device: str = "cpu"
) -> ToldPrefill:
    return ToldPrefill(model_id, device, hit, loading_s, rate)


def test_nothing_is_said_before_a_rate_was_measured() -> None:
    savings = Savings()
    assert savings.add(told(1000, 0.5)) is None
    assert savings.add(told(0, 9.0)) is None  # what a miss cost would be half of the truth
    figures = savings.statistics()
    assert (figures.rated, figures.unrated, figures.computing_s, figures.loading_s, figures.saved_s) == (0, 2, 0, 0, 0)


def test_a_hit_is_worth_its_tokens_at_the_rate_that_was_told_last() -> None:
    savings = Savings()
    assert savings.add(told(0, 0.25, 100.0)) == -0.25  # the look-up that found nothing
    assert savings.add(told(1000, 2.0)) == 10.0 - 2.0
    assert savings.add(told(0, 0.25, 500.0)) == -0.25
    assert savings.add(told(1000, 2.0)) == 2.0 - 2.0
    figures = savings.statistics()
    assert (figures.rated, figures.unrated) == (4, 0)
    assert (figures.computing_s, figures.loading_s) == (12.0, 4.5)
    assert figures.saved_s == 7.5


def test_what_was_slower_than_computing_counts_against_it() -> None:
    savings = Savings()
    savings.add(told(0, 0.0, 1000.0))
    assert savings.add(told(1000, 5.0)) == -4.0
    assert savings.statistics().saved_s == -4.0


def test_a_rate_is_one_of_a_model_on_a_device() -> None:
    savings = Savings()
    savings.add(told(0, 0.0, 1000.0))
    assert savings.add(told(1000, 0.5, model_id=OTHER)) is None
    assert savings.add(told(1000, 0.5, device="cuda")) is None
    assert savings.add(told(1000, 0.5)) == 0.5


def test_the_rates_that_were_used_longest_ago_are_forgotten() -> None:
    savings = Savings()
    for number in range(MAX_PREFILL_RATES):
        savings.add(told(0, 0.0, 1.0, model_id=number.to_bytes(32, "big")))
    assert savings.add(told(1, 0.0, model_id=bytes(32))) == 1.0  # in use again
    savings.add(told(0, 0.0, 1.0, model_id=OTHER))
    assert savings.add(told(1, 0.0, model_id=bytes(32))) == 1.0
    assert savings.add(told(1, 0.0, model_id=(1).to_bytes(32, "big"))) is None


@pytest.mark.parametrize("rate", [0.01, 1e8])
def test_the_ends_of_what_is_taken(rate: float) -> None:
    assert Savings().add(told(262_144, 0.0, rate)) == pytest.approx(262_144 / rate)
