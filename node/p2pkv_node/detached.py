"""Runs library calls to their end even when whoever waits for them is cancelled.

A py-libp2p call that is cancelled in the middle of a write leaves half a frame behind (or a used-up Noise nonce), and the
connection breaks for every stream on it. So every call that writes runs in a task of the network: a cancelled caller leaves
at once, and the call still ends whole, within its own deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from p2pkv.errors import P2pkvError, PeerUnreachableError
from p2pkv_node.libp2p_errors import translated

T = TypeVar("T")


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.done = trio.Event()
        self.abandoned = False
        self.results: list[T] = []
        self.error: P2pkvError | None = None


class Detached:
    """A nursery for such calls; it ends with the network."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._open = True

    def close(self) -> None:
        """Refuse new calls and cancel the running ones."""
        self._open = False
        self._nursery.cancel_scope.cancel()

    def start(self, task: Callable[[], Awaitable[None]]) -> bool:
        """Run ``task`` in the background; it must raise nothing. Once closed, runs nothing and returns ``False``."""
        if self._open:
            self._nursery.start_soon(task)
        return self._open

    async def run(
        self,
        call: Callable[[], Awaitable[T]],
        *,
        doing: str,
        timeout: float,  # noqa: ASYNC109 - the deadline belongs to the task, not to the caller
        discard: Callable[[T], Awaitable[None]] | None = None,
    ) -> T:
        """Return what ``call`` returns; its foreign exceptions come as p2pkv errors that say ``doing``.

        A result that nobody waits for any more goes to ``discard``. Raises PeerUnreachableError after ``timeout`` seconds.
        """
        outcome: _Outcome[T] = _Outcome()

        async def task() -> None:
            try:
                with translated(doing), trio.fail_after(timeout):
                    outcome.results.append(await call())
                if outcome.abandoned and discard is not None:
                    with trio.move_on_after(timeout):
                        await discard(outcome.results[0])
            except P2pkvError as error:
                outcome.error = error
            finally:
                outcome.done.set()

        if not self._open:
            raise PeerUnreachableError(f"{doing} failed: the network is closed")
        self._nursery.start_soon(task)
        try:
            await outcome.done.wait()
        except trio.Cancelled:
            outcome.abandoned = True
            raise
        if outcome.error is not None:
            raise outcome.error
        if not outcome.results:
            raise PeerUnreachableError(f"{doing} failed: the network is closed")
        return outcome.results[0]
