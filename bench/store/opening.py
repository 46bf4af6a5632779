"""Opening a home with many blocks: closed in order, and as a killed daemon left it.

``python -m bench.store.opening HOME``: open it once, and say how long that took.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.settle import settle
from p2pkv.store.home import HomeLayout
from p2pkv.store.pack import read_contents
from p2pkv.store.store import open_store
from p2pkv.units import MIB

_OPEN_BYTES: Final = 64 * MIB  # what the index of many blocks takes in memory, about


@dataclass(frozen=True, slots=True)
class Homes:
    """Two homes with the same blocks: ``closed`` in order, and ``killed`` while it was written to, never opened again."""

    closed: Path
    killed: Path


@contextmanager
def filled_homes(folder: Path, blocks: int) -> Iterator[Homes]:
    """Fill both under ``folder`` with at least ``blocks`` blocks; they are removed at the end of the block."""
    homes = Homes(folder / "closed", folder / "killed")
    try:
        _fill_and_kill(homes.killed, blocks)
        shutil.copytree(homes.killed, homes.closed)
        with open_store(homes.closed):
            pass
        yield homes
    finally:
        shutil.rmtree(homes.closed, ignore_errors=True)
        shutil.rmtree(homes.killed, ignore_errors=True)


def measure_opening(homes: Homes, folder: Path, blocks: int, repetition: int) -> Iterator[dict[str, Any]]:
    """Open each home once in a fresh process and yield a row of each. What was read lately is in the page cache.

    Raises RuntimeError where blocks are missing, or where the killed home has no pack to walk.
    """
    opened = folder / "opened"
    cases = [("open", homes.closed), ("open_killed", homes.killed)]
    for name, home in cases[:: 1 if repetition % 2 else -1]:
        try:
            shutil.copytree(home, opened)  # opening changes what a kill left, and the next has to find it again
            if _has_unsealed(opened) != (name == "open_killed"):
                raise RuntimeError(f"{home} was not left as {name} wants it")
            settle([], _OPEN_BYTES)
            answer = subprocess.run(
                [sys.executable, "-m", "bench.store.opening", str(opened)], stdout=subprocess.PIPE, check=True
            ).stdout
        finally:
            shutil.rmtree(opened, ignore_errors=True)
        row = {"case": name, "repetition": repetition, **json.loads(answer)}
        if row["blocks"] < blocks:
            raise RuntimeError(f"{row['blocks']} of {blocks} blocks were found in {home}")
        yield row


def _fill_and_kill(home: Path, blocks: int) -> None:
    command = [sys.executable, "-m", "bench.store.filling", str(home), str(blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filling:
        assert filling.stdout is not None, "it was started with pipes"
        filled = filling.stdout.readline()
        filling.kill()
    if not filled:
        raise RuntimeError(f"{home} could not be filled")


def _has_unsealed(home: Path) -> bool:
    for path in HomeLayout(home).blocks.iterdir():
        with path.open("rb") as pack:
            if not read_contents(pack.fileno()).sealed:
                return True
    return False


def main() -> None:
    home = Path(sys.argv[1])
    start = time.perf_counter()
    with open_store(home) as store:
        seconds = time.perf_counter() - start
        blocks = store.statistics().blocks
    sys.stdout.write(json.dumps({"seconds": seconds, "blocks": blocks}) + "\n")


if __name__ == "__main__":
    main()
