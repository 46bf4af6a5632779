"""Keys under a passphrase: only that opens them, nobody is made to work without bounds, and no failure loses a key."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from nacl import exceptions as nacl_errors
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.signing import SigningKey

from p2pkv.errors import (
    DiskFullError,
    KeyFileError,
    MachineError,
    UnknownVersionError,
    UsageError,
    WrongPassphraseError,
)
from p2pkv.formats.did import encode_did
from p2pkv.limits import (
    KEY_FILE_MEMORY_BYTES,
    KEY_FILE_OPERATIONS,
    MAX_KEY_FILE_MEMORY_BYTES,
    MAX_KEY_FILE_OPERATIONS,
    MAX_PASSPHRASE_BYTES,
)
from p2pkv.store import files, publisher_key
from p2pkv.store.publisher_key import STANDARD_COST, Cost, change_passphrase, read_key_file, write_publisher_key
from tests.support import vectors
from tests.support.memory_file import file_in_memory

SEED = bytes(range(200, 232))
DID = encode_did(bytes(SigningKey(SEED).verify_key))
PASSPHRASE = b"correct horse battery staple"
CHEAP = Cost(1, argon2id.MEMLIMIT_MIN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "me.key"
    write_publisher_key(path, SEED, PASSPHRASE, CHEAP)
    return path


def test_its_passphrase_opens_a_key_and_its_name_needs_none(path: Path) -> None:
    file = read_key_file(path)
    assert (file.did, file.encrypted) == (DID, True)
    assert bytes(file.open(PASSPHRASE)) == SEED
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert SEED.hex() not in text
    assert SEED.hex() not in repr(file)
    assert text.splitlines()[:2] == ["p2pkv publisher key v1", DID]
    assert text.splitlines()[2].startswith(f"argon2id 1 {CHEAP.memory} ")


def test_the_file_is_what_its_page_says(path: Path) -> None:
    """Opened with PyNaCl alone, line by line."""
    _, did, kdf, box = path.read_text().splitlines()
    name, operations, memory, salt = kdf.split(" ")
    key = argon2id.kdf(32, PASSPHRASE, bytes.fromhex(salt), int(operations), int(memory))
    assert name == "argon2id"
    assert box.startswith("secretbox ")
    seed = SecretBox(key).decrypt(bytes.fromhex(box.removeprefix("secretbox ")))
    assert encode_did(bytes(SigningKey(seed).verify_key)) == did


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_golden_files_are_read(tmp_path: Path, name: str) -> None:
    vector = vectors.load("key-file.json")[name]
    path = tmp_path / "golden.key"
    path.write_bytes(vector.data)
    path.chmod(0o600)
    file = read_key_file(path)
    passphrase = vector.fields["passphrase"].encode() if name == "encrypted" else None
    assert (file.did, file.encrypted) == (vector.fields["did"], name == "encrypted")
    assert bytes(file.open(passphrase)).hex() == vector.fields["seed"]
    if name == "plain":
        write_publisher_key(tmp_path / "again.key", bytes.fromhex(vector.fields["seed"]))
        assert (tmp_path / "again.key").read_bytes() == vector.data


def test_two_files_of_one_key_and_passphrase_have_nothing_in_common(path: Path, tmp_path: Path) -> None:
    write_publisher_key(tmp_path / "other", SEED, PASSPHRASE, CHEAP)
    (*_, kdf, box), (*_, other_kdf, other_box) = (file.read_text().splitlines() for file in (path, tmp_path / "other"))
    assert kdf.split()[3] != other_kdf.split()[3]
    assert box[:58] != other_box[:58]


@pytest.mark.parametrize("wrong", [b"x", PASSPHRASE[:-1], PASSPHRASE + b" ", PASSPHRASE.upper()])
def test_another_passphrase_is_told_as_that(path: Path, wrong: bytes) -> None:
    with pytest.raises(WrongPassphraseError) as caught:
        read_key_file(path).open(wrong)
    assert caught.value.code == "key.passphrase"
    told = f"{caught.value!r} {caught.value} {caught.value.__context__!r}"
    assert wrong.decode() not in told or wrong == b"x"
    assert PASSPHRASE.decode() not in told


def test_none_and_impossible_passphrases_are_usage_errors(path: Path, tmp_path: Path) -> None:
    for passphrase in (None, b"", b"x" * (MAX_PASSPHRASE_BYTES + 1)):
        with pytest.raises(UsageError):
            read_key_file(path).open(passphrase)
    with pytest.raises(UsageError):
        write_publisher_key(tmp_path / "new", SEED, b"", CHEAP)
    assert os.listdir(tmp_path) == [path.name]


def _with_cost(path: Path, operations: object, memory: object) -> None:
    lines = path.read_text().splitlines()
    lines[2] = f"argon2id {operations} {memory} {lines[2].split()[3]}"
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("operations", "memory"),
    [
        (MAX_KEY_FILE_OPERATIONS + 1, CHEAP.memory),
        (1, MAX_KEY_FILE_MEMORY_BYTES + 1),
        (10**15, 10**15),
        (10**40, CHEAP.memory),
        (1, CHEAP.memory - 1),
        (0, CHEAP.memory),
        ("01", CHEAP.memory),
        ("-1", CHEAP.memory),
        ("1_0", CHEAP.memory),
        ("", ""),
    ],
)
def test_a_crafted_cost_is_refused_before_any_work(
    path: Path, operations: object, memory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_cost(path, operations, memory)
    monkeypatch.setattr(argon2id, "kdf", lambda *arguments: pytest.fail("work was done"))
    with pytest.raises(KeyFileError):
        read_key_file(path)


def test_a_new_key_costs_what_the_limits_say_and_may_be_read() -> None:
    assert Cost(KEY_FILE_OPERATIONS, KEY_FILE_MEMORY_BYTES) == STANDARD_COST
    assert STANDARD_COST.memory == argon2id.MEMLIMIT_MODERATE
    assert STANDARD_COST.operations == argon2id.OPSLIMIT_MODERATE
    assert KEY_FILE_OPERATIONS <= MAX_KEY_FILE_OPERATIONS
    assert KEY_FILE_MEMORY_BYTES <= MAX_KEY_FILE_MEMORY_BYTES


def test_one_changed_digit_opens_nothing(path: Path) -> None:
    good = path.read_text()
    for line in (2, 3):
        lines = good.splitlines()
        digit = lines[line][-1]
        lines[line] = lines[line][:-1] + ("0" if digit != "0" else "1")
        path.write_text("".join(f"{each}\n" for each in lines))
        with pytest.raises(WrongPassphraseError):
            read_key_file(path).open(PASSPHRASE)


@pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
def test_a_key_under_anothers_name_is_refused(tmp_path: Path, passphrase: bytes | None) -> None:
    path = tmp_path / "me.key"
    other = write_publisher_key(path, bytes(32), passphrase, CHEAP)
    path.write_text(path.read_text().replace(other, DID))
    file = read_key_file(path)
    assert file.did == DID
    with pytest.raises(KeyFileError, match="is not that of"):
        file.open(passphrase)


def test_a_passphrase_is_given_changed_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    write_publisher_key(path, SEED)
    for old, new in ((None, b"one"), (b"one", b"two"), (b"two", None)):
        change_passphrase(read_key_file(path), old, new, CHEAP)
        file = read_key_file(path)
        assert (file.did, file.encrypted, bytes(file.open(new))) == (DID, new is not None, SEED)
        assert path.stat().st_mode & 0o777 == 0o600
        if old is not None and new is not None:
            with pytest.raises(WrongPassphraseError):
                file.open(old)
    assert os.listdir(tmp_path) == ["me.key"]


def test_a_change_that_fails_leaves_the_key_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    with pytest.raises(WrongPassphraseError):
        change_passphrase(read_key_file(path), b"wrong", b"new", CHEAP)

    def fail(path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_sync", fail)
    with pytest.raises(DiskFullError):
        change_passphrase(read_key_file(path), PASSPHRASE, b"new", CHEAP)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_machine_without_the_memory_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> bytes:
        raise nacl_errors.RuntimeError("Unexpected failure in key derivation")

    monkeypatch.setattr(argon2id, "kdf", fail)
    with pytest.raises(MachineError, match="memory"):
        read_key_file(path).open(PASSPHRASE)


def test_a_key_file_shows_no_secret(tmp_path: Path) -> None:
    write_publisher_key(tmp_path / "me.key", SEED)
    file = read_key_file(tmp_path / "me.key")
    assert SEED.hex() not in repr(file)
    assert repr(SEED) not in repr(replace(file))


SEEDS = st.binary(min_size=32, max_size=32)
PASSPHRASES = st.none() | st.binary(min_size=1, max_size=MAX_PASSPHRASE_BYTES)


@settings(deadline=None)
@given(SEEDS, PASSPHRASES, PASSPHRASES)
def test_any_key_under_any_passphrase_and_under_no_other(seed: bytes, passphrase: bytes | None, other: bytes | None) -> None:
    did, data = publisher_key._encode(seed, passphrase, CHEAP)
    with file_in_memory(data) as path:
        file = read_key_file(path)
    assert (file.did, file.encrypted) == (did, passphrase is not None)
    assert bytes(file.open(passphrase)) == seed
    if passphrase is not None and other != passphrase:
        with pytest.raises((WrongPassphraseError, UsageError)):
            file.open(other)


@settings(deadline=None)
@given(SEEDS, PASSPHRASES, st.data())
def test_no_byte_of_a_key_file_is_free(seed: bytes, passphrase: bytes | None, data: st.DataObject) -> None:
    """Changed anywhere, it is refused, or does not open: never is it another key under the same name."""
    _, good = publisher_key._encode(seed, passphrase, CHEAP)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    with file_in_memory(bytes(changed)) as path, pytest.raises((KeyFileError, UnknownVersionError, WrongPassphraseError)):
        read_key_file(path).open(passphrase)
