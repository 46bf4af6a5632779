"""What publishers said is on disk once it was heard, and nobody else makes them say anything by writing there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from p2pkv.errors import SignatureError, StoreError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.revocations import EVERYTHING
from p2pkv.limits import MAX_LISTS_PER_PUBLISHER, MAX_NODE_BYTES, MAX_STATEMENT_BYTES, MAX_STATEMENTS
from p2pkv.store import statement_files
from p2pkv.store.statement_files import StatementFiles
from tests.support.samples import KEY, OTHER_KEY, OTHER_PUBLISHER, PUBLISHER
from tests.support.statements import did_of, key, revocations, succession


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "statements"


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.record")
    return path


def test_nothing_is_known_at_first(folder: Path) -> None:
    files = StatementFiles(folder)
    assert (list(files), len(files), files.get(PUBLISHER)) == ([], 0, None)
    assert not folder.exists()


def test_what_was_heard_is_there_after_a_restart(folder: Path) -> None:
    files = StatementFiles(folder)
    assert files.hear(revocations(1, 5))
    assert files.hear(revocations(2, 5, 6))
    assert files.hear(succession(KEY, OTHER_KEY))
    assert files.hear(revocations(1, EVERYTHING, signer=OTHER_KEY))
    for again in (files, StatementFiles(folder)):
        assert set(again) == {PUBLISHER, OTHER_PUBLISHER}
        assert again[PUBLISHER].statements == (revocations(2, 5, 6), succession(KEY, OTHER_KEY))
        assert again[OTHER_PUBLISHER].burnt is not None
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_replay_changes_nothing(folder: Path) -> None:
    files = StatementFiles(folder)
    files.hear(revocations(1, 5))
    files.hear(revocations(2, 5, 6))
    before = file_of(folder).stat()
    assert not files.hear(revocations(1, 5))
    assert not files.hear(revocations(2, 5, 6))
    after = file_of(folder).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_forged_statement_is_not_kept(folder: Path) -> None:
    files = StatementFiles(folder)
    forged = replace(revocations(1, 5), payload=revocations(2, 6).payload)
    with pytest.raises(SignatureError):
        files.hear(forged)
    assert not folder.exists()


def test_a_change_by_another_process_is_seen_at_the_next_look(folder: Path) -> None:
    daemon, cli = StatementFiles(folder), StatementFiles(folder)
    assert daemon.get(PUBLISHER) is None
    cli.hear(revocations(1, 5))
    assert daemon[PUBLISHER].sequence == 1
    cli.hear(revocations(2, 5, 6))
    assert daemon[PUBLISHER].sequence == 2


def test_an_unchanged_file_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = StatementFiles(folder)
    files.hear(revocations(1, 5))
    record = files[PUBLISHER]
    monkeypatch.setattr(statement_files, "_parse", None)
    assert files[PUBLISHER] is record


def test_changes_at_once_are_all_kept(folder: Path) -> None:
    signers = [key(number) for number in range(200, 212)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda signer: StatementFiles(folder).hear(revocations(1, 5, signer=signer)), signers))
        lists = [revocations(number, 100 + number) for number in range(1, MAX_LISTS_PER_PUBLISHER + 1)]
        assert all(pool.map(lambda statement: StatementFiles(folder).hear(statement), lists))
    files = StatementFiles(folder)
    assert {did_of(signer) for signer in signers} <= set(files)
    assert set(files[PUBLISHER].statements) == set(lists)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "more", "another's", "huge"])
def test_a_damaged_file_is_an_error_and_not_an_empty_list(folder: Path, how: str) -> None:
    StatementFiles(folder).hear(revocations(1, 5))
    path = file_of(folder)
    data = bytearray(path.read_bytes())
    flipped = bytearray(data)
    flipped[-3] ^= 1
    other: dict[str, dagcbor.Value] = {
        "kind": "p2pkv/record",
        "version": 1,
        "statements": [revocations(1, EVERYTHING, signer=OTHER_KEY).encode()],
    }
    path.write_bytes(
        {
            "cut": bytes(data[:-1]),
            "flipped": bytes(flipped),
            "empty": b"",
            "more": bytes(data) + b"\0",
            "another's": dagcbor.encode(other),
            "huge": bytes(MAX_NODE_BYTES + 1),
        }[how]
    )
    before = path.read_bytes()
    files = StatementFiles(folder)
    for call in (lambda: files[PUBLISHER], lambda: files.get(PUBLISHER), lambda: files.hear(revocations(2, 5, 6))):
        with pytest.raises(StoreError, match="took back is not known") as caught:
            call()
        assert "move the file away" in caught.value.advice
    assert path.read_bytes() == before


def test_a_later_version_is_left_alone(folder: Path) -> None:
    StatementFiles(folder).hear(revocations(1, 5))
    file_of(folder).write_bytes(dagcbor.encode({"kind": "p2pkv/record", "version": 2}))
    with pytest.raises(UnknownVersionError, match="version 2"):
        StatementFiles(folder)[PUBLISHER]


def test_the_fullest_record_fits_a_node() -> None:
    assert MAX_STATEMENTS * (MAX_STATEMENT_BYTES + 8) + 64 <= MAX_NODE_BYTES


def test_when_a_publisher_was_heard_of_last(folder: Path) -> None:
    files = StatementFiles(folder)
    assert files.heard(PUBLISHER) is None
    files.note_answers({PUBLISHER: 1000.7, OTHER_PUBLISHER: 5.0})
    files.note_answers({OTHER_PUBLISHER: 2000.0})
    again = StatementFiles(folder)
    assert (again.heard(PUBLISHER), again.heard(OTHER_PUBLISHER)) == (1000, 2000)
    assert set(again) == set()
    again.hear(revocations(1, 5))
    assert again.heard(PUBLISHER) == file_of(folder).stat().st_mtime
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_latest_answers_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_files, "MAX_FOLLOWED_PUBLISHERS", 3)
    files = StatementFiles(folder)
    files.note_answers({did_of(key(number)): float(number) for number in range(1, 6)})
    assert [files.heard(did_of(key(number))) for number in range(1, 6)] == [None, None, 3, 4, 5]


@pytest.mark.parametrize(
    "damage",
    [b"", b"nonsense", b"[]", b'{"version": 9, "answers": []}', b'{"version": 1, "answers": [{"publisher": 1, "at": "x"}, 5]}']
    + [b'{"version": 1, "answers": [{"publisher": "%s", "at": %d}]}' % (PUBLISHER.encode(), at) for at in (-1, 10**30)],
)
def test_damaged_times_are_none_and_nothing_depends_on_them(folder: Path, damage: bytes) -> None:
    files = StatementFiles(folder)
    files.note_answers({PUBLISHER: 1000.0})
    (folder / "answers.json").write_bytes(damage)
    assert files.heard(PUBLISHER) is None
    files.note_answers({PUBLISHER: 2000.0})
    assert files.heard(PUBLISHER) == 2000
