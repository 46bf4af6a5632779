"""Files that lie in memory alone, for what reads files and is to be fed many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_memory(data: bytes, mode: int = 0o600) -> Iterator[int]:
    """Yield the descriptor of a plain file with ``data``."""
    descriptor = os.memfd_create("test")
    try:
        os.fchmod(descriptor, mode)
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def file_in_memory(data: bytes, mode: int = 0o600) -> Iterator[Path]:
    """Yield the path of a plain file with ``data``, while it is open."""
    with in_memory(data, mode) as descriptor:
        yield Path(f"/proc/self/fd/{descriptor}")
