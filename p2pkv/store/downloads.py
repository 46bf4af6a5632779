"""Downloads under way: what a node that was stopped or killed goes on with at its next start."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pkv.formats.cid import Cid
from p2pkv.store.database import Database


class Downloads:
    """The downloads of ``database``. Safe from any thread; all methods raise DiskFullError and StoreError."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def begin(self, manifest_cid: Cid) -> None:
        """Note that an artifact is being fetched; again changes nothing."""
        with self._database.writing(f"note the download of {manifest_cid}") as connection:
            connection.execute("INSERT OR IGNORE INTO downloads VALUES (?, ?)", (manifest_cid.binary, int(self._clock())))

    def end(self, manifest_cid: Cid) -> None:
        """Note that it is here, failed, or is wanted no longer."""
        with self._database.writing(f"note the end of the download of {manifest_cid}") as connection:
            connection.execute("DELETE FROM downloads WHERE manifest_cid = ?", (manifest_cid.binary,))

    def unfinished(self) -> list[Cid]:
        """Return what has begun and not ended, the oldest first."""
        with self._database.reading("list downloads") as connection:
            rows = connection.execute("SELECT manifest_cid FROM downloads ORDER BY begun").fetchall()
        return [Cid.from_bytes(cid) for (cid,) in rows]
