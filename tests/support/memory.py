"""A bound on the memory that a test may take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bounded_memory(limit: int) -> Iterator[None]:
    """Python's memory; what OpenSSL keeps for each connection is bounded with their number."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
