from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, NotFoundError, StoreError, UnknownVersionError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_QUERY_KEYS, MAX_QUERY_MATCHES
from p2pkv.store.database import Database
from p2pkv.store.index import ArtifactIndex
from p2pkv.store.store import open_store
from p2pkv.store.survey import newest_sequence
from tests.store.builders import DID, OTHER_DID, Artifact, make_artifact, tokens
from tests.support.index import open_index

LONG = make_artifact(tokens(9, 10))
SHORT = make_artifact(tokens(3))
OTHER = make_artifact(tokens(4, seed=1))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ArtifactIndex]:
    with open_index(tmp_path / "index.sqlite", clock=lambda: 1000.9) as index:
        yield index


def add(index: ArtifactIndex, artifact: Artifact, held: int | None = None) -> None:
    positions = range(len(artifact.segments) if held is None else held)
    index.add_artifact(artifact.opened, positions)


def test_the_longest_match_comes_first(index: ArtifactIndex) -> None:
    for artifact in (SHORT, LONG, OTHER):
        add(index, artifact)
    matches = index.match(LONG.keys)
    assert [(match.manifest, match.matched, match.segments) for match in matches] == [
        (LONG.manifest_cid, 10, 10),
        (SHORT.manifest_cid, 3, 3),
    ]
    assert matches[0].held == b"\xff\x03"
    assert all(map(matches[0].holds, range(10)))


def test_of_equals_the_one_that_was_signed_last_comes_first(index: ArtifactIndex) -> None:
    signed = {number: make_artifact(tokens(3), sequence=number) for number in (5, 9, 2)}
    for artifact in signed.values():
        add(index, artifact)
    assert [match.manifest for match in index.match(SHORT.keys)] == [signed[number].manifest_cid for number in (9, 5, 2)]
    add(index, LONG)
    assert index.match(LONG.keys)[0].manifest == LONG.manifest_cid


def test_the_newest_of_one_publisher_for_one_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    last = SHORT.keys[-1]
    assert newest_sequence(path, DID, last) is None
    with open_index(path) as index:
        for number in (5, 9, 2):
            add(index, make_artifact(tokens(3), sequence=number))
        add(index, make_artifact(tokens(3), sequence=70, did=OTHER_DID))
        add(index, make_artifact(tokens(9, 10), sequence=80))
        for _ in range(2):  # while it is open, and through its log
            assert newest_sequence(path, DID, last) == 9
    assert newest_sequence(path, DID, last) == 9
    assert newest_sequence(path, OTHER_DID, last) == 70
    assert newest_sequence(path, DID, bytes(32)) is None


def test_a_text_that_goes_on_otherwise_matches_its_prefix(index: ArtifactIndex) -> None:
    add(index, LONG)
    text = make_artifact([*tokens(9), 7, 7, 7])
    assert [(match.matched, match.segments) for match in index.match(text.keys)] == [(9, 10)]
    assert index.match(OTHER.keys) == []
    assert index.match([]) == []


def test_what_is_held_is_told_by_segment(index: ArtifactIndex) -> None:
    add(index, LONG, held=0)
    assert index.match(LONG.keys)[0].held == b"\x00\x00"
    index.mark_held(LONG.manifest_cid, [0, 9])
    assert index.match(LONG.keys)[0].held == b"\x01\x02"
    assert index.held_keys(LONG.manifest_cid) == {0: LONG.keys[0], 9: LONG.keys[9]}
    found = index.artifact(LONG.manifest_cid)
    assert found is not None
    assert not found.complete
    index.mark_held(LONG.manifest_cid, range(10))
    assert [row.complete for row in index.artifacts()] == [True]


def test_artifacts_with_one_prefix_share_what_is_held(index: ArtifactIndex) -> None:
    add(index, LONG, held=0)
    add(index, SHORT, held=0)
    index.mark_held(SHORT.manifest_cid, range(3))
    assert {row.manifest_cid: row.complete for row in index.artifacts()} == {
        LONG.manifest_cid: False,
        SHORT.manifest_cid: True,
    }
    assert index.held_keys(LONG.manifest_cid).keys() == {0, 1, 2}
    index.mark_held(LONG.manifest_cid, range(3, 10))
    again = make_artifact(tokens(9, 10), sequence=2)
    add(index, again, held=0)
    assert [row.complete for row in index.artifacts()] == [True, True, True]
    assert index.counts() == (3, 3)


def test_answers_are_bounded_and_prefer_those_who_hold(index: ArtifactIndex) -> None:
    many = [make_artifact([*tokens(2), number]) for number in range(3 * MAX_QUERY_MATCHES)]
    for number, artifact in enumerate(many):
        index.add_artifact(artifact.opened, [2] if number == 40 else [])
    matches = index.match(many[9].keys)
    assert len(matches) == MAX_QUERY_MATCHES
    assert (matches[0].manifest, matches[0].matched) == (many[9].manifest_cid, 3)
    assert {match.matched for match in matches[1:]} == {2}
    index.mark_held(many[0].manifest_cid, [0, 1])
    assert index.match(many[7].keys[:2])[0].manifest == many[40].manifest_cid
    with pytest.raises(UsageError):
        index.match([bytes(32)] * (MAX_QUERY_KEYS + 1))


def test_rows_say_what_the_manifest_said(index: ArtifactIndex) -> None:
    add(index, SHORT, held=1)
    (row,) = index.artifacts()
    manifest = SHORT.manifest
    assert (row.manifest_cid, row.model_id, row.model_name) == (SHORT.manifest_cid, manifest.model_id, manifest.model_name)
    assert (row.dtype, row.token_count, row.segment_count) == ("bf16", 768, 3)
    assert (row.publisher, row.sequence, row.created, row.expires) == (manifest.publisher, 1, manifest.created, None)
    assert (row.complete, row.added, row.last_used) == (False, 1000, 1000)


def test_use_is_noted(tmp_path: Path) -> None:
    now = [1.0]
    with open_index(tmp_path / "index", clock=lambda: now[0]) as index:
        add(index, SHORT)
        now[0] = 2.0
        index.touch(SHORT.manifest_cid)
        assert [(row.added, row.last_used) for row in index.artifacts()] == [(1, 2)]
        now[0] = 3.0
        add(index, SHORT)
        assert [(row.added, row.last_used) for row in index.artifacts()] == [(1, 3)]


def test_the_newest_is_listed_first_and_removal_forgets_all(index: ArtifactIndex) -> None:
    other = make_artifact(tokens(3), did=OTHER_DID)
    add(index, SHORT)
    add(index, other)
    assert [row.publisher for row in index.artifacts()] == [OTHER_DID, SHORT.manifest.publisher]
    assert [row.publisher for row in index.artifacts(1)] == [OTHER_DID]
    assert index.remove_artifact(other.manifest_cid)
    assert not index.remove_artifact(other.manifest_cid)
    assert index.artifact(other.manifest_cid) is None
    assert [match.manifest for match in index.match(other.keys)] == [SHORT.manifest_cid]
    assert index.remove_artifact(SHORT.manifest_cid)
    assert index.match(SHORT.keys) == []
    with pytest.raises(NotFoundError):
        index.mark_held(SHORT.manifest_cid, [0])


def test_what_was_added_is_there_after_reopening(tmp_path: Path) -> None:
    for durable in (False, True):
        with open_index(tmp_path / "index") as index:
            artifact = LONG if durable else OTHER
            index.add_artifact(artifact.opened, [0], durable=durable)
        with open_index(tmp_path / "index") as index:
            assert index.match(artifact.keys)[0].held[0] == 1


def test_a_failed_change_changes_nothing(index: ArtifactIndex) -> None:
    add(index, SHORT, held=0)
    index._database._writer.execute("CREATE TRIGGER fail BEFORE UPDATE ON segments BEGIN SELECT raise(ABORT, 'injected'); END")
    with pytest.raises(StoreError, match="injected"):
        index.mark_held(SHORT.manifest_cid, [0])
    with pytest.raises(StoreError, match="injected"):
        add(index, OTHER)
    assert index.match(OTHER.keys) == []
    index._database._writer.execute("DROP TRIGGER fail")
    add(index, OTHER)
    assert len(index.match(OTHER.keys)) == 1


def test_a_full_disk_is_named_and_what_was_there_stays(index: ArtifactIndex) -> None:
    add(index, SHORT)
    (pages,) = index._database._writer.execute("PRAGMA page_count").fetchone()
    index._database._writer.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for number in range(2, 100):
            add(index, make_artifact(tokens(4, seed=number)))

    with pytest.raises(DiskFullError):
        fill()
    known = index.counts()
    index._database._writer.execute("PRAGMA max_page_count = 1000000")
    assert index.match(SHORT.keys)[0].matched == 3
    add(index, OTHER)
    assert index.counts() == (known[0] + 1, known[1] + 1)


def test_a_file_that_is_no_index_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    path.write_bytes(os.urandom(8192))
    with pytest.raises(StoreError) as caught:
        Database(path)
    assert type(caught.value) is StoreError
    assert "Restart the node" in caught.value.advice


def test_a_damaged_page_is_an_error_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with open_index(path) as index:
        add(index, LONG)
    data = path.read_bytes()
    path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    with pytest.raises(StoreError) as caught, open_index(path) as index:
        index.match(LONG.keys)
    assert "index.sqlite" in caught.value.advice


def test_the_index_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with open_index(path) as index:
        add(index, SHORT)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(UnknownVersionError, match="version 99"):
        Database(path)
    assert path.read_bytes() == before


def test_a_closed_index_says_so(tmp_path: Path) -> None:
    with open_index(tmp_path / "index") as index:
        pass
    with pytest.raises(StoreError, match="closed"):
        index.artifacts()
    with pytest.raises(StoreError, match="closed"):
        add(index, SHORT)


def test_threads_may_add_hold_and_match_at_once(index: ArtifactIndex) -> None:
    artifacts = [make_artifact(tokens(3, seed=number)) for number in range(16)]

    def work(artifact: Artifact) -> bytes:
        add(index, artifact, held=0)
        index.mark_held(artifact.manifest_cid, [0, 2])
        return index.match(artifact.keys)[0].held

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, artifacts)) == [b"\x05"] * 16


def test_opening_a_home_with_many_artifacts_is_quick(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        add(store.index, SHORT)
        rows = [(bytes(SHORT.manifest_cid.binary[:4]) + number.to_bytes(32, "big"),) for number in range(20_000)]
        copy = """
            INSERT INTO artifacts SELECT NULL, ?, model_id, model_name, dtype, token_count, segment_count, publisher, sequence,
                created, expires, complete, added, last_used FROM artifacts WHERE id = 1
        """
        store.index._database._writer.execute("BEGIN")
        store.index._database._writer.executemany(copy, rows)
        share = """
            INSERT INTO segments SELECT a.id, 0, s.chain_key, s.node_cid, 1 FROM artifacts a, segments s
            WHERE a.id > 1 AND s.position = 0
        """
        store.index._database._writer.execute(share)
        store.index._database._writer.execute("COMMIT")
    start = time.perf_counter()
    with open_store(tmp_path) as store:
        opened = time.perf_counter() - start
        start = time.perf_counter()
        matches = store.index.match(SHORT.keys)
        matched = time.perf_counter() - start
        assert store.index.counts()[0] == 20_001
    assert matches[0].manifest == SHORT.manifest_cid
    assert Cid.from_bytes(rows[-1][0]) == matches[1].manifest
    assert opened < 1
    assert matched < 0.2
