"""Work in a thread that is heard on the event loop: not more often than a bar needs, and ended with its task."""

from __future__ import annotations

import threading
import time

import pytest
import trio

from p2pkv.store.progress import Progress, Step
from p2pkv_node.worker import _INTERVAL_S, in_worker


async def test_it_returns_what_the_work_returns_and_tells_each_step() -> None:
    heard: list[tuple[Step, int, int]] = []
    loop = threading.get_ident()

    def work(tell: Progress) -> str:
        assert threading.get_ident() != loop
        tell(Step.READING, 0, 2)
        tell(Step.SYNCING, 2, 2)
        return "done"

    def hear(step: Step, done: int, total: int) -> None:
        assert threading.get_ident() == loop
        heard.append((step, done, total))

    assert await in_worker(work, hear, trio.CapacityLimiter(1)) == "done"
    assert heard == [(Step.READING, 0, 2), (Step.SYNCING, 2, 2)]


@pytest.mark.parametrize("total", [0, 5000])
async def test_it_tells_no_more_than_a_bar_needs(total: int) -> None:
    """Also where nobody knows how much there is, or all of it is done."""
    heard: list[int] = []
    started = time.monotonic()

    def work(tell: Progress) -> None:
        for _ in range(5000):
            tell(Step.VERIFYING, total, total)

    await in_worker(work, lambda step, done, total: heard.append(done), trio.CapacityLimiter(1))
    assert 1 <= len(heard) <= 1 + (time.monotonic() - started) / _INTERVAL_S


async def test_a_cancelled_task_ends_its_thread() -> None:
    ended = threading.Event()

    def work(tell: Progress) -> None:
        try:
            while True:
                tell(Step.READING, 0, 1)
        finally:
            ended.set()

    with trio.fail_after(20), trio.CancelScope() as scope:
        await in_worker(work, lambda step, done, total: scope.cancel(), trio.CapacityLimiter(1))
    assert scope.cancelled_caught
    assert ended.is_set()


async def test_an_error_of_the_work_is_raised() -> None:
    def work(tell: Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await in_worker(work, lambda step, done, total: None, trio.CapacityLimiter(1))
