"""The index file: SQLite in WAL mode, its schema with every step to the present one, and transactions with mapped errors.

What was committed survives a crash of the process. A ``durable`` change survives a power cut too. Readers have a connection of
their own and never wait for a writer's sync.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from p2pkv.errors import DiskFullError, MachineError, StoreError, UnknownVersionError

# What each version adds to the one before it: a new file takes all steps, an older one those that it lacks.
_STEPS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """
        CREATE TABLE artifacts (
            id INTEGER PRIMARY KEY,
            manifest_cid BLOB NOT NULL UNIQUE,
            model_id BLOB NOT NULL,
            model_name TEXT NOT NULL,
            dtype TEXT NOT NULL,
            token_count INTEGER NOT NULL,
            segment_count INTEGER NOT NULL,
            publisher TEXT NOT NULL,
            sequence INTEGER NOT NULL,
            created INTEGER NOT NULL,
            expires INTEGER,
            complete INTEGER NOT NULL DEFAULT 0,
            added INTEGER NOT NULL,
            last_used INTEGER NOT NULL
        ) STRICT
        """,
        """
        CREATE TABLE segments (
            artifact INTEGER NOT NULL REFERENCES artifacts (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            chain_key BLOB NOT NULL,
            node_cid BLOB NOT NULL,
            held INTEGER NOT NULL,
            PRIMARY KEY (artifact, position)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX segments_by_chain_key ON segments (chain_key, held, artifact)",
        "CREATE INDEX segments_by_node ON segments (node_cid)",
    ),
    (
        # Neither refers to `artifacts`: a lease is taken before an artifact is listed.
        """
        CREATE TABLE pins (
            name TEXT NOT NULL,
            manifest_cid BLOB NOT NULL,
            created INTEGER NOT NULL,
            PRIMARY KEY (name, manifest_cid)
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE leases (
            id INTEGER PRIMARY KEY,
            manifest_cid BLOB NOT NULL,
            expires INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE TABLE downloads (manifest_cid BLOB PRIMARY KEY, begun INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    ),
)
SCHEMA_VERSION: Final = len(_STEPS)

_DAMAGED_ADVICE: Final = (
    "Move every file whose name starts with index.sqlite out of the home and start again: blocks and keys stay, and fetching "
    "or publishing an artifact again lists it without another transfer."
)
# SQLite's extended or primary result code -> what the caller gets; every other one is a StoreError with its usual advice.
_BY_SQLITE_CODE: Final[dict[int, tuple[type[MachineError], str | None]]] = {
    sqlite3.SQLITE_FULL: (DiskFullError, None),
    sqlite3.SQLITE_IOERR_SHMSIZE: (DiskFullError, None),
    sqlite3.SQLITE_NOTADB: (StoreError, _DAMAGED_ADVICE),
    sqlite3.SQLITE_CORRUPT: (StoreError, _DAMAGED_ADVICE),
}


class Database:
    """The file at ``path``, created where missing. Every method may be called from any thread.

    All methods raise DiskFullError and StoreError; opening raises UnknownVersionError for the file of a newer p2pkv.
    """

    def __init__(self, path: Path) -> None:
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        with _sqlite_errors(f"open the index {path}"):
            self._writer = _connect(path)
            try:
                _prepare(self._writer, path)
                self._reader = _connect(path)
            except BaseException:
                self._writer.close()
                raise

    def close(self) -> None:
        """Close the file; later calls raise StoreError."""
        with self._read_lock, self._write_lock, _sqlite_errors("close the index"):
            self._reader.close()
            self._writer.close()

    @contextmanager
    def writing(self, action: str, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Change all or nothing; ``action`` completes the sentence "cannot ..."."""
        with self._write_lock, _sqlite_errors(action):
            # FULL syncs the log at commit, and with it all earlier commits.
            self._writer.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
            with _transaction(self._writer, "BEGIN IMMEDIATE"):
                yield self._writer

    @contextmanager
    def reading(self, action: str) -> Iterator[sqlite3.Connection]:
        """Look at one state of the file."""
        with self._read_lock, _sqlite_errors(action), _transaction(self._reader, "BEGIN"):
            yield self._reader


@contextmanager
def _sqlite_errors(action: str) -> Iterator[None]:
    """Map every error of SQLite; ``action`` completes the sentence "cannot ..."."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)  # the module's own complaints have none
        cls, advice = _BY_SQLITE_CODE.get(code) or _BY_SQLITE_CODE.get(code & 0xFF) or (StoreError, None)
        raise cls(f"cannot {action}: {error}", advice=advice) from error


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk ends some transactions by itself
            with suppress(sqlite3.Error):  # the first error is the one to report
                connection.execute("ROLLBACK")
        raise


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file to the present version, in one transaction: killed in the middle, it is what it was."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 0 <= version <= SCHEMA_VERSION:
        raise UnknownVersionError(
            f"the index {path} has version {version}; this p2pkv knows version {SCHEMA_VERSION}",
            advice="A newer p2pkv wrote it: upgrade, or choose another home with P2PKV_HOME.",
        )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if version < SCHEMA_VERSION:
        with _transaction(connection, "BEGIN IMMEDIATE"):
            for statement in (statement for step in _STEPS[version:] for statement in step):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
