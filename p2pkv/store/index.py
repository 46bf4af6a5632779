"""The index: which artifacts are known here, and which of their segments are held.

Publishing makes ``durable`` changes, after the blocks were synced and before anything is announced. Fetched content does not
need it, since it can be fetched again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from p2pkv.artifact.match import Match, bitmap
from p2pkv.artifact.read import Artifact
from p2pkv.errors import NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_QUERY_KEYS, MAX_QUERY_MATCHES
from p2pkv.store.database import Database

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
_ARTIFACTS: Final = _ARTIFACT_COLUMNS + "ORDER BY id DESC LIMIT ?"  # below zero: all
_ARTIFACT: Final = _ARTIFACT_COLUMNS + "WHERE manifest_cid = ?"
# Of the artifacts behind one key, those that hold the segment come first, and then the newest.
_BY_CHAIN_KEY: Final = "SELECT artifact, position FROM segments WHERE chain_key = ? ORDER BY held DESC, artifact DESC LIMIT ?"


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


class ArtifactIndex:
    """The artifacts of ``database``. Every method may be called from any thread, and raises DiskFullError and StoreError."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def add_artifact(self, artifact: Artifact, held: Iterable[int], *, durable: bool = False) -> None:
        """Add an artifact, all or nothing; again to note more of its segments as held.

        ``held`` are positions (0 for the first segment) whose node and blocks are all stored. Segments that another artifact
        here holds count as held at once.
        """
        columns = _columns(artifact, int(self._clock()))
        with self._database.writing(f"add artifact {artifact.cid}", durable=durable) as connection:
            ((row,),) = connection.execute(_ADD_ARTIFACT, columns).fetchall()
            segments = enumerate(zip(artifact.chain_keys, artifact.manifest.segments, strict=True))
            rows = [(row, position, key, node.binary, node.binary) for position, (key, node) in segments]
            connection.executemany(_ADD_SEGMENT, rows)
            self._hold(connection, row, held)

    def fill(self, artifacts: Iterable[tuple[Artifact, Collection[int]]]) -> None:
        """List many artifacts in an empty index, all or nothing, each with exactly the segments at the positions given.

        Raises what ``artifacts`` raises.
        """
        now = int(self._clock())
        with self._database.writing("list what is stored", durable=True) as connection:
            for artifact, held in artifacts:
                ((row,),) = connection.execute(_ADD_ARTIFACT, _columns(artifact, now)).fetchall()
                segments = zip(artifact.chain_keys, artifact.manifest.segments, strict=True)
                rows = [(row, i, key, node.binary, i in held) for i, (key, node) in enumerate(segments)]
                connection.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?)", rows)
                if len(held) == len(rows):
                    connection.execute("UPDATE artifacts SET complete = 1 WHERE id = ?", (row,))

    def mark_held(self, manifest_cid: Cid, positions: Iterable[int], *, durable: bool = False) -> None:
        """Note that node and blocks of these segments are all stored. Raises NotFoundError for an unknown artifact."""
        with self._database.writing(f"update artifact {manifest_cid}", durable=durable) as connection:
            found = connection.execute("SELECT id FROM artifacts WHERE manifest_cid = ?", (manifest_cid.binary,)).fetchone()
            if found is None:
                raise NotFoundError(f"artifact {manifest_cid} is not in the index of this node")
            self._hold(connection, found[0], positions)

    def touch(self, manifest_cid: Cid) -> None:
        """Note that an artifact was used now."""
        with self._database.writing(f"update artifact {manifest_cid}") as connection:
            connection.execute(
                "UPDATE artifacts SET last_used = ? WHERE manifest_cid = ?", (int(self._clock()), manifest_cid.binary)
            )

    def remove_artifact(self, manifest_cid: Cid) -> bool:
        """Forget an artifact that is not pinned, durably, and return whether there was one. Its blocks stay."""
        query = "DELETE FROM artifacts WHERE manifest_cid = ? AND manifest_cid NOT IN (SELECT manifest_cid FROM pins)"
        with self._database.writing(f"remove artifact {manifest_cid}", durable=True) as connection:
            return bool(connection.execute(query, (manifest_cid.binary,)).rowcount)

    def match(self, chain_keys: Sequence[bytes]) -> list[Match]:
        """Return the artifacts that share the longest prefix with a text, longest first and then those that hold most.

        Of equals the one with the highest sequence number comes first: what a publisher signed last.

        ``chain_keys`` are the keys after each segment in order, a tail's last, at most MAX_QUERY_KEYS; the answer has at most
        MAX_QUERY_MATCHES. The work is bounded by both, however many artifacts share a prefix.
        """
        if len(chain_keys) > MAX_QUERY_KEYS:
            raise UsageError(f"{len(chain_keys)} chain keys exceed {MAX_QUERY_KEYS}")
        found: dict[int, int] = {}
        with self._database.reading("look up chain keys") as connection:
            for key in reversed(chain_keys):
                if len(found) >= MAX_QUERY_MATCHES:
                    break
                # Fewer than MAX_QUERY_MATCHES rows can be of artifacts that a longer key has found already.
                for artifact, position in connection.execute(_BY_CHAIN_KEY, (key, 2 * MAX_QUERY_MATCHES)).fetchall():
                    found.setdefault(artifact, position + 1)
            matches = [_match(connection, artifact, matched) for artifact, matched in found.items()]
        matches.sort(key=_rank, reverse=True)
        return [match for match, _ in matches[:MAX_QUERY_MATCHES]]

    def artifacts(self, limit: int | None = None) -> list[StoredArtifact]:
        """Return the artifacts, the newest first, at most ``limit``."""
        with self._database.reading("list artifacts") as connection:
            return [_artifact(row) for row in connection.execute(_ARTIFACTS, (-1 if limit is None else limit,))]

    def artifact(self, manifest_cid: Cid) -> StoredArtifact | None:
        with self._database.reading(f"look up artifact {manifest_cid}") as connection:
            row = connection.execute(_ARTIFACT, (manifest_cid.binary,)).fetchone()
        return None if row is None else _artifact(row)

    def held_keys(self, manifest_cid: Cid) -> dict[int, bytes]:
        """Return the chain keys of the segments that are held, by position: what may be announced of an artifact."""
        query = """
            SELECT position, chain_key FROM segments
            WHERE artifact = (SELECT id FROM artifacts WHERE manifest_cid = ?) AND held ORDER BY position
        """
        with self._database.reading(f"look up artifact {manifest_cid}") as connection:
            return dict(connection.execute(query, (manifest_cid.binary,)).fetchall())

    def counts(self) -> tuple[int, int]:
        """Return how many artifacts are known, and how many of them are complete."""
        with self._database.reading("count artifacts") as connection:
            known, complete = connection.execute("SELECT count(*), total(complete) FROM artifacts").fetchone()
        return known, int(complete)

    @staticmethod
    def _hold(connection: sqlite3.Connection, artifact: int, positions: Iterable[int]) -> None:
        connection.executemany(_HOLD, [(artifact, position) for position in positions])
        connection.execute(_COMPLETE, (artifact,))


def _columns(artifact: Artifact, now: int) -> tuple[object, ...]:
    """Return what _ADD_ARTIFACT takes."""
    manifest = artifact.manifest
    return (
        *(artifact.cid.binary, manifest.model_id, manifest.model_name, manifest.dtype.value, manifest.tokens.count),
        *(len(manifest.segments), manifest.publisher, manifest.sequence, manifest.created, manifest.expires, now, now),
    )


def _match(connection: sqlite3.Connection, artifact: int, matched: int) -> tuple[Match, int]:
    """Return how an artifact matches, and the sequence number of its manifest."""
    query = "SELECT manifest_cid, segment_count, sequence FROM artifacts WHERE id = ?"
    manifest_cid, segments, sequence = connection.execute(query, (artifact,)).fetchone()
    rows = connection.execute("SELECT position FROM segments WHERE artifact = ? AND held", (artifact,)).fetchall()
    held = bitmap((position for (position,) in rows), segments)
    return Match(Cid.from_bytes(manifest_cid), matched, segments, held), sequence


def _rank(found: tuple[Match, int]) -> tuple[int, int, int]:
    match, sequence = found
    return match.matched, int.from_bytes(match.held, "little").bit_count(), sequence


def _artifact(row: Sequence[Any]) -> StoredArtifact:
    """Turn a row of _ARTIFACT_COLUMNS, whose types the STRICT table guarantees, into its dataclass."""
    artifact = StoredArtifact(*row)
    return replace(artifact, manifest_cid=Cid.from_bytes(row[0]), complete=bool(artifact.complete))
