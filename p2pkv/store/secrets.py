"""Files of secrets, readable by their owner alone, and the node's own key: two lines, what it is and the seed in hex.

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
from p2pkv.store.files import create_file, make_private_folder, os_errors, read_up_to
from p2pkv.store.home import HomeLayout

SEED_BYTES: Final = 32
_HEAD: Final = "p2pkv node key"


def write_secret(path: Path, data: bytes) -> None:
    """Create ``path`` (mode 0600) with ``data``, whole and durable.

    Raises KeyFileError where it exists already, DiskFullError, StoreError.
    """
    with os_errors(f"write the key file {path}"):
        make_private_folder(path.parent)
        try:
            create_file(path, data)
        except FileExistsError:
            raise KeyFileError(
                f"{path} exists and is not overwritten", advice="Use the key that is there, or name another file."
            ) from None


def read_secret(path: Path, size: int) -> bytes:
    """Return the ``size`` bytes of a secret file. Raises what :func:`read_secret_up_to` raises, also for another size."""
    data = read_secret_up_to(path, size)
    if len(data) != size:
        raise KeyFileError(f"the key file {path} does not have {size} bytes", advice="It is cut off or not a key file.")
    return data


def read_secret_up_to(path: Path, most: int) -> bytes:
    """Return what is in a secret file.

    Raises KeyFileError where it is missing, readable by others, no plain file, or larger than ``most`` bytes; StoreError.
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
            data = read_up_to(descriptor, most + 1)
        finally:
            os.close(descriptor)
    if len(data) > most:
        raise KeyFileError(f"the key file {path} has more than {most} bytes", advice="It is not a key file.")
    return data


def read_node_key(path: Path) -> bytes:
    """Return the 32-byte seed of a node's identity in ``path``. Raises KeyFileError, UnknownVersionError, StoreError."""
    # Exactly so long, the file has one line behind its first, or none that is a seed.
    line, *_ = read_lines(path, _HEAD, read_secret(path, len(_encode(bytes(SEED_BYTES))))) or [""]
    return parse_hex(path, line, SEED_BYTES)


def load_or_create_node_seed(home: Path) -> bytes:
    """Return the 32-byte seed of this node's identity, made on the first call. Raises what reading and writing one raise."""
    path = HomeLayout(home).node_key
    if not path.exists():
        write_secret(path, _encode(secrets.token_bytes(SEED_BYTES)))
    return read_node_key(path)


def read_lines(path: Path, head: str, data: bytes) -> list[str]:
    """Return the lines of a key file ``data`` behind the first, which is ``head`` and the version 1.

    Raises KeyFileError for another text, UnknownVersionError for a later version.
    """
    first, *lines = data.decode("ascii", errors="replace").split("\n")
    if not lines or lines.pop():
        raise KeyFileError(f"the key file {path} does not end with a whole line", advice="It is cut off or not a key file.")
    line = re.fullmatch(rf"{head} v(\d{{1,3}})", first)
    if line is None:
        raise KeyFileError(f"{path} does not begin as a {head}")
    if line[1] != "1":
        raise UnknownVersionError(f"the key file {path} has version {line[1]}; version 1 is known", advice="Upgrade p2pkv.")
    return lines


def parse_hex(path: Path, text: str, size: int) -> bytes:
    """Return the ``size`` bytes that ``text`` of the key file ``path`` is in lower case. Raises KeyFileError."""
    if re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", text) is None:
        raise KeyFileError(f"the key in {path} is not {2 * size} hexadecimal digits")
    return bytes.fromhex(text)


def _encode(seed: bytes) -> bytes:
    return f"{_HEAD} v1\n{seed.hex()}\n".encode("ascii")
