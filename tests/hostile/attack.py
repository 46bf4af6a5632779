"""One attack, and what has to come of it: the right error by name, within bounds of memory and time."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import pytest

from p2pkv.errors import P2pkvError
from p2pkv.units import MIB

MEMORY_BYTES: Final = 64 * MIB
"""What refusing may take beyond the bytes that came: whoever can fill a node can stop it."""

# No measurement, which a busy machine would spoil, but a promise with room: bounds on size, depth and count keep whatever
# anybody sends from taking longer. Attacks take milliseconds; one that gets past a bound takes minutes. What counts is the
# time of this thread on a processor, so others on the machine change nothing.
SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Attack:
    """``run`` of what ``feed`` returns has to raise exactly ``error``; making the feed does not count.

    One with a ``name`` stands in the table ``ATTACKS`` of its module: what memory it takes, ``test_resident`` measures.
    """

    name: str
    run: Callable[..., object]
    error: type[P2pkvError]
    feed: Callable[[], object] | None = None

    def __str__(self) -> str:
        return self.name


def given(data: object) -> Callable[[], object]:
    """Return the feed that is ``data``."""
    return lambda: data


def assert_refused(attack: Attack) -> P2pkvError:
    """Run ``attack`` for its time, where it stands in no table once more for its memory, and return the error."""
    run = attack.run if attack.feed is None else partial(attack.run, attack.feed())
    began = time.thread_time()
    error = _refusal(run, attack.error)
    assert time.thread_time() - began < SECONDS
    if not attack.name:
        tracemalloc.start()
        try:
            _refusal(run, attack.error)
            assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
        finally:
            tracemalloc.stop()
    assert error.code == attack.error.code
    assert len(str(error)) < 1000  # whatever was sent
    return error


def _refusal(run: Callable[[], object], expected: type[P2pkvError]) -> P2pkvError:
    with pytest.raises(P2pkvError) as caught:
        run()
    assert type(caught.value) is expected, f"{caught.value!r}"
    return caught.value
