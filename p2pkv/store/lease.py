"""A lease that lives as long as the work it is taken for, however long that takes, and not much longer than its process."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pkv.formats.cid import Cid
from p2pkv.store.holds import Holds
from p2pkv.store.progress import Progress, Step


class WorkLease:
    """Keeps what belongs to ``manifest`` for ``seconds`` from the last :meth:`keep`. For one thread.

    ``clock`` gives seconds that never go back. All methods raise DiskFullError and StoreError.
    """

    def __init__(self, holds: Holds, manifest: Cid, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._holds = holds
        self._seconds = seconds
        self._clock = clock
        self._lease = holds.lease(manifest, seconds)
        self._due = clock() + seconds / 2

    def keep(self) -> None:
        """Say that the work goes on: to be called often. Raises NotFoundError where it paused for longer than the lease."""
        if self._clock() >= self._due:
            self._holds.renew(self._lease, self._seconds)
            self._due = self._clock() + self._seconds / 2

    def kept_by(self, on_progress: Progress) -> Progress:
        """Return what tells ``on_progress`` how far the work is, and keeps the lease meanwhile."""

        def hear(step: Step, done: int, total: int) -> None:
            self.keep()
            on_progress(step, done, total)

        return hear

    def release(self) -> None:
        """Let go; without it the lease ends by itself."""
        self._holds.release(self._lease)
