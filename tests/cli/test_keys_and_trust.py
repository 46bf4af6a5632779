"""``keygen``: files only, no daemon."""

from __future__ import annotations

import stat
from pathlib import Path

from nacl.signing import SigningKey

from p2pkv.formats.did import encode_did
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_publisher_key
from tests.cli.conftest import Cli


def test_keygen_writes_a_private_key_and_tells_its_name(cli: Cli, home: Path) -> None:
    made = cli("keygen", "--json")
    path = HomeLayout(home).publisher_key
    assert made.status == 0
    did = encode_did(bytes(SigningKey(read_publisher_key(path)).verify_key))
    assert made.document == {"did": did, "file": str(path), "encrypted": False}
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
