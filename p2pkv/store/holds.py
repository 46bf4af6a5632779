"""Who keeps an artifact from being collected: pins, which stay until they are taken away, and leases, which expire.

A pin has a name, and covers everything below a manifest. A download and a reader have leases: both know the manifest before
the artifact is listed, so a hold names a manifest, whether or not the artifact is here.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2pkv.errors import MachineError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_PIN_NAME_BYTES
from p2pkv.store.database import Database

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pin:
    """``created`` in seconds since the epoch."""

    name: str
    manifest_cid: Cid
    created: int


class Holds:
    """The pins and leases of ``database``. Safe from any thread; all methods raise DiskFullError and StoreError.

    ``copy`` is told all pins after each change of them, and may raise MachineError.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.time,
        copy: Callable[[list[Pin]], None] = lambda pins: None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._copy = copy
        self._copying = threading.Lock()

    def pin(self, name: str, manifest_cid: Cid) -> bool:
        """Keep an artifact for good, under ``name``; return whether it was not pinned under it before. Durable.

        Raises UsageError for a name that is empty or too long, NotFoundError for an artifact that is not listed here.
        """
        if not name.strip() or not name.isprintable() or len(name.encode()) > MAX_PIN_NAME_BYTES:
            raise UsageError(f"the name of a pin is text of up to {MAX_PIN_NAME_BYTES} bytes, in one line")
        with self._database.writing(f"pin {manifest_cid}", durable=True) as connection:
            if not connection.execute("SELECT 1 FROM artifacts WHERE manifest_cid = ?", (manifest_cid.binary,)).fetchone():
                raise NotFoundError(f"artifact {manifest_cid} is not in the index of this node", advice="Fetch it first.")
            row = (name, manifest_cid.binary, int(self._clock()))
            added = bool(connection.execute("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", row).rowcount)
        if added:
            self.keep_copy()
        return added

    def unpin(self, name: str, manifest_cid: Cid | None = None) -> int:
        """Take a pin away, or all of that name; return how many there were. Durable."""
        query = "DELETE FROM pins WHERE name = ? AND coalesce(?, manifest_cid) = manifest_cid"
        row = (name, manifest_cid.binary if manifest_cid is not None else None)
        with self._database.writing(f"take the pin {name} away", durable=True) as connection:
            removed = connection.execute(query, row).rowcount
        if removed:
            self.keep_copy()
        return removed

    def pins(self) -> list[Pin]:
        """Return all pins, by name and age."""
        with self._database.reading("list pins") as connection:
            rows = connection.execute("SELECT name, manifest_cid, created FROM pins ORDER BY name, created").fetchall()
        return [Pin(name, Cid.from_bytes(cid), created) for name, cid, created in rows]

    def keep_copy(self) -> None:
        """Bring the copy of the pins up to date; what prevents it is logged, and tried again at the next change or start."""
        with self._copying:  # whoever comes last has seen the changes of all before
            try:
                self._copy(self.pins())
            except MachineError as error:
                logger.warning("the copy of the pins is out of date: %s", error)

    def fill(self, pins: Iterable[Pin]) -> None:
        """Take pins over into an index that is made anew, whether or not what they name is listed. Durable."""
        rows = [(pin.name, pin.manifest_cid.binary, pin.created) for pin in pins]
        with self._database.writing("take over the pins", durable=True) as connection:
            connection.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", rows)

    def counts(self) -> tuple[int, int]:
        """Return how many pins there are, and how many leases that last."""
        query = "SELECT (SELECT count(*) FROM pins), (SELECT count(*) FROM leases WHERE expires > ?)"
        with self._database.reading("count pins and leases") as connection:
            ((pins, leases),) = connection.execute(query, (int(self._clock()),)).fetchall()
        return pins, leases

    def lease(self, manifest_cid: Cid, seconds: float) -> int:
        """Keep what belongs to ``manifest_cid`` for ``seconds``, and return the lease."""
        now = self._clock()
        with self._database.writing(f"lease {manifest_cid}") as connection:
            connection.execute("DELETE FROM leases WHERE expires <= ?", (int(now),))
            row = (manifest_cid.binary, int(now + seconds) + 1)
            found = connection.execute("INSERT INTO leases (manifest_cid, expires) VALUES (?, ?) RETURNING id", row).fetchall()
        ((lease,),) = found
        return int(lease)

    def renew(self, lease: int, seconds: float) -> None:
        """Let a lease last for ``seconds`` from now. Raises NotFoundError for one that has expired."""
        now = self._clock()
        with self._database.writing("renew a lease") as connection:
            query = "UPDATE leases SET expires = ? WHERE id = ? AND expires > ?"
            if not connection.execute(query, (int(now + seconds) + 1, lease, int(now))).rowcount:
                raise NotFoundError(
                    "the lease has expired", advice="Take another one, and look up again where the blocks lie."
                )

    def release(self, lease: int) -> None:
        """Let a lease go; one that has expired is gone already."""
        with self._database.writing("release a lease") as connection:
            connection.execute("DELETE FROM leases WHERE id = ?", (lease,))


def held_manifests(connection: sqlite3.Connection, now: float) -> set[bytes]:
    """Return the manifests that pins and leases keep at ``now``, within the transaction of whoever is about to collect."""
    return leased_manifests(connection, now) | {cid for (cid,) in connection.execute("SELECT manifest_cid FROM pins")}


def leased_manifests(connection: sqlite3.Connection, now: float) -> set[bytes]:
    """Return the manifests that leases keep at ``now``, within such a transaction: programs know where their blocks lie."""
    return {cid for (cid,) in connection.execute("SELECT manifest_cid FROM leases WHERE expires > ?", (int(now),))}
