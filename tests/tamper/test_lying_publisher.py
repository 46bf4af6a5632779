"""A publisher who is trusted and signs wrong values: what ``verify=sample`` sees of it, and what not."""

from __future__ import annotations

import random
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.trust.detection import detected
from bench.trust.manipulations import MANIPULATIONS, noise
from bench.trust.subject import Subject, measure
from p2pkv import Client
from p2pkv.formats.tensors import Dtype
from p2pkv.trust.spot_check import draw_positions
from tests.client.conftest import REPORT, ScriptedDaemon, matched, segments
from tests.support.lies import signed_values
from tests.support.llama import cache_bytes, local_cache
from tests.tamper.conftest import tiny

# In fp32 rounding hides nothing of these: each is seen by a few positions, in every draw.
ALWAYS = sorted(MANIPULATIONS.keys() - {"honest", "changed_token"})
DRAWS = 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ALWAYS)
def test_a_manipulation_is_always_seen_in_fp32(honest: Subject, name: str) -> None:
    rng = random.Random(name)
    measured = measure(honest, MANIPULATIONS[name](honest, rng))
    assert detected(measured, Dtype.FP32, 8, DRAWS, rng) == 1.0


@pytest.mark.timeout(600)
def test_honest_values_are_never_refused(honest: Subject) -> None:
    measured = measure(honest, honest.honest)
    for count in (1, 8, 128):
        assert detected(measured, Dtype.FP32, count, DRAWS, random.Random(count)) == 0.0


@pytest.mark.timeout(600)
def test_one_changed_token_is_seen_at_its_position_alone(honest: Subject) -> None:
    """All later values follow from the given ones: the share of draws that see it is that of the positions."""
    given = MANIPULATIONS["changed_token"](honest, random.Random(2))
    measured = measure(honest, given)
    rates = {count: detected(measured, Dtype.FP32, count, 300, random.Random(count)) for count in (8, 128, honest.tokens)}
    assert rates[8] < 0.1
    assert 0.1 < rates[128] < 0.35  # 128 of 600
    assert rates[honest.tokens] == 1.0


def test_bf16_hides_what_is_smaller_than_its_rounding_and_nothing_that_is_far_larger() -> None:
    found = tiny(torch.bfloat16)
    larger = ("noise_10_all", "noise_100_all", "swapped_segments", "shifted_positions", "rolled_dimensions")
    lies = {name: MANIPULATIONS[name] for name in larger} | {"small": partial(noise, size=0.001, where="all")}
    rates = {}
    for name, manipulate in lies.items():
        rng = random.Random(name)
        rates[name] = detected(measure(found, manipulate(found, rng)), Dtype.BF16, 8, DRAWS, rng)
    assert rates.pop("small") == 0.0
    assert set(rates.values()) == {1.0}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["swapped_segments", "adapter", "noise_1_layer"])
def test_nothing_of_it_is_loaded_and_the_answer_is_that_of_a_local_prefill(tmp_path: Path, honest: Subject, name: str) -> None:
    lie = signed_values(honest.model, honest.token_ids, MANIPULATIONS[name](honest, random.Random(name)))
    prompt = [*honest.token_ids, 7, 8, 9]
    daemon = ScriptedDaemon(tmp_path / "home")
    daemon.hold(lie[1])
    daemon.scripts.append([matched(lie[0]), *segments(lie, 0, 1, 2), REPORT])
    with closing(daemon.blocks), daemon.running(), Client(daemon.home) as client:
        found = client.prefill(honest.model, prompt, shared=honest.tokens, verify="sample=8")
    assert "[integrity.values]" in (found.report.miss or "")
    assert found.report.hit_tokens == 0
    assert cache_bytes(found.cache) == cache_bytes(local_cache(honest.model, prompt, honest.tokens))


def test_positions_are_drawn_when_the_values_are_here(
    tmp_path: Path, honest: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who knew them beforehand would be honest there alone: they follow from nothing that a publisher can know."""
    sealed = signed_values(honest.model, honest.token_ids, honest.honest)
    drawn: list[list[int]] = []

    def draw(tokens: int, count: int, rng: random.Random) -> list[int]:
        assert isinstance(rng, random.SystemRandom)
        drawn.append(draw_positions(tokens, count, rng))
        return drawn[-1]

    monkeypatch.setattr("p2pkv.client.verification.draw_positions", draw)
    daemon = ScriptedDaemon(tmp_path / "home")
    daemon.hold(sealed[1])
    events = [matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]
    daemon.scripts += [events, events]
    with closing(daemon.blocks), daemon.running(), Client(daemon.home) as client:
        for _ in range(2):
            found = client.prefill(honest.model, [*honest.token_ids, 7], shared=honest.tokens, verify="sample=64")
            assert found.report.hit_tokens == honest.tokens
    assert drawn[0] != drawn[1]
