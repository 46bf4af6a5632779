"""``revoke``, ``rotate`` and ``trust hear``: files only, no daemon."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey

from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_REASON_BYTES
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_publisher_key
from p2pkv.store.sequence import next_sequence
from p2pkv.store.statement_files import StatementFiles
from p2pkv.trust.record import Record
from tests.cli.conftest import Cli
from tests.support.samples import MODEL_ID, manifest
from tests.support.statements import revocations

OTHER = Cid.of_node(b"another")


@pytest.fixture
def did(cli: Cli) -> str:
    found: str = cli("keygen", "--json").document["did"]
    return found


@pytest.fixture
def file(did: str, home: Path, tmp_path: Path) -> Path:
    """An envelope that the home's key signed."""
    return sign(SigningKey(read_publisher_key(HomeLayout(home).publisher_key)), tmp_path / "a.envelope")


def sign(key: SigningKey, path: Path, **changes: Any) -> Path:
    signed = Envelope.sign(manifest(publisher=encode_did(bytes(key.verify_key)), expires=None, **changes), key)
    path.write_bytes(signed.encode())
    return path


def record(home: Path, did: str) -> Record:
    return StatementFiles(HomeLayout(home).statements)[did]


def accepted(cli: Cli, file: Path) -> bool:
    found: bool = cli("trust", "explain", file, "--json").document["accepted"]
    return found


def test_what_is_revoked_is_refused_from_then_on(cli: Cli, did: str, home: Path, file: Path) -> None:
    cid = Cid.of_node(file.read_bytes())
    cli("trust", "add", did)
    assert accepted(cli, file)
    told = cli("revoke", OTHER, "--reason", "a typo", "--json").document
    assert (told["publisher"], told["scope"], told["revoked"], told["items"]) == (did, "manifest", str(OTHER), 1)
    assert accepted(cli, file)
    assert cli("revoke", cid, "--reason", "wrong tokenizer").status == 0
    assert not accepted(cli, file)
    explained = cli("trust", "explain", file)
    assert "its publisher took it back: wrong tokenizer" in explained.out
    assert cli("verify", file).status == 5
    (kept,) = record(home, did).lists
    assert [item.what for item in kept.opened.items] == [OTHER, cid]
    assert kept.opened.sequence > told["sequence"]


@pytest.mark.parametrize("options", [("--model", MODEL_ID.hex()), ("--before", "2"), ("--everything",)])
def test_more_than_one_artifact_is_revoked(cli: Cli, did: str, file: Path, options: tuple[str, ...]) -> None:
    cli("trust", "add", did)
    assert cli("revoke", *options).status == 0
    assert not accepted(cli, file)


@pytest.mark.parametrize("options", [("--model", "ab" * 32), ("--before", "1")])
def test_and_nothing_else(cli: Cli, did: str, file: Path, options: tuple[str, ...]) -> None:
    cli("trust", "add", did)
    assert cli("revoke", *options).status == 0
    assert accepted(cli, file)


def test_a_list_has_the_next_number_of_its_key(cli: Cli, did: str, home: Path) -> None:
    """Lists, manifests and grants are numbered by one rule: no number is given twice, and none goes back with the clock."""
    key = HomeLayout(home).publisher_key
    ahead = next_sequence(key, did, time.time() + 86_400)
    first = cli("revoke", OTHER, "--json").document["sequence"]
    assert first == ahead + 1
    assert cli("revoke", "--before", "5", "--json").document["sequence"] == ahead + 2
    assert next_sequence(key, did, 0.0) == ahead + 3
    elsewhere = Revocations(publisher=did, sequence=ahead + 50, created=0, items=(Revoked(Scope.BEFORE, 7, ""),))
    StatementFiles(HomeLayout(home).statements).hear(SignedStatement.sign(elsewhere, SigningKey(read_publisher_key(key))))
    assert cli("revoke", "--before", "9", "--json").document["sequence"] == ahead + 51
    assert next_sequence(key, did, 0.0) == ahead + 52
    assert cli("revoke", "--before", "9", "--json").document["sequence"] == ahead + 51
    assert next_sequence(key, did, 0.0) == ahead + 53, "what is revoked already takes no number"


def test_what_was_revoked_before_makes_no_new_list(cli: Cli, did: str, home: Path) -> None:
    first = cli("revoke", OTHER, "--json").document
    again = cli("revoke", OTHER, "--reason", "once more", "--json").document
    assert (first["added"], again["added"], again["sequence"]) == (True, False, first["sequence"])
    assert len(record(home, did).lists) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (OTHER, "--everything"),
        ("--before", "1", "--model", "ab" * 32),
        ("--model", "abcd"),
        ("--before", "0"),
        ("no-cid",),
        (OTHER, "--reason", "x" * (MAX_REASON_BYTES + 1)),
    ],
)
def test_a_wrong_argument_signs_nothing(cli: Cli, did: str, home: Path, arguments: tuple[object, ...]) -> None:
    assert cli("revoke", *arguments).status == 2
    assert not HomeLayout(home).statements.exists()


def test_a_statement_is_carried_by_hand(cli: Cli, did: str, file: Path, tmp_path: Path) -> None:
    carried, consumer = tmp_path / "list.statement", tmp_path / "consumer"
    assert cli("revoke", "--before", "2", "--out", carried).status == 0
    assert SignedStatement.decode(carried.read_bytes()).open(Revocations).items[0].scope is Scope.BEFORE
    cli("trust", "add", did, "--home", consumer)
    explain = ("trust", "explain", file, "--home", consumer, "--json")
    assert cli(*explain).document["accepted"]
    assert cli("trust", "hear", carried, "--home", consumer, "--json").document["news"] is True
    assert not cli(*explain).document["accepted"]
    assert cli("trust", "hear", carried, "--home", consumer).out == f"known already: revocations of {did}\n"
    carried.write_bytes(replace(revocations(1, 5), payload=revocations(2, 6).payload).encode())
    forged = cli("trust", "hear", carried, "--home", consumer, "--json")
    assert (forged.status, forged.error["code"]) == (3, "integrity.signature")


# --- rotate -------------------------------------------------------------------------------------------------------------


def test_trust_follows_the_new_key(cli: Cli, did: str, home: Path, file: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.key"
    new_did = cli("keygen", "--out", new, "--json").document["did"]
    new_file = sign(SigningKey(read_publisher_key(new)), tmp_path / "b.envelope")
    cli("trust", "add", did)
    assert not accepted(cli, new_file)
    told = cli("rotate", "--to", new, "--reason", "a new year", "--json").document
    assert (told["publisher"], told["successor"], told["reason"]) == (did, new_did, "a new year")
    assert accepted(cli, new_file)
    assert accepted(cli, file)
    old = SigningKey(read_publisher_key(HomeLayout(home).publisher_key))
    assert accepted(cli, sign(old, tmp_path / "c.envelope", sequence=told["last"]))
    assert not accepted(cli, sign(old, tmp_path / "d.envelope", sequence=told["last"] + 1))


def test_a_key_has_one_successor(cli: Cli, did: str, home: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.key", tmp_path / "two.key"
    for path in (one, two):
        cli("keygen", "--out", path)
    assert cli("rotate", "--to", HomeLayout(home).publisher_key).status == 2
    assert cli("rotate", "--to", one).status == 0
    for path in (one, two):
        again = cli("rotate", "--to", path, "--json")
        assert (again.status, again.error["code"]) == (2, "usage")
    assert len(record(home, did).successions) == 1


def test_a_burnt_key_has_none(cli: Cli, did: str, tmp_path: Path) -> None:
    cli("keygen", "--out", tmp_path / "new.key")
    assert cli("revoke", "--everything").status == 0
    told = cli("rotate", "--to", tmp_path / "new.key", "--json")
    assert (told.status, told.error["code"]) == (2, "usage")
