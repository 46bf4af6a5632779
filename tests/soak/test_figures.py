"""The verdict of a soak: what grows is found, what only goes up and down is not."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from bench.processes import NodeProcess
from p2pkv.formats.cid import Cid
from p2pkv.store.store import open_store
from p2pkv.units import MIB
from tests.soak.figures import ALLOWANCES, GROWTH_SHARE, Figures, look_at, verdicts

_SAMPLES = 200
_PARENT = """
import subprocess, threading
memory = bytearray(32 << 20)
files = [open("/dev/null"), open("/dev/null")]
threading.Thread(target=threading.Event().wait, daemon=True).start()
subprocess.run(["sh", "-c", "echo ready; read line"])
"""


def samples(figure: str, value: Callable[[float], float]) -> list[Figures]:
    """Return samples of a node in which one figure is ``value`` of the share of the time that has passed."""
    moments = (number / _SAMPLES for number in range(1, _SAMPLES + 1))
    return [Figures(moment, **{**dict.fromkeys(ALLOWANCES, 100.0), figure: value(moment)}) for moment in moments]


def grown(found: list[Figures]) -> list[str]:
    return [verdict.figure for verdict in verdicts("node", found) if not verdict.flat]


def test_every_figure_is_judged() -> None:
    assert {field.name for field in fields(Figures)} == {"seconds", *ALLOWANCES}


@pytest.mark.parametrize("figure", ALLOWANCES)
def test_what_grows_is_found(figure: str) -> None:
    bound = ALLOWANCES[figure] + 100 * GROWTH_SHARE
    # Half the time lies between the middle of the second quarter and that of the last.
    assert grown(samples(figure, lambda moment: 100 + 2.2 * bound * moment)) == [figure]
    assert grown(samples(figure, lambda moment: 100 + 1.8 * bound * moment)) == []


def test_a_start_and_noise_are_no_growth() -> None:
    noise = itertools.cycle((0.0, 40.0, -40.0, 5.0))
    assert grown(samples("rss_mib", lambda moment: (50.0 if moment < 0.2 else 200.0) + next(noise))) == []
    assert grown(samples("tasks", lambda moment: 200.0 - 100.0 * moment)) == []


def test_figures_of_a_process_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.figures.metric", lambda node, name: 7.0)
    with open_store(tmp_path) as store:
        store.write(Cid.of_block(bytes(MIB)), bytes(MIB))
        command = [sys.executable, "-c", _PARENT]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = look_at(NodeProcess(tmp_path, process, "", ""), 3.0)
            process.stdin.write("end\n")
    assert (found.seconds, found.tasks) == (3.0, 7.0)
    assert found.rss_mib > found.children_rss_mib > 0.2
    assert found.threads == 3
    assert found.open_files == 5 + 3
    assert 0 < found.index_mib + found.wal_mib < 1
    assert found.packs_mib >= 1
