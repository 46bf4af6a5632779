"""A few of the kills that ``make test-crash`` does in hundreds."""

from __future__ import annotations

import random
from pathlib import Path

from tests.crash.__main__ import Crashes


def test_a_kill_at_any_moment_loses_nothing_and_damages_nothing(tmp_path: Path) -> None:
    crashes = Crashes(tmp_path / "home", random.randrange(1 << 30))
    for _ in range(12):
        crashes.run_once()
    assert (crashes.lost, crashes.damaged_served) == ([], [])
