from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from p2pkv.errors import DiskFullError, KeyFileError, P2pkvError, UnknownVersionError
from p2pkv.formats.did import encode_did
from p2pkv.store import files
from p2pkv.store.publisher_key import read_publisher_key, write_publisher_key
from p2pkv.store.secrets import load_or_create_node_seed, read_secret, write_secret

SEED = bytes(range(200, 232))
DID = encode_did(bytes(SigningKey(SEED).verify_key))


def put(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_publisher_key_is_three_lines_of_text_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "me.key"
    assert write_publisher_key(path, SEED) == DID
    assert path.read_text() == f"p2pkv publisher key v1\n{DID}\nseed {SEED.hex()}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert read_publisher_key(path) == SEED
    assert os.listdir(path.parent) == ["me.key"]


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    write_publisher_key(path, SEED)
    with pytest.raises(KeyFileError, match="not overwritten"):
        write_publisher_key(path, bytes(32))
    assert read_publisher_key(path) == SEED
    assert os.listdir(tmp_path) == ["me.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "me.key"
    write_publisher_key(path, SEED)
    path.chmod(mode)
    with pytest.raises(KeyFileError) as caught:
        read_publisher_key(path)
    assert f"chmod 600 {path}" in caught.value.advice


GOOD = f"p2pkv publisher key v1\n{DID}\nseed {SEED.hex()}\n".encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\n",
        GOOD + GOOD.splitlines(keepends=True)[2],
        GOOD.replace(DID.encode(), b""),
        GOOD.replace(DID.encode(), DID.encode()[:-1] + b"x"),
        GOOD.replace(b"seed ", b""),
        GOOD.replace(b"seed ", b"seed  "),
        GOOD.replace(b"publisher", b"Publisher"),
        GOOD.replace(b"v1", b"vx"),
        GOOD.replace(SEED.hex().encode(), SEED.hex().upper().encode()),
        GOOD.replace(SEED.hex().encode(), b"g" + SEED.hex().encode()[1:]),
        GOOD[:-1] + b"\xff",
        random.Random(1).randbytes(len(GOOD)),
    ],
)
def test_other_text_is_refused_and_never_shown(tmp_path: Path, data: bytes) -> None:
    path = put(tmp_path / "me.key", data)
    with pytest.raises(KeyFileError) as caught:
        read_publisher_key(path)
    for error in (caught.value, caught.value.__context__, caught.value.__cause__):
        assert SEED.hex()[:16] not in f"{error!r} {error}".lower()


def test_a_later_version_says_so(tmp_path: Path) -> None:
    path = put(tmp_path / "me.key", GOOD.replace(b"v1", b"v2"))
    with pytest.raises(UnknownVersionError, match="version 2"):
        read_publisher_key(path)


def test_the_nodes_key_is_not_a_publishers(tmp_path: Path) -> None:
    seed = load_or_create_node_seed(tmp_path)
    path = tmp_path / "keys" / "node.key"
    assert len(seed) == 32
    assert load_or_create_node_seed(tmp_path) == seed
    assert path.read_text().startswith("p2pkv node key v1\n")
    assert load_or_create_node_seed(tmp_path / "other") != seed
    padded = put(tmp_path / "padded.key", path.read_bytes().replace(b"node", b"node     "))
    for other in (path, padded):
        with pytest.raises(KeyFileError):
            read_publisher_key(other)


def test_an_unreadable_node_key_is_not_replaced(tmp_path: Path) -> None:
    load_or_create_node_seed(tmp_path)
    path = put(tmp_path / "keys" / "node.key", b"torn")
    with pytest.raises(KeyFileError):
        load_or_create_node_seed(tmp_path)
    assert path.read_bytes() == b"torn"


def test_missing_files_and_folders_are_key_errors(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="no key file") as caught:
        read_secret(tmp_path / "none", 4)
    assert "p2pkv keygen" in caught.value.advice
    with pytest.raises(KeyFileError, match="not a plain file"):
        read_secret(tmp_path, 4)


def test_a_write_that_fails_leaves_no_secret_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_sync", fail)
    with pytest.raises(DiskFullError) as caught:
        write_secret(tmp_path / "me.key", SEED)
    assert isinstance(caught.value, P2pkvError)
    assert os.listdir(tmp_path) == []
