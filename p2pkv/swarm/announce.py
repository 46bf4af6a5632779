"""The announcing task of a node: drives the announcer engine over the routing port."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import trio

from p2pkv.routing.announcer import Announcer, AnnouncerStatistics
from p2pkv.swarm.context import Context

logger = logging.getLogger(__name__)


class AnnounceTask:
    """Keeps keys announced. :meth:`run` never returns by itself."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._announcer = Announcer(context.rng)
        self._wake = trio.Event()

    def add(self, keys: Iterable[bytes], *, delay_s: float = 0.0) -> None:
        """Keep ``keys`` announced from now on, or from ``delay_s`` later."""
        for key in keys:
            self._announcer.add(key, trio.current_time() + delay_s)
        self._wake.set()

    def repeat(self, keys: Iterable[bytes]) -> None:
        """Announce ``keys`` now, whenever they were announced last, and keep them announced."""
        for key in keys:
            self._announcer.repeat(key, trio.current_time())
        self._wake.set()

    def discard(self, keys: Iterable[bytes]) -> None:
        """Announce ``keys`` no longer; the records that others have expire where they are."""
        for key in keys:
            self._announcer.discard(key)
            self._context.routing.withdraw(key)

    def statistics(self) -> AnnouncerStatistics:
        return self._announcer.statistics(trio.current_time())

    async def run(self) -> None:
        while True:
            now = trio.current_time()
            key = self._announcer.next_due(now)
            if key is not None:
                reached = await self._context.routing.announce(key)
                if not reached:
                    logger.warning("no node could be told that we provide %s; trying again", key.hex())
                self._announcer.confirm(key, reached, trio.current_time())
                continue
            timer = self._announcer.get_timer(now)
            with trio.move_on_at(timer) if timer is not None else trio.CancelScope():
                await self._wake.wait()
            self._wake = trio.Event()
