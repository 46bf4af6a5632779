"""The index file: SQLite in WAL mode, its schema with every step to the present one, and transactions with mapped errors.

What was committed survives a crash of the process. A ``durable`` change survives a power cut too. Readers have a connection of
their own and never wait for a writer's sync.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from p2pkv.errors import DiskFullError, MachineError, StoreError, UnknownVersionError
from p2pkv.limits import MAX_CHECKED_INDEX_BYTES
from p2pkv.store.files import os_errors

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

DAMAGED_ADVICE: Final = (
    "Restart the node: it moves a damaged index aside and lists anew what the packs hold. If this comes back, stop it, move "
    "every file whose name starts with index.sqlite out of the home, and start it again. Then check the disk."
)
_MAGIC: Final = b"SQLite format 3\0"
# What is wrong with an index that is not there, or has no tables yet.
MISSING: Final = "is missing"
# SQLite's extended or primary result code -> what the caller gets; every other one is a StoreError with its usual advice.
_BY_SQLITE_CODE: Final[dict[int, tuple[type[MachineError], str | None]]] = {
    sqlite3.SQLITE_FULL: (DiskFullError, None),
    sqlite3.SQLITE_IOERR_SHMSIZE: (DiskFullError, None),
    sqlite3.SQLITE_NOTADB: (StoreError, DAMAGED_ADVICE),
    sqlite3.SQLITE_CORRUPT: (StoreError, DAMAGED_ADVICE),
}


class LostIndexError(Exception):
    """A file is no index to go on with: ``fault`` says why, in words that follow its name.

    Of no code: the one who opens the index of a home makes it anew, and nobody else asks.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault


class Database:
    """The file at ``path``, created where missing. Every method may be called from any thread.

    ``checked`` looks at it first, at its structure up to MAX_CHECKED_INDEX_BYTES, and raises LostIndexError where it is
    damaged, missing or without tables. All methods raise DiskFullError and StoreError; opening raises
    UnknownVersionError for the file of a newer p2pkv, whatever else is wrong with it.
    """

    def __init__(self, path: Path, *, checked: bool = False) -> None:
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        if checked:
            _check_head(path)
        with _sqlite_errors(f"open the index {path}"), _damage_is_loss() if checked else nullcontext():
            self._writer = _connect(path)
            try:
                if checked:
                    _check(self._writer)
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

    def settle(self) -> None:
        """Bring all that was committed into the file itself, durably, so that it needs no log. Nobody uses it meanwhile."""
        with self._read_lock, self._write_lock, _sqlite_errors("write the log of the index into it"):
            (busy, *_) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not busy, "both connections are idle"

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


@contextmanager
def _damage_is_loss() -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise LostIndexError(f"is damaged: {error}") from error
        raise


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


def _check_head(path: Path) -> None:
    """Raise LostIndexError for what is no file of SQLite, which SQLite itself might change; StoreError."""
    with os_errors(f"look at the index {path}"):
        try:
            with path.open("rb") as file:
                head = file.read(len(_MAGIC))
        except FileNotFoundError:
            head = b""
    if head != _MAGIC:
        raise LostIndexError("is damaged: file is not a database" if head else MISSING)


def _check(connection: sqlite3.Connection) -> None:
    """Raise LostIndexError where the file has no tables, or where its structure is damaged."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 0 <= version <= SCHEMA_VERSION:
        return
    (pages,), (page_bytes,) = (connection.execute(f"PRAGMA {of}").fetchone() for of in ("page_count", "page_size"))
    if pages * page_bytes <= MAX_CHECKED_INDEX_BYTES:
        (fault,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise LostIndexError(f"is damaged: {fault.strip().splitlines()[-1]}")
    if version == 0:
        raise LostIndexError(MISSING)


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
