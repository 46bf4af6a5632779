"""What a peer program and the bench say to each other: one JSON object a line on stdout, one word a line on stdin.

A seeder says how it is reached as soon as it is ready, and lives until its stdin ends. A receiver says ``{"held_bytes": n}``
when it is ready, and then does what it is told: ``go`` transfers and answers with :func:`result`; ``verify`` answers with the
digest of what it has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from p2pkv.units import MIB

HOST: Final = "127.0.0.1"
READ_BYTES: Final = MIB


def say(**message: Any) -> None:
    """Say one thing to the bench."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def hear(word: str) -> None:
    """Wait for ``word``; the process ends when the bench is gone or says something else."""
    if sys.stdin.readline().strip() != word:
        leave()


def stay() -> None:
    """Wait until the bench is done with this process. Blocking."""
    sys.stdin.read()


def leave() -> None:
    """End this process at once, whatever threads a foreign library still runs."""
    sys.stdout.flush()
    os._exit(0)


class Stopwatch:
    """Runs from its making. :meth:`first_byte` may be called often; the first call counts."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None

    def first_byte(self) -> None:
        if self._first is None:
            self._first = time.perf_counter() - self._start

    def result(self) -> dict[str, float]:
        """Return what ``go`` is answered with: seconds until now, and until the first byte."""
        seconds = time.perf_counter() - self._start
        return {"seconds": seconds, "first_byte_s": seconds if self._first is None else self._first}


def digest(chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the BLAKE3 of ``chunks``, joined, in hexadecimal."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def file_digest(path: Path) -> str:
    """Return the BLAKE3 of a file in hexadecimal."""
    with path.open("rb") as file:
        return digest(iter(lambda: file.read(READ_BYTES), b""))
