"""No command tells a key or its passphrase: not in what it prints, logs or is called with, and not when it fails."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from p2pkv.cli import sign
from p2pkv.formats.did import encode_did
from p2pkv.formats.draft import encode_draft
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import Cost, write_publisher_key
from p2pkv_node.embedded import embedded_node
from tests.cli.checkpoint import save_checkpoint
from tests.cli.conftest import Cli
from tests.support.artifacts import make_sample
from tests.support.commands import commands

SEED = bytes.fromhex("5eed" * 16)
PASSPHRASE = b"Never tell: m\xc3\xb6re th\xc3\xa4n words/+?"
NEW_PASSPHRASE = b"an0ther s3cret, also never told"
CHEAP = Cost(1, 8192)
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def base58(data: bytes) -> str:
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return digits


def forms(secret: bytes) -> list[bytes]:
    """Return how a secret may look where it leaks: raw, escaped, in hex, base32, base58, base64, and as numbers."""
    text = [
        repr(secret)[2:-1],
        secret.hex(),
        secret.hex().upper(),
        secret.hex(" "),
        base58(secret),
        base64.b32encode(secret).decode().rstrip("="),
        ", ".join(map(str, secret)),
        # Whatever stands before it shifts base64 by one of three places; the ends depend on what is around.
        *(base64.b64encode(bytes(shift) + secret)[4:-4].decode() for shift in range(3)),
        *(base64.urlsafe_b64encode(bytes(shift) + secret)[4:-4].decode() for shift in range(3)),
    ]
    return [secret, *(form.encode() for form in text)]


DID = encode_did(bytes(SigningKey(SEED).verify_key))
SECRETS = {
    "seed": forms(SEED),
    "passphrase": forms(PASSPHRASE),
    "new passphrase": forms(NEW_PASSPHRASE),
}


def assert_silent(data: bytes, where: str) -> None:
    for name, shapes in SECRETS.items():
        for shape in shapes:
            assert shape not in data, f"the {name} is in {where}"


def test_a_leak_would_be_seen() -> None:
    for secret in (SEED, PASSPHRASE):
        for leak in (
            f"{secret!r}".encode(),
            secret.hex().encode(),
            base64.b64encode(b"key=" + secret),
            base64.urlsafe_b64encode(b"the key=" + secret + b"..."),
            base58(secret).encode(),
            b"\0" + secret + b"\0",
        ):
            with pytest.raises(AssertionError, match="is in"):
                assert_silent(leak, "here")


@dataclass
class Place:
    """A home with an encrypted key, and what commands are called with."""

    cli: Cli
    home: Path
    folder: Path
    key: Path
    phrase: Path
    new_phrase: Path
    wrong_phrase: Path
    model: Path
    text: Path
    draft: Path
    heard: list[bytes] = field(default_factory=list)

    def run(self, *arguments: object) -> str:
        """Run a command and look through all that it says."""
        ran = self.cli(*arguments)
        return self._checked(arguments, ran.status, ran.out, ran.err)

    def run_apart(self, *arguments: object) -> str:
        """The same in a process of its own, of which is watched what others see."""
        command = [sys.executable, "-m", "p2pkv.cli.app", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(process.pid, ended))
        watcher.start()
        try:
            out, err = process.communicate(timeout=50)
        finally:
            process.kill()
            ended.set()
            watcher.join()
        return self._checked(arguments, process.returncode, out, err)

    def _checked(self, arguments: tuple[object, ...], status: int, out: str, err: str) -> str:
        name = " ".join(map(str, arguments))
        assert status == 0, (name, err)
        assert_silent(out.encode(), f"stdout of {name}")
        assert_silent(err.encode(), f"stderr of {name}")
        return out

    def _watch(self, pid: int, ended: threading.Event) -> None:
        """Keep what others see of a process and its children: command lines and environments."""
        while not ended.wait(0.05):
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                for each in (pid, *children):
                    self.heard += [Path(f"/proc/{each}/cmdline").read_bytes(), Path(f"/proc/{each}/environ").read_bytes()]
            except (OSError, ValueError):
                continue


@pytest.fixture
def place(cli: Cli, home: Path, tmp_path: Path) -> Place:
    folder = tmp_path / "files"
    folder.mkdir()
    key = HomeLayout(home).publisher_key
    write_publisher_key(key, SEED, PASSPHRASE, CHEAP)

    def secret(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data + b"\n")
        path.chmod(0o600)
        return path

    text = tmp_path / "text"
    text.write_text("Call me Ishmael. " * 20)
    draft = folder / "book.draft"
    draft.write_bytes(encode_draft(make_sample(list(range(300))).artifact.manifest))
    return Place(
        cli,
        home,
        folder,
        key,
        secret("phrase", PASSPHRASE),
        secret("new", NEW_PASSPHRASE),
        secret("wrong", NEW_PASSPHRASE + PASSPHRASE),
        save_checkpoint(tmp_path / "model"),
        text,
        draft,
    )


# Every command that takes a key; each is run by the test that follows.
COVERED = {
    "keygen",
    "key show",
    "key passphrase",
    "sign",
    "publish",
    "renew",
    "revoke",
    "rotate",
    "grant",
    "generate",
}


def test_every_command_that_takes_a_key_is_run_here() -> None:
    taking = {
        name
        for name, command in commands().items()
        if {"--key", "--passphrase-file"} & {option for parameter in command.params for option in parameter.opts}
    }
    assert taking == COVERED


def test_no_option_takes_a_secret_itself() -> None:
    """What stands on a command line is there for every user of the machine to read."""
    seen = 0
    for command in commands().values():
        for option in command.params:
            if any(word in str(option.opts) for word in ("pass", "seed", "secret", "key")):
                assert option.is_flag or option.metavar == "FILE", option.opts
                seen += 1
    assert seen > len(COVERED)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_command_tells_a_secret(place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="p2pkv")
    caplog.set_level(logging.DEBUG, logger="p2pkv_node")
    monkeypatch.setenv("P2PKV_DEBUG", "1")
    phrase, out = ("--passphrase-file", place.phrase), place.folder / "out"
    with embedded_node(place.home):
        published = place.run_apart("publish", place.model, place.text, "--key", place.key, *phrase, "--trust")
        manifest = published.split()[1]
        place.run("renew", manifest, *phrase, "--expires", "1d", "--json")
        place.run("namespace", "create", "team")
        private = place.run("publish", place.model, place.text, "--private", "team", *phrase, "--json")
        place.run("grant", json.loads(private)["manifest"], DID, "--out", place.folder / "grant", *phrase)
        asked = ("--prompt-file", place.text, "--question", "Who?", "--max-new-tokens", 1)
        place.run("generate", place.model, *asked, *phrase)
    place.run_apart("sign", place.draft, "--out", out, *phrase, "--yes")
    monkeypatch.setenv("P2PKV_DEBUG", "")
    place.run("sign", place.draft, "--out", out, *phrase, "--yes", "--json")
    monkeypatch.setenv("P2PKV_DEBUG", "1")
    place.run("keygen", "--passphrase-file", place.new_phrase, "--out", place.folder / "new.key")
    place.run("revoke", manifest, *phrase)
    new_phrase = ("--new-passphrase-file", place.new_phrase)
    place.run("rotate", "--to", place.folder / "new.key", *phrase, *new_phrase)
    place.run("key", "show")
    place.run("key", "passphrase", *phrase, "--remove", "--json")
    place.run("sign", place.draft, "--out", out, "--yes")
    place.key.unlink()
    assert_silent(b"\n".join(place.heard), "a command line or an environment")
    assert any(b"passphrase-file" in seen for seen in place.heard)
    assert "published" in caplog.text
    assert_silent(caplog.text.encode(), "the log")
    for path in (path for folder in (place.home, place.folder) for path in folder.rglob("*") if path.is_file()):
        assert_silent(path.read_bytes(), str(path))


@pytest.mark.parametrize("debug", ["1", ""])
def test_no_command_that_fails_tells_a_secret(
    cli: Cli, place: Place, debug: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With tracebacks and without, in every way in which one can fail with a key at hand."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("P2PKV_DEBUG", debug)
    manifest = str(make_sample([1, 2, 3]).cid)
    phrase, out = ("--passphrase-file", place.phrase), place.folder / "out"
    wrong = ("--passphrase-file", place.wrong_phrase)

    def fails(*arguments: object, status: int = 2) -> None:
        for options in ([], ["--json"]):
            ran = cli(*arguments, *options)
            name = " ".join(map(str, arguments))
            assert ran.status == status, (name, ran.err)
            assert_silent((ran.out + ran.err).encode(), f"what {name} prints")

    fails("publish", place.model, place.text, *wrong)
    fails("publish", place.model, place.text, *phrase, status=4)  # nobody to publish to
    fails("renew", manifest, *phrase, status=4)
    fails("revoke", manifest, *wrong)
    fails("rotate", "--to", place.key, *phrase)  # the new key is the old one
    fails("rotate", "--to", place.phrase, *phrase)
    fails("sign", place.draft, "--out", out, *wrong, "--yes")
    fails("sign", place.draft, "--out", out, *phrase)  # nobody to ask
    fails("sign", place.draft, "--out", place.folder, *phrase, "--yes")
    fails("sign", place.draft, "--out", place.folder / "no" / "folder", *phrase, "--yes", status=4)
    fails("sign", place.text, "--out", out, *phrase, "--yes", status=3)
    fails("sign", place.key, "--out", out, *phrase, "--yes", status=3)  # the key in the place of the draft
    fails("sign", place.draft, "--out", out, "--key", place.phrase, "--yes")  # the passphrase in that of the key
    fails("inspect", place.key, status=3)
    fails("join", place.key, place.phrase, "--out", out, status=3)
    fails("keygen", *phrase, "--out", place.key)  # never over a key
    fails("key", "passphrase", *wrong, "--remove")
    fails("key", "passphrase", *phrase, "--new-passphrase-file", place.folder)
    write_publisher_key(place.folder / "open.key", SEED)
    text = (place.folder / "open.key").read_text()
    for damaged in (
        text.replace("seed", "sead"),
        text[:-1],
        text.replace("v1", "v2"),
        text.replace(SEED.hex(), SEED.hex().upper()),
    ):
        (place.folder / "open.key").write_text(damaged)
        status = 3 if "v2" in damaged else 2
        fails("sign", place.draft, "--out", out, "--key", place.folder / "open.key", "--yes", status=status)
    (place.folder / "open.key").chmod(0o644)
    fails("sign", place.draft, "--out", out, "--key", place.folder / "open.key", "--yes")
    assert_silent(caplog.text.encode(), "the log")


def test_a_defect_in_the_middle_of_signing_tells_no_secret(
    cli: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_publisher_key(HomeLayout(home).publisher_key, SEED)
    draft = tmp_path / "draft"
    draft.write_bytes(encode_draft(make_sample([1, 2, 3]).artifact.manifest))

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(sign, "sign_manifest", fail)
    monkeypatch.setenv("P2PKV_DEBUG", "1")
    for options in ([], ["--json"]):
        ran = cli("sign", draft, "--out", tmp_path / "out", "--yes", *options)
        assert ran.status == 1
        assert "out of luck" in ran.err
        assert "Traceback" in ran.err
        assert_silent((ran.out + ran.err).encode(), "what a defect prints")
