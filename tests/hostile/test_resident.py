"""No attack takes more memory than it may, of whatever kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pkv.units import MIB
from tests.hostile.attack import MEMORY_BYTES, Attack
from tests.hostile.resident import attacks, taken_by

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of resident memory")


def test_every_attack_stays_within_the_bound() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "node")])}
    command = [sys.executable, "-m", "tests.hostile.resident"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout
    taken: dict[str, int] = json.loads(printed)
    assert len(taken) > 2000
    assert {name: size for name, size in taken.items() if size >= MEMORY_BYTES} == {}


def test_every_attack_has_a_name_of_its_own() -> None:
    names = [name for name, _ in attacks()]
    assert len(set(names)) == len(names)
    assert all(attack.name for _, attack in attacks())


def test_memory_that_is_taken_is_seen() -> None:
    taken = taken_by(Attack("", lambda: bytearray(os.urandom(16 * MIB)), ValueError))  # type: ignore[arg-type]  # raises nothing
    assert taken >= 16 * MIB
