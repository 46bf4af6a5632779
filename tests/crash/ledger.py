"""What a home may be held to after a kill: what came back in answers before it, and what keeps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from p2pkv.formats.cid import Cid


@dataclass
class Ledger:
    """Manifests. ``committed``: published or fetched whole; ``pinned`` and ``leased``, so that nothing collects them.

    Whoever takes something away from an artifact strikes it out before asking, and whoever adds writes it in after the answer:
    what happens in between is owed to nobody. Any thread.
    """

    committed: set[Cid] = field(default_factory=set)
    pinned: set[Cid] = field(default_factory=set)
    leased: set[Cid] = field(default_factory=set)
    collected: bool = False
    """Something may have been collected since the home was looked at."""
    _busy: dict[Cid, threading.Lock] = field(default_factory=dict)

    def owed(self) -> set[Cid]:
        """Return what has to be here, whole."""
        return self.pinned | self.leased if self.collected else set(self.committed)

    def settle(self, listed: set[Cid]) -> None:
        """What is not listed any more was collected, or was lost and is told of once."""
        self.committed &= listed
        self.pinned &= listed
        self.leased &= listed

    @contextmanager
    def turn(self, cid: Cid) -> Iterator[bool]:
        """Yield whether nobody else does something with this artifact, and keep it until the end of the block."""
        lock = self._busy.setdefault(cid, threading.Lock())
        mine = lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                lock.release()
