"""The leases of programs that read an artifact where it lies: what one covers is never collected while it lasts."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from p2pkv.errors import NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_LEASES
from p2pkv.store.location import Location
from p2pkv.store.store import Store
from p2pkv.store.whole import open_whole

_NAME_BYTES: Final = 16


class Lent(NamedTuple):
    """A lease, when it expires (seconds since the epoch), and where everything of its artifact lies."""

    lease: str
    expires: float
    blocks: dict[Cid, Location | None]


@dataclass(slots=True)
class _Lease:
    number: int
    expires: float


class ReaderLeases:
    """Leases from ``store``, each with a name that nobody guesses: the index gives its numbers out again.

    The names end with the process; what they keep stays until it expires. ``clock`` gives seconds since the epoch. Safe
    from any thread. All methods raise DiskFullError and StoreError.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def take(self, manifest: Cid, seconds: float) -> Lent:
        """Keep a whole artifact for ``seconds``.

        Raises NotFoundError, FetchIncompleteError for one that is not whole, UsageError for more than MAX_LEASES, and what
        open_artifact raises.
        """
        expires = self._clock() + seconds
        number = self._store.lease(manifest, seconds)
        try:
            _, cids = open_whole(manifest, self._store.read(manifest), self._store)
            self._store.index.touch(manifest)
            name = self._name(_Lease(number, expires))
        except BaseException:
            self._store.holds.release(number)
            raise
        return Lent(name, expires, {cid: self._store.locate(cid) for cid in cids})

    def renew(self, name: str, seconds: float) -> float:
        """Let a lease last for ``seconds`` from now; return when it expires. Raises NotFoundError for one that is over."""
        expires = self._clock() + seconds
        with self._lock:
            lease = self._leases.get(name)
        if lease is None:
            raise NotFoundError("there is no such lease, or it is over", advice="Take another one.")
        self._store.renew(lease.number, seconds)
        lease.expires = expires
        return expires

    def release(self, name: str) -> bool:
        """Give a lease back; return whether there was one."""
        with self._lock:
            lease = self._leases.pop(name, None)
        if lease is None:
            return False
        self._store.holds.release(lease.number)
        return True

    def _name(self, lease: _Lease) -> str:
        now, name = self._clock(), secrets.token_hex(_NAME_BYTES)
        with self._lock:
            self._leases = {other: known for other, known in self._leases.items() if known.expires > now}
            if len(self._leases) >= MAX_LEASES:
                raise UsageError(f"there are {MAX_LEASES} leases already", advice="Give some back, or let them expire.")
            self._leases[name] = lease
        return name
