"""A few of the kills that ``make test-crash`` does in hundreds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash.daemons import DaemonCrashes
from tests.crash.imitated import WorkerCrashes


def test_a_kill_at_any_moment_loses_nothing_and_damages_nothing(tmp_path: Path) -> None:
    crashes = WorkerCrashes(tmp_path / "home", random.randrange(1 << 30))
    for _ in range(12):
        crashes.run_once()
    assert (crashes.lost, crashes.damaged_served) == ([], [])


# httpx's transport leaves a unix socket to the garbage collector where nobody listens any more: the node was killed.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.*family=1:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_nor_does_the_kill_of_a_daemon_that_is_used(tmp_path: Path) -> None:
    with DaemonCrashes(tmp_path, random.randrange(1 << 30)) as crashes:
        for _ in range(2):
            crashes.run_once()
    assert (crashes.lost, crashes.damaged_served, crashes.slow_stops) == ([], [], [])
