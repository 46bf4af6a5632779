"""The index: which artifacts are known here, and which of their segments are held; SQLite in WAL mode.

What was committed survives a crash of the process. A ``durable`` change survives a power cut too: publishing uses it, after
the blocks were synced and before anything is announced. Fetched content does not need it, since it can be fetched again.
Readers have a connection of their own and never wait for a writer's sync.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from p2pkv.artifact.match import Match, bitmap
from p2pkv.artifact.read import Artifact
from p2pkv.errors import DiskFullError, MachineError, NotFoundError, StoreError, UnknownVersionError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_QUERY_KEYS, MAX_QUERY_MATCHES

SCHEMA_VERSION: Final = 1
_SCHEMA: Final = (
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
    "PRAGMA user_version = 1",
)

_ADD_ARTIFACT: Final = """
    INSERT INTO artifacts (
        manifest_cid, model_id, model_name, dtype, token_count, segment_count, publisher, sequence, created, expires,
        added, last_used
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (manifest_cid) DO UPDATE SET last_used = excluded.last_used
    RETURNING id
"""
# Artifacts with the same prefix share its nodes: what one holds, all hold.
_ADD_SEGMENT: Final = """
    INSERT OR IGNORE INTO segments (artifact, position, chain_key, node_cid, held)
    VALUES (?, ?, ?, ?, EXISTS (SELECT 1 FROM segments WHERE node_cid = ? AND held))
"""
_HOLD: Final = """
    UPDATE segments SET held = 1
    WHERE NOT held AND node_cid = (SELECT node_cid FROM segments WHERE artifact = ? AND position = ?)
"""
_COMPLETE: Final = """
    UPDATE artifacts SET complete = 1
    WHERE NOT complete
        AND id IN (SELECT artifact FROM segments WHERE node_cid IN (SELECT node_cid FROM segments WHERE artifact = ?))
        AND segment_count = (SELECT count(*) FROM segments WHERE artifact = artifacts.id AND held)
"""
_ARTIFACT_COLUMNS: Final = """
    SELECT manifest_cid, model_id, model_name, dtype, token_count, segment_count, publisher, sequence, created, expires,
        complete, added, last_used
    FROM artifacts
"""
_ARTIFACTS: Final = _ARTIFACT_COLUMNS + "ORDER BY id DESC"
_ARTIFACT: Final = _ARTIFACT_COLUMNS + "WHERE manifest_cid = ?"
# Of the artifacts behind one key, those that hold the segment come first, and then the newest.
_BY_CHAIN_KEY: Final = "SELECT artifact, position FROM segments WHERE chain_key = ? ORDER BY held DESC, artifact DESC LIMIT ?"

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


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """One row of the list of artifacts. ``complete`` says that all segments are held. Times are seconds since the epoch."""

    manifest_cid: Cid
    model_id: bytes
    model_name: str
    dtype: str
    token_count: int
    segment_count: int
    publisher: str
    sequence: int
    created: int
    expires: int | None
    complete: bool
    added: int
    last_used: int


@contextmanager
def _sqlite_errors(action: str) -> Iterator[None]:
    """Map every error of SQLite; ``action`` completes the sentence "cannot ..."."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)  # the module's own complaints have none
        cls, advice = _BY_SQLITE_CODE.get(code) or _BY_SQLITE_CODE.get(code & 0xFF) or (StoreError, None)
        raise cls(f"cannot {action}: {error}", advice=advice) from error


class ArtifactIndex:
    """The index file at ``path``, created where missing. Every method may be called from any thread.

    All methods raise DiskFullError and StoreError; opening raises UnknownVersionError for the file of a newer p2pkv.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
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

    def add_artifact(self, artifact: Artifact, held: Iterable[int], *, durable: bool = False) -> None:
        """Add an artifact, all or nothing; again to note more of its segments as held.

        ``held`` are positions (0 for the first segment) whose node and blocks are all stored. Segments that another artifact
        here holds count as held at once.
        """
        now = int(self._clock())
        manifest = artifact.manifest
        columns = (
            *(artifact.cid.binary, manifest.model_id, manifest.model_name, manifest.dtype.value, manifest.tokens.count),
            *(len(manifest.segments), manifest.publisher, manifest.sequence, manifest.created, manifest.expires, now, now),
        )
        with self._writing(f"add artifact {artifact.cid}", durable) as connection:
            ((row,),) = connection.execute(_ADD_ARTIFACT, columns).fetchall()
            segments = enumerate(zip(artifact.chain_keys, manifest.segments, strict=True))
            rows = [(row, position, key, node.binary, node.binary) for position, (key, node) in segments]
            connection.executemany(_ADD_SEGMENT, rows)
            self._hold(connection, row, held)

    def mark_held(self, manifest_cid: Cid, positions: Iterable[int], *, durable: bool = False) -> None:
        """Note that node and blocks of these segments are all stored. Raises NotFoundError for an unknown artifact."""
        with self._writing(f"update artifact {manifest_cid}", durable) as connection:
            found = connection.execute("SELECT id FROM artifacts WHERE manifest_cid = ?", (manifest_cid.binary,)).fetchone()
            if found is None:
                raise NotFoundError(f"artifact {manifest_cid} is not in the index of this node")
            self._hold(connection, found[0], positions)

    def touch(self, manifest_cid: Cid) -> None:
        """Note that an artifact was used now."""
        with self._writing(f"update artifact {manifest_cid}") as connection:
            connection.execute(
                "UPDATE artifacts SET last_used = ? WHERE manifest_cid = ?", (int(self._clock()), manifest_cid.binary)
            )

    def remove_artifact(self, manifest_cid: Cid) -> bool:
        """Forget an artifact, durably, and return whether it was known. Its blocks stay."""
        with self._writing(f"remove artifact {manifest_cid}", durable=True) as connection:
            return bool(connection.execute("DELETE FROM artifacts WHERE manifest_cid = ?", (manifest_cid.binary,)).rowcount)

    def match(self, chain_keys: Sequence[bytes]) -> list[Match]:
        """Return the artifacts that share the longest prefix with a text, longest first and then those that hold most.

        ``chain_keys`` are the keys after each segment in order, a tail's last, at most MAX_QUERY_KEYS; the answer has at most
        MAX_QUERY_MATCHES. The work is bounded by both, however many artifacts share a prefix.
        """
        if len(chain_keys) > MAX_QUERY_KEYS:
            raise UsageError(f"{len(chain_keys)} chain keys exceed {MAX_QUERY_KEYS}")
        found: dict[int, int] = {}
        with self._reading("look up chain keys") as connection:
            for key in reversed(chain_keys):
                if len(found) >= MAX_QUERY_MATCHES:
                    break
                # Fewer than MAX_QUERY_MATCHES rows can be of artifacts that a longer key has found already.
                for artifact, position in connection.execute(_BY_CHAIN_KEY, (key, 2 * MAX_QUERY_MATCHES)).fetchall():
                    found.setdefault(artifact, position + 1)
            matches = [_match(connection, artifact, matched) for artifact, matched in found.items()]
        matches.sort(key=lambda match: (match.matched, int.from_bytes(match.held, "little").bit_count()), reverse=True)
        return matches[:MAX_QUERY_MATCHES]

    def artifacts(self) -> list[StoredArtifact]:
        """Return all artifacts, the newest first."""
        with self._reading("list artifacts") as connection:
            return [_artifact(row) for row in connection.execute(_ARTIFACTS)]

    def artifact(self, manifest_cid: Cid) -> StoredArtifact | None:
        with self._reading(f"look up artifact {manifest_cid}") as connection:
            row = connection.execute(_ARTIFACT, (manifest_cid.binary,)).fetchone()
        return None if row is None else _artifact(row)

    def held_keys(self, manifest_cid: Cid) -> dict[int, bytes]:
        """Return the chain keys of the segments that are held, by position: what may be announced of an artifact."""
        query = """
            SELECT position, chain_key FROM segments
            WHERE artifact = (SELECT id FROM artifacts WHERE manifest_cid = ?) AND held ORDER BY position
        """
        with self._reading(f"look up artifact {manifest_cid}") as connection:
            return dict(connection.execute(query, (manifest_cid.binary,)).fetchall())

    def counts(self) -> tuple[int, int]:
        """Return how many artifacts are known, and how many of them are complete."""
        with self._reading("count artifacts") as connection:
            known, complete = connection.execute("SELECT count(*), total(complete) FROM artifacts").fetchone()
        return known, int(complete)

    @staticmethod
    def _hold(connection: sqlite3.Connection, artifact: int, positions: Iterable[int]) -> None:
        connection.executemany(_HOLD, [(artifact, position) for position in positions])
        connection.execute(_COMPLETE, (artifact,))

    @contextmanager
    def _writing(self, action: str, durable: bool = False) -> Iterator[sqlite3.Connection]:
        with self._write_lock, _sqlite_errors(action):
            # FULL syncs the log at commit, and with it all earlier commits.
            self._writer.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
            with _transaction(self._writer, "BEGIN IMMEDIATE"):
                yield self._writer

    @contextmanager
    def _reading(self, action: str) -> Iterator[sqlite3.Connection]:
        with self._read_lock, _sqlite_errors(action), _transaction(self._reader, "BEGIN"):
            yield self._reader


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
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise UnknownVersionError(
            f"the index {path} has version {version}; this p2pkv knows version {SCHEMA_VERSION}",
            advice="A newer p2pkv wrote it: upgrade, or choose another home with P2PKV_HOME.",
        )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if version == 0:
        with _transaction(connection, "BEGIN IMMEDIATE"):
            for statement in _SCHEMA:
                connection.execute(statement)


def _match(connection: sqlite3.Connection, artifact: int, matched: int) -> Match:
    query = "SELECT manifest_cid, segment_count FROM artifacts WHERE id = ?"
    manifest_cid, segments = connection.execute(query, (artifact,)).fetchone()
    rows = connection.execute("SELECT position FROM segments WHERE artifact = ? AND held", (artifact,)).fetchall()
    return Match(Cid.from_bytes(manifest_cid), matched, segments, bitmap((position for (position,) in rows), segments))


def _artifact(row: Sequence[Any]) -> StoredArtifact:
    """Turn a row of _ARTIFACT_COLUMNS, whose types the STRICT table guarantees, into its dataclass."""
    artifact = StoredArtifact(*row)
    return replace(artifact, manifest_cid=Cid.from_bytes(row[0]), complete=bool(artifact.complete))
