"""Files of publishers' keys, in the open or under a passphrase (``docs/spec/key-file.md``).

Lines of text: what it is, the publisher's ``did:key``, then the seed in hex, or what a passphrase opens. The key of the box is
derived with argon2id (RFC 9106), the box is XSalsa20-Poly1305 (NaCl's secretbox). The cost of the derivation stands in the
file, so that it can grow, and is bounded before anything is derived, so that no file takes gigabytes or minutes.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nacl import exceptions as nacl_errors
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.signing import SigningKey

from p2pkv.errors import FormatError, KeyFileError, MachineError, UsageError, WrongPassphraseError
from p2pkv.formats.did import decode_did, encode_did
from p2pkv.limits import (
    KEY_FILE_MEMORY_BYTES,
    KEY_FILE_OPERATIONS,
    MAX_KEY_FILE_BYTES,
    MAX_KEY_FILE_MEMORY_BYTES,
    MAX_KEY_FILE_OPERATIONS,
    MAX_PASSPHRASE_BYTES,
)
from p2pkv.store.files import os_errors, replace_file
from p2pkv.store.secrets import SEED_BYTES, parse_hex, read_lines, read_secret_up_to, write_secret

_HEAD: Final = "p2pkv publisher key"
_BOX_BYTES: Final = SecretBox.NONCE_SIZE + SecretBox.MACBYTES + SEED_BYTES


@dataclass(frozen=True, slots=True)
class Cost:
    """What one guess of a passphrase costs: passes of argon2id over so many bytes of memory."""

    operations: int
    memory: int


STANDARD_COST: Final = Cost(KEY_FILE_OPERATIONS, KEY_FILE_MEMORY_BYTES)


@dataclass(frozen=True, slots=True)
class _Box:
    """A seed under a passphrase: nonce and ciphertext, and how the box's key is derived."""

    cost: Cost
    salt: bytes
    sealed: bytes


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A publisher's key as it lies in its file; its name is read without the passphrase, and proved when it is opened."""

    path: Path
    did: str
    _content: bytes | _Box = field(repr=False)

    @property
    def encrypted(self) -> bool:
        """Whether a passphrase opens it."""
        return isinstance(self._content, _Box)

    def open(self, passphrase: bytes | None = None) -> SigningKey:
        """Return the key. An encrypted one takes a passphrase, another takes none of what is given.

        Raises UsageError where the passphrase is missing, WrongPassphraseError, KeyFileError where the key in the file is not
        the one that it names, MachineError where the memory for the derivation is lacking.
        """
        if not isinstance(self._content, _Box):
            seed = self._content
        elif passphrase is None:
            raise UsageError(f"the key in {self.path} needs its passphrase", advice="Give it with --passphrase-file FILE.")
        else:
            seed = _unseal(self.path, self._content, passphrase)
        key = SigningKey(seed)
        if encode_did(bytes(key.verify_key)) != self.did:
            raise KeyFileError(f"the key in {self.path} is not that of {self.did}", advice="Take a copy of the file.")
        return key


def write_publisher_key(path: Path, seed: bytes, passphrase: bytes | None = None, cost: Cost = STANDARD_COST) -> str:
    """Keep the 32-byte seed of a publisher's Ed25519 key in a new file, and return its ``did:key``.

    Raises UsageError for an empty or overlong passphrase, what :func:`p2pkv.store.secrets.write_secret` raises, MachineError.
    """
    did, data = _encode(seed, passphrase, cost)
    write_secret(path, data)
    return did


def change_passphrase(file: KeyFile, old: bytes | None, new: bytes | None, cost: Cost = STANDARD_COST) -> None:
    """Write a key file again under another passphrase, or with ``None`` under none; it is the old or the new one at any time.

    What the disk or a copy still has of the old file opens with the old passphrase. Raises what :meth:`KeyFile.open` raises,
    UsageError, DiskFullError, StoreError.
    """
    _, data = _encode(bytes(file.open(old)), new, cost)
    with os_errors(f"write the key file {file.path}"):
        replace_file(file.path, data)


def read_key_file(path: Path) -> KeyFile:
    """Return the key file at ``path``, not opened. Raises KeyFileError, UnknownVersionError, StoreError."""
    lines = read_lines(path, _HEAD, read_secret_up_to(path, MAX_KEY_FILE_BYTES))
    did = lines[0] if lines else ""
    if not _is_did(did):
        raise KeyFileError(f"the key file {path} does not name its publisher")
    match [tuple(line.split(" ")) for line in lines[1:]]:
        case [("seed", digits)]:
            return KeyFile(path, did, parse_hex(path, digits, SEED_BYTES))
        case [("argon2id", operations, memory, salt), ("secretbox", sealed)]:
            cost = Cost(_number(path, operations, MAX_KEY_FILE_OPERATIONS), _number(path, memory, MAX_KEY_FILE_MEMORY_BYTES))
            if cost.memory < argon2id.MEMLIMIT_MIN:
                raise _bad_cost(path)
            box = _Box(cost, parse_hex(path, salt, argon2id.SALTBYTES), parse_hex(path, sealed, _BOX_BYTES))
            return KeyFile(path, did, box)
    raise KeyFileError(f"the key file {path} holds neither a seed nor one under a passphrase")


def read_publisher_key(path: Path, passphrase: bytes | None = None) -> bytes:
    """Return the 32-byte seed in ``path``. Raises what :func:`read_key_file` and :meth:`KeyFile.open` raise."""
    return bytes(read_key_file(path).open(passphrase))


def _is_did(text: str) -> bool:
    """Return whether a line is a name; what is wrong with it is not told, since it may be the seed."""
    try:
        decode_did(text)
    except FormatError:
        return False
    return True


def _number(path: Path, text: str, most: int) -> int:
    """Return a positive decimal number without leading zeros. Raises KeyFileError for another, and beyond ``most``."""
    if re.fullmatch(r"[1-9][0-9]{0,15}", text) is None or int(text) > most:
        raise _bad_cost(path)
    return int(text)


def _bad_cost(path: Path) -> KeyFileError:
    return KeyFileError(
        f"the key file {path} asks for more work than is done for a passphrase, or for none",
        advice="Take a copy of the file; whoever changed this one may have changed more.",
    )


def _encode(seed: bytes, passphrase: bytes | None, cost: Cost) -> tuple[str, bytes]:
    if len(seed) != SEED_BYTES:
        raise KeyFileError(f"a publisher's key has {SEED_BYTES} bytes", advice="Pass the seed of an Ed25519 key.")
    did = encode_did(bytes(SigningKey(seed).verify_key))
    lines = [f"{_HEAD} v1", did]
    if passphrase is None:
        lines.append(f"seed {seed.hex()}")
    else:
        salt = secrets.token_bytes(argon2id.SALTBYTES)
        sealed = SecretBox(_derive(passphrase, salt, cost)).encrypt(seed)
        lines += [f"argon2id {cost.operations} {cost.memory} {salt.hex()}", f"secretbox {sealed.hex()}"]
    return did, "".join(f"{line}\n" for line in lines).encode("ascii")


def _unseal(path: Path, box: _Box, passphrase: bytes) -> bytes:
    try:
        return SecretBox(_derive(passphrase, box.salt, box.cost)).decrypt(box.sealed)
    except nacl_errors.CryptoError:
        raise WrongPassphraseError(f"the passphrase does not open {path}") from None


def _derive(passphrase: bytes, salt: bytes, cost: Cost) -> bytes:
    if not 0 < len(passphrase) <= MAX_PASSPHRASE_BYTES:
        raise UsageError(
            f"a passphrase has 1 to {MAX_PASSPHRASE_BYTES} bytes", advice="Choose a sentence that nobody else would choose."
        )
    try:
        return argon2id.kdf(SecretBox.KEY_SIZE, passphrase, salt, cost.operations, cost.memory)
    except (nacl_errors.RuntimeError, MemoryError):
        raise MachineError(
            f"{cost.memory} bytes of memory for the passphrase are not to be had", advice="Free some memory and try again."
        ) from None
