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


def attacks() -> list[tuple[str, Attack]]:
    """Return all attacks that stand in tables, by module and name."""
    modules = (
        importlib.import_module(f"tests.hostile.{path.stem}") for path in sorted(Path(__file__).parent.glob("test_*.py"))
    )
    return [(f"{module.__name__}: {attack}", attack) for module in modules for attack in getattr(module, "ATTACKS", [])]


def _size(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def taken_by(attack: Attack) -> int:
    """Return by how many bytes the peak of an attack is above what is resident before it, its feed included."""
    feed = () if attack.feed is None else (attack.feed(),)
    _CLEAR.write_text(_RESET_PEAK)
    before = _size("VmHWM")
    with suppress(P2pkvError):
        attack.run(*feed)
    return _size("VmHWM") - before


def main() -> None:
    found = attacks()
    resident = _size("VmRSS")
    taken: dict[str, int] = {}
    for name, attack in found:
        # What earlier ones left is free for this one to take, and would not be seen.
        left = max(0, _size("VmRSS") - resident)
        taken[name] = left + taken_by(attack)
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
