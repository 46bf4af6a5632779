"""Who keeps an artifact from being collected: pins, which stay until they are taken away, and leases, which expire.

A pin has a name, and covers everything below a manifest. A download and a reader have leases: both know the manifest before
the artifact is listed, so a hold names a manifest, whether or not the artifact is here.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from p2pkv.errors import NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_PIN_NAME_BYTES
from p2pkv.store.database import Database


@dataclass(frozen=True, slots=True)
class Pin:
    """``created`` in seconds since the epoch."""

    name: str
    manifest_cid: Cid
    created: int


class Holds:
    """The pins and leases of ``database``. Safe from any thread; all methods raise DiskFullError and StoreError."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

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
            return bool(connection.execute("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", row).rowcount)

    def unpin(self, name: str, manifest_cid: Cid | None = None) -> int:
        """Take a pin away, or all of that name; return how many there were. Durable."""
        query = "DELETE FROM pins WHERE name = ?"
        with self._database.writing(f"take the pin {name} away", durable=True) as connection:
            if manifest_cid is None:
                return connection.execute(query, (name,)).rowcount
            return connection.execute(f"{query} AND manifest_cid = ?", (name, manifest_cid.binary)).rowcount

    def pins(self) -> list[Pin]:
        """Return all pins, by name and age."""
        with self._database.reading("list pins") as connection:
            rows = connection.execute("SELECT name, manifest_cid, created FROM pins ORDER BY name, created").fetchall()
        return [Pin(name, Cid.from_bytes(cid), created) for name, cid, created in rows]

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
    query = "SELECT manifest_cid FROM pins UNION SELECT manifest_cid FROM leases WHERE expires > ?"
    return {cid for (cid,) in connection.execute(query, (int(now),))}
