from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pkv.errors import FormatError, StoreError, UnknownVersionError, UsageError
from p2pkv.formats.did import encode_did
from p2pkv.limits import MAX_TRUST_FILE_BYTES, MAX_TRUST_NOTE_BYTES
from p2pkv.store.trust_file import TrustedPublisher, TrustFile
from tests.store.builders import DID, OTHER_DID


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trust.json"


def test_without_a_file_nobody_is_trusted(path: Path) -> None:
    trust = TrustFile(path)
    assert trust.list() == ()
    assert not trust.trusts(DID)
    assert not trust.remove(DID)
    assert not path.exists()


def test_publishers_are_added_and_removed(path: Path) -> None:
    trust = TrustFile(path)
    assert trust.add(DID, "a friend", 1000)
    assert trust.add(OTHER_DID, "", 2000)
    assert not trust.add(DID, "a good friend", 3000)
    assert trust.list() == (TrustedPublisher(DID, "a good friend", 1000), TrustedPublisher(OTHER_DID, "", 2000))
    assert trust.remove(DID)
    assert not trust.trusts(DID)
    assert json.loads(path.read_text()) == {"version": 1, "publishers": [{"did": OTHER_DID, "note": "", "added": 2000}]}
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == ["trust.json", "trust.json.lock"]


def test_a_change_by_another_process_is_seen_at_the_next_look(path: Path) -> None:
    daemon, cli = TrustFile(path), TrustFile(path)
    assert not daemon.trusts(DID)
    cli.add(DID, "", 1)
    assert daemon.trusts(DID)
    cli.remove(DID)
    assert not daemon.trusts(DID)
    cli.add(DID, "", 1)
    assert daemon.trusts(DID)
    path.unlink()
    assert not daemon.trusts(DID)


def test_an_unchanged_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust = TrustFile(path)
    trust.add(DID, "", 1)
    assert trust.trusts(DID)
    monkeypatch.setattr(TrustFile, "_parse", None)
    assert trust.trusts(DID)


def test_changes_at_once_are_all_kept(path: Path) -> None:
    dids = [encode_did(bytes([number]) * 32) for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda did: TrustFile(path).add(did, "", 1), dids))
    assert {publisher.did for publisher in TrustFile(path).list()} == set(dids)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"version": 1}',
        '{"version": 1, "publishers": {}}',
        '{"version": 1, "publishers": [], "more": 1}',
        '{"version": 1, "publishers": ["did"]}',
        '{"version": 1, "publishers": [{"did": "did:key:zNope", "note": "", "added": 1}]}',
        f'{{"version": 1, "publishers": [{{"did": "{DID}", "added": 1}}]}}',
        f'{{"version": 1, "publishers": [{{"did": "{DID}", "note": "", "added": "now"}}]}}',
        f'{{"version": 1, "publishers": [{{"did": "{DID}", "note": "", "added": 1, "scope": ""}}]}}',
        " " * (MAX_TRUST_FILE_BYTES + 1),
    ],
)
def test_a_damaged_file_trusts_nobody_and_is_not_overwritten(path: Path, text: str) -> None:
    trust = TrustFile(path)
    trust.add(DID, "", 1)
    assert trust.trusts(DID)
    path.write_text(text)
    for call in (lambda: trust.trusts(DID), trust.list, lambda: trust.add(DID, "", 1), lambda: trust.remove(DID)):
        with pytest.raises(StoreError, match=r"trust\.json") as caught:
            call()
        assert "p2pkv trust add" in caught.value.advice
    assert path.read_text() == text


def test_a_later_version_is_left_alone(path: Path) -> None:
    path.write_text('{"version": 2, "rules": []}')
    with pytest.raises(UnknownVersionError, match="version 2"):
        TrustFile(path).add(DID, "", 1)
    assert path.read_text() == '{"version": 2, "rules": []}'


def test_what_is_added_is_checked(path: Path) -> None:
    with pytest.raises(FormatError):
        TrustFile(path).add("did:web:example.org", "", 1)
    with pytest.raises(UsageError):
        TrustFile(path).add(DID, "x" * (MAX_TRUST_NOTE_BYTES + 1), 1)
    assert not path.exists()
