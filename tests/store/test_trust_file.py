from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pkv.errors import FormatError, StoreError, UnknownVersionError, UsageError
from p2pkv.formats.did import encode_did
from p2pkv.limits import MAX_TRUST_FILE_BYTES, MAX_TRUST_NOTE_BYTES
from p2pkv.store.trust_file import TrustFile
from p2pkv.trust.rules import ANYBODY, Action, Namespace, Rule
from tests.store.builders import DID, OTHER_DID


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trust.json"


def test_without_a_file_nobody_is_trusted(path: Path) -> None:
    trust = TrustFile(path)
    assert trust.rules() == ()
    assert not trust.remove(DID)
    assert not path.exists()


def test_rules_are_added_and_removed(path: Path) -> None:
    trust = TrustFile(path)
    assert trust.add(DID, "a friend", 1000)
    assert trust.add(OTHER_DID, "", 2000)
    assert not trust.add(DID, "a good friend", 3000)
    scoped = Rule(Action.REJECT, ANYBODY, bytes(32), "MIT", Namespace.PRIVATE, "why", 4000)
    assert trust.add_rule(scoped)
    first, second = Rule(Action.ACCEPT, DID, note="a good friend", added=1000), Rule(Action.ACCEPT, OTHER_DID, added=2000)
    assert trust.rules() == TrustFile(path).rules() == (first, second, scoped)
    assert trust.remove(DID, lambda rule: rule.licence == "MIT") == ()
    assert trust.remove(DID) == (first,)
    assert json.loads(path.read_text()) == {
        "version": 2,
        "rules": [
            {"action": "accept", "publisher": OTHER_DID, "note": "", "added": 2000},
            {
                "action": "reject",
                "publisher": "*",
                "model": "00" * 32,
                "licence": "MIT",
                "namespace": "private",
                "note": "why",
                "added": 4000,
            },
        ],
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == ["trust.json", "trust.json.lock"]


def test_a_rule_written_by_hand_needs_action_and_publisher_only(path: Path) -> None:
    path.write_text(json.dumps({"version": 2, "rules": [{"action": "accept", "publisher": DID, "licence": "MIT"}]}))
    assert TrustFile(path).rules() == (Rule(Action.ACCEPT, DID, licence="MIT"),)


def test_a_change_by_another_process_is_seen_at_the_next_look(path: Path) -> None:
    daemon, cli = TrustFile(path), TrustFile(path)
    assert not daemon.rules()
    cli.add(DID, "", 1)
    assert daemon.rules()
    cli.remove(DID)
    assert not daemon.rules()
    cli.add(DID, "", 1)
    assert daemon.rules()
    path.unlink()
    assert not daemon.rules()


def test_an_unchanged_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust = TrustFile(path)
    trust.add(DID, "", 1)
    assert trust.rules()
    monkeypatch.setattr(TrustFile, "_parse", None)
    assert trust.rules()


def test_changes_at_once_are_all_kept(path: Path) -> None:
    dids = [encode_did(bytes([number]) * 32) for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda did: TrustFile(path).add(did, "", 1), dids))
    assert {rule.publisher for rule in TrustFile(path).rules()} == set(dids)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"version": 2}',
        '{"version": 2, "rules": {}}',
        '{"version": 2, "rules": [], "more": 1}',
        '{"version": 2, "rules": ["did"]}',
        '{"version": 2, "rules": [{"action": "accept"}]}',
        '{"version": 2, "rules": [{"action": "accept", "publisher": "*"}]}',
        '{"version": 2, "rules": [{"action": "accept", "publisher": "did:key:zNope"}]}',
        f'{{"version": 2, "rules": [{{"publisher": "{DID}"}}]}}',
        f'{{"version": 2, "rules": [{{"action": "allow", "publisher": "{DID}"}}]}}',
        f'{{"version": 2, "rules": [{{"action": "accept", "publisher": "{DID}", "added": "now"}}]}}',
        f'{{"version": 2, "rules": [{{"action": "accept", "publisher": "{DID}", "added": true}}]}}',
        f'{{"version": 2, "rules": [{{"action": "accept", "publisher": "{DID}", "model": "1"}}]}}',
        f'{{"version": 2, "rules": [{{"action": "accept", "publisher": "{DID}", "model": "11"}}]}}',
        f'{{"version": 2, "rules": [{{"action": "accept", "publisher": "{DID}", "namespace": "mine"}}]}}',
        f'{{"version": 2, "rules": [{{"action": "accept", "publisher": "{DID}", "scope": ""}}]}}',
        " " * (MAX_TRUST_FILE_BYTES + 1),
    ],
)
def test_a_damaged_file_trusts_nobody_and_is_not_overwritten(path: Path, text: str) -> None:
    trust = TrustFile(path)
    trust.add(DID, "", 1)
    path.write_text(text)
    for call in (trust.rules, lambda: trust.add(DID, "", 1), lambda: trust.remove(DID)):
        with pytest.raises(StoreError, match=r"trust\.json") as caught:
            call()
        assert "p2pkv trust add" in caught.value.advice
    assert path.read_text() == text


def test_a_later_version_is_left_alone(path: Path) -> None:
    path.write_text('{"version": 3, "rules": []}')
    with pytest.raises(UnknownVersionError, match="version 3"):
        TrustFile(path).add(DID, "", 1)
    assert path.read_text() == '{"version": 3, "rules": []}'


def test_what_is_added_is_checked(path: Path) -> None:
    with pytest.raises(FormatError):
        TrustFile(path).add("did:web:example.org", "", 1)
    with pytest.raises(UsageError):
        TrustFile(path).add(DID, "x" * (MAX_TRUST_NOTE_BYTES + 1), 1)
    assert not path.exists()
