"""Keys under a passphrase, as commands handle them: from a file, from a descriptor, and asked for on a real terminal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from p2pkv.limits import MAX_PASSPHRASE_BYTES
from p2pkv.store import publisher_key
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import Cost, read_key_file, write_publisher_key
from tests.cli.conftest import Cli, Ran
from tests.cli.terminal import command, environment, on_a_terminal
from tests.support.artifacts import KEY, PUBLISHER

SEED = bytes(KEY)
CHEAP = Cost(1, 8192)
PASSPHRASE = b"correct horse battery staple"


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new key file cost nothing."""
    monkeypatch.setattr(publisher_key.write_publisher_key, "__defaults__", (None, CHEAP))
    monkeypatch.setattr(publisher_key.change_passphrase, "__defaults__", (CHEAP,))


def secret_file(folder: Path, name: str, data: bytes, mode: int = 0o600) -> Path:
    path = folder / name
    path.write_bytes(data)
    path.chmod(mode)
    return path


def refused(ran: Ran) -> tuple[int, str]:
    assert ran.out == ""
    code: str = ran.error["code"]
    return ran.status, code


# --- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cheap")
def test_a_key_gets_changes_and_loses_its_passphrase(cli: Cli, home: Path, tmp_path: Path) -> None:
    one, two = secret_file(tmp_path, "one", b"first\n"), secret_file(tmp_path, "two", b"second\r\n")
    path = HomeLayout(home).publisher_key
    made = cli("keygen", "--passphrase-file", one, "--json").document
    assert made == {"did": made["did"], "file": str(path), "encrypted": True}
    assert cli("key", "show", "--json").document == made
    assert bytes(read_key_file(path).open(b"first"))
    assert refused(cli("key", "passphrase", "--passphrase-file", two, "--remove", "--json")) == (2, "key.passphrase")
    changed = cli("key", "passphrase", "--passphrase-file", one, "--new-passphrase-file", two, "--json").document
    assert changed == made
    assert bytes(read_key_file(path).open(b"second"))
    assert cli("key", "passphrase", "--passphrase-file", two, "--remove", "--json").document["encrypted"] is False
    assert read_key_file(path).open(None).encode()
    assert cli("key", "passphrase", "--new-passphrase-file", one).out == f"{path} is under its new passphrase\n"
    assert "yes, with a passphrase" in cli("key", "show").out
    both = cli("key", "passphrase", "--remove", "--new-passphrase-file", two, "--json")
    assert refused(both) == (2, "usage")


@pytest.mark.parametrize(
    ("data", "mode", "word"),
    [
        (b"secret\n", 0o640, "chmod 600"),
        (b"secret\n", 0o604, "chmod 600"),
        (b"", 0o600, "Choose"),
        (b"\n", 0o600, "Choose"),
        (b"secret\nmore\n", 0o600, "alone"),
        (b"x" * (MAX_PASSPHRASE_BYTES + 1), 0o600, "shorter"),
        (b"x" * (MAX_PASSPHRASE_BYTES + 100), 0o600, "shorter"),
    ],
)
def test_a_passphrase_file_that_will_not_do_is_told_with_its_remedy(
    cli: Cli, home: Path, tmp_path: Path, data: bytes, mode: int, word: str
) -> None:
    told = cli("keygen", "--passphrase-file", secret_file(tmp_path, "phrase", data, mode), "--json")
    assert (told.status, told.error["code"]) == (2, "usage")
    assert word in told.error["advice"]
    assert not HomeLayout(home).publisher_key.exists()
    assert refused(cli("keygen", "--passphrase-file", tmp_path / "none", "--json")) == (2, "usage")


def test_the_doctor_looks_at_an_encrypted_key_without_its_passphrase(cli: Cli, home: Path) -> None:
    write_publisher_key(HomeLayout(home).publisher_key, SEED, PASSPHRASE, CHEAP)
    findings = {finding["name"]: finding for finding in cli("doctor", "--json").document["findings"]}
    assert findings["keys"]["state"] == "ok"


# --- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_passphrase_comes_through_a_descriptor(home: Path) -> None:
    """At its real cost, from a pipe that the shell would make of ``3< <(pass show p2pkv)``."""
    for arguments in (("keygen",), ("key", "passphrase", "--remove")):
        reading, writing = os.pipe()
        os.write(writing, PASSPHRASE + b"\n")
        os.close(writing)
        ran = subprocess.run(
            command(*arguments, "--passphrase-file", f"/dev/fd/{reading}"),
            env=environment(home),
            pass_fds=[reading],
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        os.close(reading)
        assert (ran.returncode, ran.stderr) == (0, "")
    assert not read_key_file(HomeLayout(home).publisher_key).encrypted


def test_without_a_terminal_nobody_is_asked(home: Path) -> None:
    write_publisher_key(HomeLayout(home).publisher_key, SEED, PASSPHRASE, CHEAP)
    for arguments in (("keygen", "--out", home / "new", "--passphrase"), ("key", "passphrase", "--remove")):
        ran = subprocess.run(
            command(*arguments),
            env=environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
            start_new_session=True,
        )
        assert ran.returncode == 2
        assert "no terminal" in ran.stderr
        assert "--passphrase-file" in ran.stderr
    assert not (home / "new").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the child of the fork runs another program at once
def test_a_passphrase_is_asked_for_twice_and_not_shown(home: Path) -> None:
    new, again = "New passphrase of the key: $", "The same once more: $"
    path = HomeLayout(home).publisher_key
    status, screen = on_a_terminal(command("keygen", "--passphrase"), home, [(new, PASSPHRASE), (again, b"something else")])
    assert (status, path.exists()) == (2, False)
    assert "differ" in screen
    write_publisher_key(path, SEED)
    status, screen = on_a_terminal(command("key", "passphrase"), home, [(new, PASSPHRASE), (again, PASSPHRASE)])
    assert status == 0
    assert PASSPHRASE.decode() not in screen
    assert bytes(read_key_file(path).open(PASSPHRASE)) == SEED
    status, screen = on_a_terminal(command("key", "passphrase", "--remove"), home, [("Passphrase of the key: $", b"no")])
    assert status == 2
    assert "[key.passphrase]" in screen


def test_a_key_names_its_publisher(cli: Cli, home: Path) -> None:
    write_publisher_key(HomeLayout(home).publisher_key, SEED, PASSPHRASE, CHEAP)
    shown = cli("key", "show")
    assert shown.out.splitlines()[0] == f"publisher  {PUBLISHER}"
    assert refused(cli("key", "show", "--key", home / "none", "--json")) == (2, "key.unreadable")
