"""Making an index anew is all or nothing: whatever is its last step, the next start lists all, and the old file stays."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from p2pkv.errors import DiskFullError, StoreError
from p2pkv.limits import MAX_SET_ASIDE_INDEXES
from p2pkv.store import database, rebuild
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import open_store
from tests.store.losses import ONE, OTHER, SHORT, copy_home, fill, index_files, lose, put, tell, told

# --- what becomes of the old one ------------------------------------------------------------------------------------------


def test_what_was_damaged_is_kept_aside_and_bounded(tmp_path: Path) -> None:
    fill(tmp_path, ONE)
    path = HomeLayout(tmp_path).index
    contents = [os.urandom(500) for _ in range(MAX_SET_ASIDE_INDEXES + 2)]
    for number, data in enumerate(contents):
        path.write_bytes(data)
        path.with_name("index.sqlite-wal").write_bytes(b"log %d" % number)
        with open_store(tmp_path) as store:
            assert store.index.counts() == (1, 1)
    kept = rebuild.set_aside(path)
    assert [found.read_bytes() for found in kept] == contents[-MAX_SET_ASIDE_INDEXES:]
    assert kept[-1].name == f"index.sqlite.damaged-{len(contents)}"
    assert kept[-1].with_name(f"{kept[-1].name}-wal").read_bytes() == b"log %d" % (len(contents) - 1)
    assert len(index_files(tmp_path)) == 1 + 2 * MAX_SET_ASIDE_INDEXES


def test_what_was_kept_aside_stays_where_nothing_comes_to_it(tmp_path: Path) -> None:
    fill(tmp_path, ONE)
    for loss in ("garbage", "garbage", "removed", "emptied"):
        lose(tmp_path, loss)
        with open_store(tmp_path):
            pass
    assert index_files(tmp_path) == ["index.sqlite", "index.sqlite.damaged-1", "index.sqlite.damaged-2"]


def left_beside(home: Path, companion: str) -> bytes:
    """Return what a process leaves beside an index of its own that is killed before or in the middle of a checkpoint."""
    with open_store(home) as store:
        put(store, SHORT)
        store.index.add_artifact(SHORT.artifact, [])
        if companion == "-wal":
            return home.joinpath("index.sqlite-wal").read_bytes()
    with closing(sqlite3.connect(home / "index.sqlite", isolation_level=None)) as connection:
        for pragma in ("journal_mode = DELETE", "cache_size = 1", "cache_spill = 1"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE artifacts SET model_name = 'another'")
        connection.execute("CREATE TABLE much (data)")
        connection.executemany("INSERT INTO much VALUES (?)", [(bytes(3000),)] * 50)
        return home.joinpath("index.sqlite-journal").read_bytes()


@pytest.mark.parametrize("companion", ["-wal", "-journal"])
def test_what_another_file_left_is_not_taken_for_the_new_ones(tmp_path: Path, companion: str) -> None:
    home = tmp_path / "home"
    before = fill(home, ONE, OTHER)
    left = left_beside(tmp_path / "stranger", companion)
    assert left
    lose(home)
    home.joinpath(f"index.sqlite{companion}").write_bytes(left)
    for _ in range(2):
        assert tell(home) == before
    assert home.joinpath(f"index.sqlite.damaged-1{companion}").read_bytes() == left


# --- killed and failing ---------------------------------------------------------------------------------------------------


def each_step(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Call ``before`` every step that changes a file: whatever SQLite is told, and what we tell the system."""
    connect = database._connect

    def connected(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.set_trace_callback(lambda statement: before())
        return connection

    monkeypatch.setattr(database, "_connect", connected)
    for name in ("rename", "unlink", "fsync"):
        monkeypatch.setattr(os, name, _told(before, getattr(os, name)))


def _told(before: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        before()
        return real(*arguments)

    return call


@pytest.mark.parametrize("loss", ["removed", "garbage"])
def test_killed_at_any_step_the_next_start_lists_all(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, loss: str
) -> None:
    home, killed = tmp_path, tmp_path_factory.mktemp("killed")
    with open_store(home) as store:
        for sample in (ONE, SHORT):
            put(store, sample)
            store.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)))
        store.holds.pin("mine", ONE.cid)
        before = told(store)
    lose(home, loss)
    lost = HomeLayout(home).index.read_bytes() if loss == "garbage" else None
    log = home / "index.sqlite-wal"
    log.write_bytes(b"what was in the log of the lost one")
    kills: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        each_step(patch, lambda: kills.append(copy_home(home, killed / str(len(kills)))))
        with open_store(home):
            pass
    assert len(kills) > 20
    for place in kills:
        index = HomeLayout(place).index
        if lost is not None and index.exists() and index.read_bytes() == lost:
            assert (place / log.name).exists(), "it could pass for whole without its log"
        assert tell(place) == before, place
        names = index_files(place)
        assert [name for name in names if not name.startswith("index.sqlite.damaged-")] == ["index.sqlite"]
        if lost is not None:
            kept = [path for path in rebuild.set_aside(place / "index.sqlite") if path.exists()]
            assert [path.read_bytes() for path in kept] == [lost]  # killed in between, its log has the next number


def test_the_new_index_needs_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing it need not write the log into it: here somebody else has it open."""
    before = fill(tmp_path, ONE, SHORT)
    lose(tmp_path)
    connect, others = database._connect, []

    def connected(path: Path) -> sqlite3.Connection:
        if path.name.endswith(".new"):
            others.append(connect(path))
            others[-1].execute("PRAGMA user_version").fetchone()
        return connect(path)

    monkeypatch.setattr(database, "_connect", connected)
    assert tell(tmp_path) == before
    assert others
    for other in others:
        other.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", range(12))
def test_whatever_step_fails_it_is_told_and_the_next_start_lists_all(tmp_path: Path, step: int, number: int) -> None:
    before = fill(tmp_path, ONE, SHORT)
    lose(tmp_path, "garbage")
    steps = iter(range(1000))

    def fail() -> None:
        if next(steps) == step:
            raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "fsync"):
            patch.setattr(os, name, _told(fail, getattr(os, name)))
        try:
            with open_store(tmp_path) as store:
                assert told(store) == before
        except (DiskFullError, StoreError):
            pass
    assert tell(tmp_path) == before


def test_on_a_full_disk_the_reserve_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fill(tmp_path, ONE)
    lose(tmp_path)
    layout, connect, full = HomeLayout(tmp_path), database._connect, []

    def connected(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        if layout.reserve.exists():
            full.append(path)
            connection.execute("PRAGMA max_page_count = 2")
        return connection

    monkeypatch.setattr(database, "_connect", connected)
    with open_store(tmp_path) as store:
        assert told(store) == before
        assert full
        assert layout.reserve.exists()  # and is taken again
