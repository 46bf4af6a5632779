"""Attacks with files of secrets: costs that nobody can pay, other versions, pieces, names that are not the key's.

Whoever copies a key file from a stranger, or from a disk that rots, is told so, and nothing is derived for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.signing import SigningKey

from p2pkv.errors import KeyFileError, P2pkvError, UnknownVersionError, UsageError, WrongPassphraseError
from p2pkv.formats.did import encode_did
from p2pkv.limits import MAX_KEY_FILE_BYTES, MAX_KEY_FILE_MEMORY_BYTES, MAX_KEY_FILE_OPERATIONS, MAX_PASSPHRASE_BYTES
from p2pkv.store import namespaces, sequence
from p2pkv.store.publisher_key import read_publisher_key
from p2pkv.store.secrets import read_node_key
from p2pkv.units import MIB
from tests.hostile.attack import Attack, assert_refused, given
from tests.support import edwards
from tests.support.memory_file import file_in_memory

SEED, OTHER_SEED = bytes(range(200, 232)), bytes(range(100, 132))
DID, OTHER_DID = (encode_did(bytes(SigningKey(seed).verify_key)) for seed in (SEED, OTHER_SEED))
PASSPHRASE: Final = b"correct horse"
SALT = bytes(16)
MEMORY = argon2id.MEMLIMIT_MIN
DERIVE = argon2id.kdf
KEY = DERIVE(SecretBox.KEY_SIZE, PASSPHRASE, SALT, 1, MEMORY)


def lines(*each: str) -> bytes:
    return "".join(f"{line}\n" for line in each).encode()


def box(seed: bytes = SEED, key: bytes = KEY) -> str:
    return f"secretbox {bytes(SecretBox(key).encrypt(seed, bytes(24))).hex()}"


def cost(operations: object, memory: object, salt: str = SALT.hex()) -> bytes:
    return lines(HEAD, DID, f"argon2id {operations} {memory} {salt}", box())


HEAD = "p2pkv publisher key v1"
SEED_LINE = f"seed {SEED.hex()}"
OPEN = lines(HEAD, DID, SEED_LINE)
SEALED = cost(1, MEMORY)


def open_key(data: bytes) -> None:
    with file_in_memory(data) as path:
        read_publisher_key(path, PASSPHRASE)


OF_COSTS: dict[str, tuple[object, object]] = {
    "a pass more than is done": (MAX_KEY_FILE_OPERATIONS + 1, MEMORY),
    "hours of passes": (10**6, MAX_KEY_FILE_MEMORY_BYTES),
    "2^32 passes": (2**32, MEMORY),
    "2^32 + 1 passes, which is 1 to who cuts it off": (2**32 + 1, MEMORY),
    "2^64 passes": (2**64, MEMORY),
    "a number of passes that goes on": ("9" * 700, MEMORY),
    "no pass": (0, MEMORY),
    "-1 passes": (-1, MEMORY),
    "half a pass": ("0.5", MEMORY),
    "passes in hexadecimal": ("0x1", MEMORY),
    "passes with a leading zero": ("01", MEMORY),
    "passes with a sign": ("+1", MEMORY),
    "passes with an underscore": ("1_0", MEMORY),
    "passes in other digits": ("\N{ARABIC-INDIC DIGIT ONE}", MEMORY),
    "a byte more than is taken": (1, MAX_KEY_FILE_MEMORY_BYTES + 1),
    "terabytes": (1, 2**40),
    "2^63 bytes": (1, 2**63),
    "2^64 + 8192 bytes, which is 8192 to who cuts it off": (1, 2**64 + 8192),
    "a byte too few": (1, MEMORY - 1),
    "no memory": (1, 0),
    "memory that is no number": (1, "inf"),
    "memory of 1e9": (1, "1e9"),
}
BROKEN: dict[str, bytes] = {
    "no byte": b"",
    "megabytes": bytes(16 * MIB),
    "megabytes behind a good one": OPEN + bytes(16 * MIB),
    "as much as there may be and more": OPEN.ljust(MAX_KEY_FILE_BYTES + 1, b"\n"),
    **{f"the first {end} bytes": OPEN[:end] for end in range(1, len(OPEN), 11)},
    **{f"the first {end} bytes of a sealed one": SEALED[:end] for end in range(1, len(SEALED), 17)},
    "a byte behind it": OPEN + b"x",
    "an empty line behind it": OPEN + b"\n",
    "twice": OPEN * 2,
    "line ends of another system": OPEN.replace(b"\n", b"\r\n"),
    "a mark of UTF-8 before it": b"\xef\xbb\xbf" + OPEN,
    "UTF-16": OPEN.decode().encode("utf-16"),
    "zeros for spaces": OPEN.replace(b" ", b"\0"),
    "another head": OPEN.replace(b"publisher", b"publishers"),
    "a head in capitals": OPEN.replace(b"p2pkv", b"P2PKV"),
    "a version of four digits": OPEN.replace(b"v1", b"v1000"),
    "a version without a number": OPEN.replace(b"v1", b"v"),
    "version -1": OPEN.replace(b"v1", b"v-1"),
    "a version and more": OPEN.replace(b"v1", b"v1 "),
    "no name": lines(HEAD, SEED_LINE),
    "a name that is none": lines(HEAD, DID[:-1], SEED_LINE),
    "a name in another method": lines(HEAD, DID.replace("key", "web", 1), SEED_LINE),
    "no seed": lines(HEAD, DID),
    "a seed of 31 bytes": lines(HEAD, DID, SEED_LINE[:-2]),
    "a seed of 33 bytes": lines(HEAD, DID, SEED_LINE + "00"),
    "a seed in capitals": lines(HEAD, DID, SEED_LINE.replace("c", "C")),
    "a seed with a space": lines(HEAD, DID, SEED_LINE.replace("c8", "c 8")),
    "two seeds": lines(HEAD, DID, SEED_LINE, SEED_LINE),
    "a seed beside a sealed one": lines(HEAD, DID, SEED_LINE, *SEALED.decode().splitlines()[2:]),
    "a box without a cost": lines(HEAD, DID, box()),
    "a cost without a box": lines(HEAD, DID, f"argon2id 1 {MEMORY} {SALT.hex()}"),
    "a box before its cost": lines(HEAD, DID, box(), f"argon2id 1 {MEMORY} {SALT.hex()}"),
    "argon2i": SEALED.replace(b"argon2id", b"argon2i"),
    "scrypt": SEALED.replace(b"argon2id", b"scrypt"),
    "a salt of 15 bytes": cost(1, MEMORY, SALT.hex()[:-2]),
    "no salt": cost(1, MEMORY, ""),
    "a box that lacks a byte": SEALED[:-3] + b"\n",
    "a seed under another's name": lines(HEAD, OTHER_DID, SEED_LINE),
    "a sealed seed under another's name": lines(HEAD, OTHER_DID, *SEALED.decode().splitlines()[2:]),
    "another's seed, sealed, under one's own name": lines(HEAD, DID, f"argon2id 1 {MEMORY} {SALT.hex()}", box(OTHER_SEED)),
    **{
        f"a name of small order, {number}": lines(HEAD, encode_did(next(edwards.encodings(point))), SEED_LINE)
        for number, point in enumerate(edwards.SMALL_ORDER)
    },
}
LATER = {f"version {version}": OPEN.replace(b"v1", f"v{version}".encode()) for version in ("0", "2", "999", "01")}
NOT_OPENED: dict[str, bytes] = {
    "sealed under another key": lines(HEAD, DID, f"argon2id 1 {MEMORY} {SALT.hex()}", box(key=bytes(32))),
    "another salt": cost(1, MEMORY, bytes(range(16)).hex()),
    "another cost": cost(2, MEMORY),
    "a box of zeros": lines(HEAD, DID, f"argon2id 1 {MEMORY} {SALT.hex()}", f"secretbox {'0' * 144}"),
}


# --- each kind of file as every other --------------------------------------------------------------------------------------

KINDS: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "publisher key": (OPEN, read_publisher_key),
    "node key": (lines("p2pkv node key v1", SEED.hex()), read_node_key),
    "namespace": (lines("p2pkv namespace v1", SEED.hex()), namespaces._read),
    "sequence": (lines("p2pkv sequence v1", DID, "7"), partial(sequence._read, did=DID)),
}
NUMBERS: dict[str, str] = {
    "": "", "-1": "-1", "07": "07", "7.0": "7.0", "0x7": "0x7", "a line more": "7\n7", "20 digits": "9" * 20, "words": "seven",
}  # fmt: skip


def read_as(kind: str, data: bytes) -> None:
    with file_in_memory(data) as path:
        KINDS[kind][1](path)


OF_KINDS = {
    **{f"a {one} for a {other}": (other, KINDS[one][0], KeyFileError) for one in KINDS for other in KINDS if one != other},
    **{f"half of a {kind}": (kind, data[: len(data) // 2], KeyFileError) for kind, (data, _) in KINDS.items()},
    **{
        f"a {kind} of a later version": (kind, data.replace(b"v1", b"v2"), UnknownVersionError)
        for kind, (data, _) in KINDS.items()
    },
    **{f"a {kind} of megabytes": (kind, data + bytes(16 * MIB), KeyFileError) for kind, (data, _) in KINDS.items()},
    "the numbers of another publisher": ("sequence", lines("p2pkv sequence v1", OTHER_DID, "7"), KeyFileError),
    **{
        f"a last number that is {name!r}": ("sequence", lines("p2pkv sequence v1", DID, number), KeyFileError)
        for name, number in NUMBERS.items()
    },
}
Refused = tuple[str, bytes, type[P2pkvError]]
OF_PUBLISHER_KEYS: list[Refused] = [
    *((f"a cost of {name}", cost(*how), KeyFileError) for name, how in OF_COSTS.items()),
    *((name, data, KeyFileError) for name, data in BROKEN.items()),
    *((name, data, UnknownVersionError) for name, data in LATER.items()),
    *((name, data, WrongPassphraseError) for name, data in NOT_OPENED.items()),
]
ATTACKS = [
    *(Attack(name, open_key, error, given(data)) for name, data, error in OF_PUBLISHER_KEYS),
    *(Attack(name, partial(read_as, kind), error, given(data)) for name, (kind, data, error) in OF_KINDS.items()),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    def derive(size: int, passphrase: bytes, salt: bytes, operations: int, memory: int) -> bytes:
        assert (operations, memory) in ((1, MEMORY), (2, MEMORY)), "work is done for a file that asks for too much"
        return DERIVE(size, passphrase, salt, operations, memory)

    monkeypatch.setattr(argon2id, "kdf", derive)
    error = assert_refused(attack)
    for secret in (SEED.hex(), OTHER_SEED.hex(), PASSPHRASE.decode()):
        assert secret not in f"{error} {error!r} {error.__context__!r}"


def test_what_the_attacks_change_is_good() -> None:
    open_key(OPEN)
    open_key(SEALED)
    for kind, (data, _) in KINDS.items():
        read_as(kind, data)


@pytest.mark.parametrize("passphrase", [b"", b"x" * (MAX_PASSPHRASE_BYTES + 1), b"x" * MIB])
def test_a_passphrase_that_is_none(passphrase: bytes) -> None:
    def open_with() -> None:
        with file_in_memory(SEALED) as path:
            read_publisher_key(path, passphrase)

    assert_refused(Attack("", open_with, UsageError))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o666, 0o610])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_others_may_open(kind: str, mode: int) -> None:
    data, read = KINDS[kind]

    def open_it() -> None:
        with file_in_memory(data, mode) as path:
            read(path)

    assert_refused(Attack("", open_it, KeyFileError))


@pytest.mark.parametrize("kind", ["publisher key", "node key", "namespace", "sequence"])
def test_what_is_no_plain_file_is_not_read(kind: str, tmp_path: Path) -> None:
    """A pipe would be waited for, a device has no end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        assert_refused(Attack("", lambda path=path: KINDS[kind][1](path), KeyFileError))
