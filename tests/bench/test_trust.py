"""What ``bench.trust`` makes of its rows, and that its lies leave the honest values as they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from bench.trust.detection import POSITIONS, detected
from bench.trust.figures import figures, kept
from bench.trust.manipulations import MANIPULATIONS
from bench.trust.subject import Measured, Subject, subject
from p2pkv.formats.tensors import Dtype
from tests.support.llama import build_model, random_tokens


@pytest.fixture(scope="module")
def honest() -> Subject:
    return subject(build_model(), random_tokens(600))


def detection(manipulation: str, dtype: Dtype, text: str, rate: float) -> dict[str, Any]:
    case = {"case": f"{manipulation}_{dtype}", "manipulation": manipulation, "dtype": dtype.value, "text": text}
    return case | {f"detect_{count}": rate for count in POSITIONS}


def test_figures_are_means_over_texts_and_shares_of_the_median_fetch() -> None:
    rows = [
        {"case": "costs", "sign_s": 0.01, "verify_s": 0.02, "hash_s": 0.1},
        *({"case": "fetch", "fetch_s": seconds} for seconds in (0.5, 9.0, 1.0)),
        detection("adapter", Dtype.BF16, "one", 0.5),
        detection("adapter", Dtype.BF16, "other", 1.0),
        detection("adapter", Dtype.FP32, "one", 1.0),
        {"case": "cost_fp32", **{f"sample_{count}_s": count / 100 for count in POSITIONS}, "full_s": 5.0},
    ]
    found = figures(rows)
    assert found["detect_adapter_8"] == 0.75
    assert found["detect_adapter_128_fp32"] == 1.0
    assert found["sample_32_s_fp32"] == 0.32
    assert "sample_32_s" not in found
    assert found["verify_share_of_fetch"] == pytest.approx(0.03)
    assert found["hash_share_of_fetch"] == pytest.approx(0.1)


@pytest.mark.parametrize(("fetch_s", "alarms", "expected"), [(1.0, 0.0, [True, True]), (0.5, 0.01, [False, False])])
def test_promises_are_judged(fetch_s: float, alarms: float, expected: list[bool]) -> None:
    rows = [
        {"case": "costs", "sign_s": 0.01, "verify_s": 0.02, "hash_s": 0.1},
        {"case": "fetch", "fetch_s": fetch_s},
        detection("honest", Dtype.BF16, "one", alarms),
    ]
    assert list(kept(figures(rows)).values()) == expected


@pytest.mark.parametrize("name", MANIPULATIONS)
def test_a_lie_changes_something_and_leaves_the_honest_values(honest: Subject, name: str) -> None:
    before = [(keys.clone(), values.clone()) for keys, values in honest.honest]
    weights = [parameter.clone() for parameter in honest.model.parameters()]
    given = MANIPULATIONS[name](honest, random.Random(1))
    same = [
        torch.equal(a, b) for one, other in zip(given, honest.honest, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert all(same) is (name == "honest")
    for one, other in zip(honest.honest, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(honest.model.parameters(), weights, strict=True))


def test_a_draw_sees_what_lies_at_its_positions() -> None:
    """One wrong token of a hundred: seen in a tenth of the draws of ten."""
    scale = torch.ones(4, 100)
    difference = torch.zeros(4, 100)
    difference[2, 50] = 1.0
    measured = Measured((torch.zeros(4, 100), scale), (difference, scale))
    assert detected(measured, Dtype.FP32, 100, 5, random.Random(1)) == 1.0
    assert 0.05 < detected(measured, Dtype.FP32, 10, 400, random.Random(1)) < 0.15


def test_a_quorum_costs_what_it_adds_to_the_fetch_of_a_prompt() -> None:
    rows = [
        {"case": f"quorum_{case}", "prompt_s": prompt_s, "quorum_s": quorum_s, "prompt_bytes": size, "quorum_bytes": more}
        for case, prompt_s, quorum_s, size, more in [
            ("agreeing", 0.5, 9.0, 1000, 1100),
            ("agreeing", 0.6, 0.7, 1500, 1600),
            ("agreeing", 0.7, 0.1, 2000, 2100),
            ("differing", 1.0, 3.0, 1000, 1700),
        ]
    ]
    found = figures(rows)
    assert found["prompt_s"] == 0.6
    assert found["quorum_agreeing_s"] == pytest.approx(0.1)
    assert found["quorum_differing_s"] == pytest.approx(2.0)
    assert (found["quorum_agreeing_bytes"], found["quorum_differing_bytes"]) == (100, 700)
