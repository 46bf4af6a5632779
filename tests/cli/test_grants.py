"""``namespace``, ``grant`` and ``grants``: files only, no daemon, and no secret on any output."""

from __future__ import annotations

import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from p2pkv.artifact.granting import make_grant
from p2pkv.formats.did import encode_did
from p2pkv.formats.grant import Grant
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_CLOCK_SKEW_S
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.namespaces import read_namespace
from p2pkv.store.publisher_key import Cost, write_publisher_key
from tests.cli.conftest import Cli
from tests.support.artifacts import KEY, PUBLISHER
from tests.support.private import ARTIFACT_KEY, make_private

SAMPLE = make_private(list(range(600)))
CID = str(SAMPLE.cid)
READER = SigningKey(bytes(range(50, 82)))
READER_DID = encode_did(bytes(READER.verify_key))


@pytest.fixture
def published(home: Path) -> Path:
    """A home as `p2pkv publish --private` leaves it: the publisher's key, and its grant to itself."""
    write_publisher_key(HomeLayout(home).publisher_key, bytes(KEY))
    own = make_grant(
        KEY,
        SAMPLE.cid,
        ARTIFACT_KEY,
        SAMPLE.manifest.model_id,
        SAMPLE.token_ids,
        sequence=1,
        created=1,
        ephemeral=bytes(range(32)),
    )
    GrantFiles(home).add(SignedStatement.sign(own, KEY).encode())
    return home


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    folder = tmp_path / "reader"
    write_publisher_key(HomeLayout(folder).publisher_key, bytes(READER))
    return folder


def test_a_namespace_is_made_once_and_its_secret_shown_nowhere(cli: Cli, home: Path) -> None:
    made = cli("namespace", "create", "team", "--json")
    path = HomeLayout(home).namespaces / "team.namespace"
    assert made.document == {"namespace": "team", "file": str(path)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = read_namespace(home, "team")
    again = cli("namespace", "create", "team")
    assert (again.status, read_namespace(home, "team")) == (2, secret)
    assert secret.hex() not in made.out + made.err + again.out + again.err
    assert cli("namespace", "list", "--json").document == {"namespaces": ["team"]}
    assert cli("namespace", "create", "../team").status == 2


def test_a_grant_goes_from_publisher_to_reader(cli: Cli, published: Path, reader: Path, tmp_path: Path) -> None:
    file = tmp_path / "book.grant"
    made = cli("grant", CID, READER_DID, "--expires", "30d", "--out", file, "--json")
    assert made.status == 0
    document = made.document
    assert abs(document.pop("expires") - time.time() - 30 * 86_400) < 60
    assert document == {"manifest": CID, "reader": READER_DID, "file": str(file)}
    assert ARTIFACT_KEY.hex() not in made.out + file.read_bytes().hex()
    assert SignedStatement.decode(file.read_bytes()).open(Grant).artifact_key(READER) == ARTIFACT_KEY
    assert "not overwritten" in cli("grant", CID, READER_DID, "--out", file).err

    added = cli("grants", "add", file, "--home", reader, "--json")
    assert (added.document["manifest"], added.document["publisher"], added.document["tokens"]) == (CID, PUBLISHER, 600)
    (row,) = cli("grants", "--home", reader, "--json").document["grants"]
    assert row == added.document
    assert row["standing"].startswith("expires ")
    assert CID in cli("grants", "--home", reader).out
    assert cli("grants", "remove", CID, "--home", reader, "--json").document == {"manifest": CID, "removed": True}
    assert cli("grants", "remove", CID, "--home", reader, "--json").document == {"manifest": CID, "removed": False}
    assert cli("grants", "--home", reader, "--json").document == {"grants": [], "issued": []}


def test_the_file_is_named_by_artifact_and_reader(
    cli: Cli, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(cli("grant", CID, READER_DID, "--json").document["file"])
    assert path == tmp_path / f"{CID[-8:]}-{READER_DID[-8:]}.grant"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("grant", "bafyr4iaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", READER_DID), "grant.missing"),
        (("grant", CID, "did:key:z6MkNobody"), "format.invalid"),
        (("grant", CID, encode_did(b"\x01" + bytes(31))), "format.invalid"),
        (("grant", CID, READER_DID, "--expires", "yesterday"), "usage"),
        (("grants", "add", "/no/such/file"), "usage"),
    ],
)
def test_what_cannot_be_granted(cli: Cli, published: Path, arguments: tuple[str, ...], code: str) -> None:
    told = cli(*arguments, "--json")
    assert told.error["code"] == code
    assert told.status == (3 if code.startswith("format") else 2)


def test_an_artifact_of_others_is_not_granted(cli: Cli, reader: Path, published: Path, tmp_path: Path) -> None:
    assert cli("grant", CID, PUBLISHER, "--home", reader, "--json").error["code"] == "grant.missing"
    cli("grant", CID, READER_DID, "--out", tmp_path / "g")
    cli("grants", "add", tmp_path / "g", "--home", reader)
    told = cli("grant", CID, PUBLISHER, "--home", reader, "--json")
    assert told.error["code"] == "grant.invalid"


def test_a_grant_of_another_reader_or_that_is_over_is_not_added(
    cli: Cli, published: Path, reader: Path, tmp_path: Path
) -> None:
    own = GrantFiles(published).get(SAMPLE.cid)
    file = tmp_path / "g"
    file.write_bytes(SignedStatement.sign(own, KEY).encode())
    assert cli("grants", "add", file, "--home", reader, "--json").error["code"] == "grant.reader"
    locked = tmp_path / "locked"
    write_publisher_key(HomeLayout(locked).publisher_key, bytes(READER), b"secret", Cost(1, 8192))
    assert cli("grants", "add", file, "--home", locked, "--json").error["code"] == "grant.reader"
    cli("grant", CID, READER_DID, "--out", tmp_path / "right")
    assert cli("grants", "add", tmp_path / "right", "--home", locked).status == 0
    grant = SignedStatement.decode((tmp_path / "right").read_bytes()).open(Grant)
    over = replace(grant, expires=int(time.time()) - MAX_CLOCK_SKEW_S - 5)
    file.write_bytes(SignedStatement.sign(over, KEY).encode())
    assert cli("grants", "add", file, "--home", reader, "--json").error["code"] == "grant.expired"
    file.write_bytes(b"garbage")
    assert cli("grants", "add", file, "--home", reader).status == 3
    assert list(GrantFiles(reader)) == []


def test_what_was_granted_is_remembered_and_forgotten(cli: Cli, published: Path, tmp_path: Path) -> None:
    cli("grant", CID, READER_DID, "--out", tmp_path / "g")
    (row,) = cli("grants", "--json").document["issued"]
    assert (row["manifest"], row["reader"], row["standing"]) == (CID, READER_DID, "never expires")
    assert f"issued to {READER_DID}" in cli("grants").out
    (path,) = HomeLayout(published).issued_grants.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == (tmp_path / "g").read_bytes()
    forget = ("grants", "remove", CID, "--reader", READER_DID, "--json")
    assert cli(*forget).document["removed"] is True
    assert cli(*forget).document["removed"] is False
    assert [row["manifest"] for row in cli("grants", "--json").document["grants"]] == [CID], "its own stays"


def test_the_key_that_follows_grants_what_the_old_one_published(
    cli: Cli, published: Path, reader: Path, tmp_path: Path
) -> None:
    new_home, new_key = tmp_path / "new", tmp_path / "new" / "keys" / "publisher.key"
    new_did = cli("keygen", "--home", new_home, "--json").document["did"]
    cli("grant", CID, new_did, "--out", tmp_path / "own")
    assert cli("grants", "add", tmp_path / "own", "--home", new_home).status == 0
    grant = ("grant", CID, READER_DID, "--home", new_home, "--out", tmp_path / "g", "--json")
    assert cli(*grant).error["code"] == "grant.invalid"
    assert cli("rotate", "--to", new_key, "--out", tmp_path / "succession").status == 0
    assert cli("trust", "hear", tmp_path / "succession", "--home", new_home).status == 0
    assert cli(*grant).status == 0
    made = SignedStatement.decode((tmp_path / "g").read_bytes()).open(Grant)
    assert (made.publisher, made.reader, made.artifact_key(READER)) == (new_did, READER_DID, ARTIFACT_KEY)
    assert cli("grants", "add", tmp_path / "g", "--home", reader).status == 0
