"""Key files: text of two lines (what it is, and the seed in hex), readable by their owner alone.

A secret is never part of an error, a log line or a repr. A file is created once and never overwritten.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from p2pkv.errors import KeyFileError, UnknownVersionError
from p2pkv.store.files import create_file, os_errors, read_up_to
from p2pkv.store.home import HomeLayout

SEED_BYTES: Final = 32
_PUBLISHER: Final = "publisher"
_NODE: Final = "node"


def write_secret(path: Path, data: bytes) -> None:
    """Create ``path`` (mode 0600) with ``data``, whole and durable.

    Raises KeyFileError where it exists already, DiskFullError, StoreError.
    """
    with os_errors(f"write the key file {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            create_file(path, data)
        except FileExistsError:
            raise KeyFileError(
                f"{path} exists and is not overwritten", advice="Use the key that is there, or name another file."
            ) from None


def read_secret(path: Path, size: int) -> bytes:
    """Return the ``size`` bytes of a secret file.

    Raises KeyFileError where it is missing, readable by others, no plain file, or of another size; StoreError.
    """
    with os_errors(f"read the key file {path}"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise KeyFileError(f"there is no key file {path}") from None
        except PermissionError:
            raise KeyFileError(f"the key file {path} may not be read by this user") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise KeyFileError(f"{path} is not a plain file")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise KeyFileError(
                    f"the key file {path} is open to other users of this machine",
                    advice=f"Run `chmod 600 {path}`; if others had access to this machine, make a new key.",
                )
            data = read_up_to(descriptor, size + 1)
        finally:
            os.close(descriptor)
    if len(data) != size:
        raise KeyFileError(f"the key file {path} does not have {size} bytes", advice="It is cut off or not a key file.")
    return data


def write_publisher_key(path: Path, seed: bytes) -> None:
    """Keep the 32-byte seed of a publisher's Ed25519 key in ``path``. Raises what :func:`write_secret` raises."""
    write_secret(path, _encode(_PUBLISHER, seed))


def read_publisher_key(path: Path) -> bytes:
    """Return the 32-byte seed in ``path``. Raises KeyFileError, UnknownVersionError, StoreError."""
    return _read(path, _PUBLISHER)


def read_node_key(path: Path) -> bytes:
    """Return the 32-byte seed of a node's identity in ``path``. Raises KeyFileError, UnknownVersionError, StoreError."""
    return _read(path, _NODE)


def load_or_create_node_seed(home: Path) -> bytes:
    """Return the 32-byte seed of this node's identity, made on the first call. Raises what reading and writing one raise."""
    path = HomeLayout(home).node_key
    if not path.exists():
        write_secret(path, _encode(_NODE, secrets.token_bytes(SEED_BYTES)))
    return read_node_key(path)


def _encode(kind: str, seed: bytes) -> bytes:
    if len(seed) != SEED_BYTES:
        raise KeyFileError(f"a {kind} key has {SEED_BYTES} bytes", advice="Pass the seed of an Ed25519 key.")
    return f"p2pkv {kind} key v1\n{seed.hex()}\n".encode("ascii")


def _read(path: Path, kind: str) -> bytes:
    data = read_secret(path, len(_encode(kind, bytes(SEED_BYTES))))
    first, _, rest = data.decode("ascii", errors="replace").partition("\n")
    line = re.fullmatch(rf"p2pkv {kind} key v(\d{{1,3}})", first)
    if line is None:
        raise KeyFileError(f"{path} is not a {kind} key of p2pkv")
    if line[1] != "1":
        raise UnknownVersionError(f"the key file {path} has version {line[1]}; version 1 is known", advice="Upgrade p2pkv.")
    if re.fullmatch(r"[0-9a-f]{64}\n", rest) is None:
        raise KeyFileError(f"the key in {path} is not {2 * SEED_BYTES} hexadecimal digits")
    return bytes.fromhex(rest)
