"""Artifacts that share prefixes, ways to lose the index of a home that holds them, and what its store tells of them."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import Sample, make_sample

TOKENS: Final = list(range(600))
ONE: Final = make_sample(TOKENS)
LONGER: Final = make_sample([*TOKENS, *range(300)])  # shares two segments with the first
FORKED: Final = make_sample([*TOKENS[:512], *range(100, 300)])  # shares these two as well
SHORT: Final = make_sample(TOKENS[:100], seed=2)
OTHER: Final = make_sample(TOKENS[::-1], seed=3)
SAMPLES: Final = [ONE, LONGER, FORKED, SHORT, OTHER]
PAGE: Final = 4096


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _root_page(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return int(page)


# What happens to an index that was closed in order.
LOSSES: Final[dict[str, Callable[[Path], object]]] = {
    "removed": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
    "no tables": lambda path: _empty_database(path),
    "garbage": lambda path: path.write_bytes(os.urandom(3 * PAGE)),
    "a few bytes": lambda path: path.write_bytes(b"lost"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "schema gone": lambda path: _overwrite(path, 100, bytes(PAGE - 100)),
    "page of a table": lambda path: _overwrite(path, (_root_page(path, "artifacts") - 1) * PAGE, b"\xff" * PAGE),
    "page of an index": lambda path: _overwrite(path, (_root_page(path, "segments_by_node") - 1) * PAGE, b"\xff" * PAGE),
    "cut off": lambda path: os.truncate(path, 3 * PAGE),
}


def _empty_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("VACUUM")


every_loss = pytest.mark.parametrize("loss", LOSSES)


def lose(home: Path, loss: str = "removed") -> None:
    LOSSES[loss](HomeLayout(home).index)


def put(store: Store, sample: Sample, *, without: Collection[Cid] = ()) -> None:
    for cid, data in sample.blocks.items():
        if cid not in without:
            store.write(cid, data)


def fill(home: Path, *samples: Sample) -> dict[str, object]:
    """Store and list whole artifacts; return what the store tells of them."""
    with open_store(home) as store:
        for sample in samples:
            put(store, sample)
            store.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)))
        return told(store)


def tell(home: Path) -> dict[str, object]:
    with open_store(home) as store:
        return told(store)


def told(store: Store) -> dict[str, object]:
    """Return what ``store`` lists, holds and finds, but for times."""
    return {
        "artifacts": {row.manifest_cid: (row.model_name, row.segment_count, row.complete) for row in store.index.artifacts()},
        "held": {row.manifest_cid: store.index.held_keys(row.manifest_cid) for row in store.index.artifacts()},
        "found": [_matches(store, sample) for sample in SAMPLES],
        "counts": store.index.counts(),
        "pins": store.holds.pins(),
    }


def _matches(store: Store, sample: Sample) -> dict[Cid, tuple[int, int, bytes]]:
    matches = store.match(sample.artifact.chain_keys)
    return {match.manifest: (match.matched, match.segments, match.held) for match in matches}


def index_files(home: Path) -> list[str]:
    """Return the names of all that belongs to the index or did so."""
    return sorted(path.name for path in home.iterdir() if path.name.startswith("index.sqlite"))


def copy_home(home: Path, place: Path) -> Path:
    """Copy a home as a kill would leave it now; without the reserve, which a start takes anew."""
    shutil.copytree(home, place, ignore=shutil.ignore_patterns(HomeLayout(home).reserve.name))
    return place
