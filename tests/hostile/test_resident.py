"""No attack takes more memory than it may, of whatever kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pkv.units import MIB
from tests.hostile.attack import MEMORY_BYTES
from tests.hostile.resident import attacks

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of resident memory")


def printed_by(*arguments: str) -> str:
    """Return what Python prints in a process of its own: in this one earlier tests' memory may be freed meanwhile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "node")])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def test_every_attack_stays_within_the_bound() -> None:
    taken: dict[str, int] = json.loads(printed_by("-m", "tests.hostile.resident"))
    assert len(taken) > 2000
    assert {name: size for name, size in taken.items() if size >= MEMORY_BYTES} == {}


def test_every_attack_has_a_name_of_its_own() -> None:
    names = [name for name, _ in attacks()]
    assert len(set(names)) == len(names)
    assert all(attack.name for _, attack in attacks())


def test_memory_that_is_taken_is_seen() -> None:
    code = f"""
from tests.hostile.attack import Attack
from tests.hostile.resident import taken_by
print(taken_by(Attack("", lambda: bytearray({16 * MIB}).replace(b"\\0", b"1"), ValueError)))
"""
    assert int(printed_by("-c", code)) >= 16 * MIB
