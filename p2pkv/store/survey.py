"""Looks at what a home holds without opening its store: whether or not a daemon has it, and without changing anything."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from p2pkv.errors import StoreError, UnknownVersionError
from p2pkv.store.database import DAMAGED_ADVICE, SCHEMA_VERSION
from p2pkv.store.files import os_errors
from p2pkv.store.location import is_pack, pack_number
from p2pkv.store.pack import Record, is_foreign, read_contents


@dataclass(frozen=True, slots=True)
class IndexSurvey:
    """Artifacts listed, and complete ones; ``newest`` is when the last one was added, in seconds since the epoch."""

    artifacts: int
    complete: int
    newest: int | None


@dataclass(frozen=True, slots=True)
class PackSurvey:
    """Packs and the blocks in them, each counted once, with their bytes; ``unreadable`` are files that gave nothing."""

    packs: int
    blocks: int
    bytes: int
    unreadable: tuple[str, ...]


def survey_index(path: Path) -> IndexSurvey | None:
    """Check the structure of the index and count what it lists; ``None`` where there is none.

    Raises StoreError for one that is damaged, UnknownVersionError for that of a newer p2pkv.
    """
    with _reading(path) as connection:
        if connection is None:
            return None
        (fault,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise StoreError(f"the index {path} is damaged: {fault.strip().splitlines()[-1]}", advice=DAMAGED_ADVICE)
        query = "SELECT count(*), total(complete), max(added) FROM artifacts"
        artifacts, complete, newest = connection.execute(query).fetchone() if _written(connection) else (0, 0, None)
    return IndexSurvey(artifacts, int(complete), newest)


def newest_sequence(path: Path, publisher: str, last_chain_key: bytes) -> int | None:
    """Return the highest sequence number of the artifacts listed that ``publisher`` signed for one text and model.

    ``last_chain_key`` names the text. ``None`` where none is listed, or there is no index. Raises as :func:`survey_index`.
    """
    query = """
        SELECT max(sequence) FROM artifacts JOIN segments ON artifact = id AND position = segment_count - 1
        WHERE chain_key = ? AND publisher = ?
    """
    with _reading(path) as connection:
        if connection is None or not _written(connection):
            return None
        newest: int | None = connection.execute(query, (last_chain_key, publisher)).fetchone()[0]
        return newest


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection | None]:
    """Open the index to be read, whether or not a daemon has it; ``None`` where there is none."""
    with os_errors(f"look at the index {path}"):
        try:
            path.lstat()
        except FileNotFoundError:
            alone = None
        else:
            log = path.with_name(f"{path.name}-wal")
            # Without a log the file is all there is, and can be read without the files that SQLite would put beside it.
            alone = not log.exists() or not log.stat().st_size
    if alone is None:
        yield None
        return
    address = f"file:{quote(os.fspath(path))}?{'immutable=1' if alone else 'mode=ro'}"
    try:
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
            version = _written(connection)
            if version > SCHEMA_VERSION:
                raise UnknownVersionError(
                    f"the index {path} has version {version}; this p2pkv knows version {SCHEMA_VERSION}",
                    advice="A newer p2pkv wrote it: upgrade, or choose another home with P2PKV_HOME.",
                )
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"the index {path} cannot be read: {error}", advice=DAMAGED_ADVICE) from error


def _written(connection: sqlite3.Connection) -> int:
    """Return the version of the index, 0 for one that nothing was written to yet."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def survey_packs(folder: Path) -> PackSurvey:
    """Read the tables of all packs in ``folder``; not the blocks, whose hashes ``p2pkv verify`` checks. Raises StoreError."""
    blocks: dict[bytes, int] = {}
    unreadable: list[str] = []
    with os_errors(f"look at the packs in {folder}"):
        names = sorted(filter(is_pack, os.listdir(folder)), key=pack_number) if folder.exists() else []
    packs = 0
    for name in names:
        try:
            records = _records(folder / name)
        except FileNotFoundError:
            continue  # the node removed it just now
        except OSError:
            records = None
        if records is None:
            unreadable.append(name)
        else:
            packs += 1
            blocks.update((record.cid, record.size) for record in records)
    return PackSurvey(packs, len(blocks), sum(blocks.values()), tuple(unreadable))


def _records(path: Path) -> list[Record] | None:
    """Return the records of a pack, ``None`` for a file that is none. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return None if is_foreign(descriptor) else read_contents(descriptor).records
    finally:
        os.close(descriptor)
