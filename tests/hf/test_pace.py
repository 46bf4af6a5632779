"""How fast a prefill was: only whole steps at the front of a text tell, and not the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from transformers import LlamaForCausalLM

from p2pkv.connectors.hf.geometry import open_cache
from p2pkv.connectors.hf.pace import Pace
from p2pkv.connectors.hf.prefill import Step, canonical_steps, prefill


def seconds() -> Iterator[float]:
    """A clock on which each look takes two seconds."""
    return count(10.0, 2.0)


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        (canonical_steps(256), None),
        (canonical_steps(300), None),
        (canonical_steps(512), 256 / 2),
        (canonical_steps(600), 256 / 2),
        (canonical_steps(1024), 768 / 2),
        (canonical_steps(1024)[:-1], 512 / 2),
        (canonical_steps(2000, shared=700), 256 / 2),
        (canonical_steps(2000, shared=100), None),  # whole steps, but of another grid and with a short one before
        (canonical_steps(2048, start=512), None),
        ([], None),
    ],
)
def test_what_tells(model: LlamaForCausalLM, steps: list[Step], rate: float | None) -> None:
    clock = seconds()
    pace = Pace(model, steps, clock=lambda: next(clock))
    for step in steps:
        pace(*step)
    assert pace.tokens_per_s == rate


def test_a_prefill_that_was_broken_off_tells_nothing(model: LlamaForCausalLM) -> None:
    clock = seconds()
    pace = Pace(model, canonical_steps(1024), clock=lambda: next(clock))
    pace(0, 256)
    pace(256, 512)
    assert pace.tokens_per_s is None


def test_a_clock_that_stands_still_tells_nothing(model: LlamaForCausalLM) -> None:
    pace = Pace(model, canonical_steps(1024), clock=lambda: 1.0)
    for step in canonical_steps(1024):
        pace(*step)
    assert pace.tokens_per_s is None


def test_it_listens_to_a_prefill(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    steps = canonical_steps(600)
    pace = Pace(model, steps)
    prefill(model, token_ids, open_cache(model), steps, pace)
    assert pace.tokens_per_s is not None
    assert pace.tokens_per_s > 0
