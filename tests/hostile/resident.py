"""``python -m tests.hostile.resident``: run every attack of this folder once and print what each took of resident memory.

In a process of its own, because C code (libsodium, protobuf, hashes) takes memory that ``tracemalloc`` does not see, and
nothing else may be taking any meanwhile. Prints one object of JSON: bytes by attack.
"""

from __future__ import annotations

import importlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from p2pkv.errors import P2pkvError
from tests.hostile.attack import Attack

_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc_pid_clear_refs(5)


def attacks() -> dict[str, Attack]:
    """Return all attacks that stand in tables, by module and name."""
    modules = (
        importlib.import_module(f"tests.hostile.{path.stem}") for path in sorted(Path(__file__).parent.glob("test_*.py"))
    )
    return {f"{module.__name__}: {attack}": attack for module in modules for attack in getattr(module, "ATTACKS", [])}


def _peak() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def taken_by(attack: Attack) -> int:
    """Return by how many bytes the peak of an attack is above what is resident before it, its feed included."""
    feed = () if attack.feed is None else (attack.feed(),)
    _CLEAR.write_text(_RESET_PEAK)
    before = _peak()
    with suppress(P2pkvError):
        attack.run(*feed)
    return _peak() - before


if __name__ == "__main__":
    print(json.dumps({name: taken_by(attack) for name, attack in attacks().items()}))
