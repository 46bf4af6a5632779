"""Long work on files, in a worker thread that tells how far it is and ends where nobody waits for it any more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import trio

from p2pkv.store.progress import Progress, Step

Result = TypeVar("Result")
# As often as a fetch tells: a bar that moves smoothly, and little work for the event loop.
_INTERVAL_S: Final = 0.05


async def in_worker(work: Callable[[Progress], Result], hear: Progress, limiter: trio.CapacityLimiter) -> Result:
    """Return what ``work`` returns, done in a thread of ``limiter``; ``hear`` is called on the event loop.

    ``work`` calls what it is handed often: it is how a cancelled task ends its thread.
    """
    told, step_told = -math.inf, Step.WAITING

    def tell(step: Step, done: int, total: int) -> None:
        nonlocal told, step_told
        trio.from_thread.check_cancelled()
        now = time.monotonic()
        if step is not step_told or now - told >= _INTERVAL_S:
            told, step_told = now, step
            trio.from_thread.run_sync(hear, step, done, total)

    if not limiter.available_tokens:
        hear(Step.WAITING, 0, 0)
    return await trio.to_thread.run_sync(partial(work, tell), limiter=limiter)
