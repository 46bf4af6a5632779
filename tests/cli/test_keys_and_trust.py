"""``keygen`` and ``trust``: files only, no daemon."""

from __future__ import annotations

import stat
from pathlib import Path

from nacl.signing import SigningKey

from p2pkv.formats.did import encode_did
from p2pkv.store.home import HomeLayout
from p2pkv.store.secrets import read_publisher_key
from tests.cli.conftest import Cli
from tests.support.artifacts import PUBLISHER
from tests.support.samples import OTHER_PUBLISHER


def test_keygen_writes_a_private_key_and_tells_its_name(cli: Cli, home: Path) -> None:
    made = cli("keygen", "--json")
    path = HomeLayout(home).publisher_key
    assert made.status == 0
    assert made.document == {"did": encode_did(bytes(SigningKey(read_publisher_key(path)).verify_key)), "file": str(path)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keygen_never_tells_the_secret_and_never_overwrites(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "team.key"
    made = cli("keygen", "--out", path)
    before = path.read_bytes()
    assert read_publisher_key(path).hex() not in made.out + made.err
    again = cli("keygen", "--out", path)
    assert again.status == 2
    assert "[key.unreadable]" in again.err
    assert path.read_bytes() == before


def test_two_keys_differ(cli: Cli, tmp_path: Path) -> None:
    first, second = (cli("keygen", "--json", "--out", tmp_path / name).document["did"] for name in ("a", "b"))
    assert first != second


def test_home_option_wins_over_the_environment(cli: Cli, home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert cli("keygen", "--home", other, "--json").document["file"] == str(HomeLayout(other).publisher_key)
    assert not home.exists()


def test_trust_is_added_listed_and_removed(cli: Cli) -> None:
    assert cli("trust", "list", "--json").document == {"publishers": []}
    assert "Nobody is trusted" in cli("trust", "list").err
    assert cli("trust", "add", PUBLISHER, "--note", "the docs team").out == f"now trusted: {PUBLISHER}\n"
    assert cli("trust", "add", OTHER_PUBLISHER, "--json").document == {"did": OTHER_PUBLISHER, "note": "", "added": True}
    assert cli("trust", "add", PUBLISHER, "--json").document["added"] is False
    listed = cli("trust", "list").out.splitlines()
    assert [line.split()[0] for line in listed] == [PUBLISHER, OTHER_PUBLISHER]
    assert cli("trust", "remove", PUBLISHER, "--json").document == {"did": PUBLISHER, "removed": True}
    assert cli("trust", "remove", PUBLISHER).out == f"was not trusted: {PUBLISHER}\n"
    assert [entry["did"] for entry in cli("trust", "list", "--json").document["publishers"]] == [OTHER_PUBLISHER]


def test_trust_refuses_what_is_no_name(cli: Cli, home: Path) -> None:
    told = cli("trust", "add", "did:key:z6Mkx", "--json")
    assert (told.status, told.error["code"]) == (3, "format.invalid")
    assert not HomeLayout(home).trust.exists()


def test_a_damaged_trust_file_is_a_fault_of_the_machine(cli: Cli, home: Path) -> None:
    home.mkdir()
    HomeLayout(home).trust.write_text("{")
    told = cli("trust", "list", "--json")
    assert (told.status, told.error["code"]) == (4, "store.io")
