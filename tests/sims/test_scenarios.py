"""The scenarios keep what the project promises of transfers from many peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from p2pkv.limits import MAX_DUPLICATE_SHARE
from sims.__main__ import main
from sims.content import Content, make_content
from sims.run import Result, run
from sims.scenarios import BASE, SCENARIOS, Scenario, Seeder

ROOT = Path(__file__).parents[2]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
WIRE_RATIO = 1.02


@cache
def content() -> Content:
    return make_content(256, seed=1)


@cache
def result(name: str, seed: int = 1) -> Result:
    return run(BY_NAME[name], content(), seed, base_s=None if name == BASE else result(BASE, seed).time_s)


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS if scenario.consumers == 1])
def test_everybody_gets_everything_and_nobody_is_punished_wrongly(name: str) -> None:
    of = result(name)
    assert of.incomplete == 0
    assert of.wrongly_punished == 0
    assert of.duplicate_ratio <= MAX_DUPLICATE_SHARE
    if name != "one_lies":
        assert of.wire_ratio <= WIRE_RATIO


@pytest.mark.parametrize(("name", "bound"), [("four_seeders", 0.30), ("one_slow", 0.36)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_more_peers_are_faster(name: str, bound: float, seed: int) -> None:
    assert result(name, seed).time_ratio <= bound


@pytest.mark.parametrize("stalls_at", [0.3, 0.7, 1.1])
def test_a_stalled_peer_costs_half_a_second_at_most(stalls_at: float) -> None:
    scenario = Scenario("stall", "", (*(Seeder(),) * 3, Seeder(stalls_at=stalls_at)))
    assert run(scenario, content(), 1).cost_s <= 0.5


def test_a_liar_is_gone_after_its_first_bad_block() -> None:
    assert result("one_lies").bad_blocks == 1


def test_peers_that_join_are_used() -> None:
    of = result("three_join")
    assert of.time_ratio < 0.62
    assert of.publisher_copies < 0.62


@pytest.mark.slow
@pytest.mark.timeout(240)  # computes for 15 s, on a machine that is busy for much longer
def test_a_flash_crowd() -> None:
    of = result("flash_crowd")
    assert of.incomplete == of.wrongly_punished == 0
    assert of.time_ratio <= 2.5
    assert of.publisher_copies <= 3
    assert of.wire_ratio <= WIRE_RATIO


def test_equal_seeds_give_equal_traces_in_other_processes(tmp_path: Path) -> None:
    hashes = []
    for number, hash_seed in enumerate(("0", "1")):
        file = tmp_path / f"{number}.json"
        subprocess.run(
            [sys.executable, "-m", "sims", "run", "one_leaves", "--seed", "7", "--json", str(file)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
        hashes.append(json.loads(file.read_text())["one_leaves"]["trace_hash"])
    assert hashes[0] == hashes[1]
    assert hashes[0] != result("one_leaves").trace_hash  # of another seed


def test_list_names_all_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)


def test_a_fetch_that_does_not_end_well_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Scenario("gone", "The only seeder leaves.", (Seeder(leaves_at=0.5),), blocks=64)
    monkeypatch.setattr("sims.__main__.SCENARIOS", (BY_NAME[BASE], gone))
    assert main(["run", "gone"]) == 1
