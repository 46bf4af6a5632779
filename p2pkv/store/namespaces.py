"""Namespaces of private artifacts: secrets of 32 bytes, one file each, under names that the user chooses.

A file is readable by its owner alone, created once and never overwritten.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from p2pkv.artifact.private import NAMESPACE_BYTES
from p2pkv.errors import KeyFileError, UsageError
from p2pkv.store.files import os_errors
from p2pkv.store.home import HomeLayout
from p2pkv.store.secrets import parse_hex, read_lines, read_secret, write_secret

_HEAD: Final = "p2pkv namespace"
_SUFFIX: Final = ".namespace"
# Also the name of a file, so nothing that leads elsewhere or is hidden.
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def create_namespace(home: Path, name: str, secret: bytes) -> Path:
    """Keep ``secret``, 32 bytes of chance, as the namespace ``name``; return its file.

    Raises UsageError for a name that is none, KeyFileError where it exists already, DiskFullError, StoreError.
    """
    path = _path(home, name)
    write_secret(path, _encode(secret))
    return path


def read_namespace(home: Path, name: str) -> bytes:
    """Return the secret of the namespace ``name``. Raises UsageError, KeyFileError, UnknownVersionError, StoreError."""
    path = _path(home, name)
    if not path.exists():
        raise KeyFileError(
            f"there is no namespace {name} in {home}",
            advice=f"Create it with `p2pkv namespace create {name}`, or copy its file from where it was created.",
        )
    return _read(path)


def _read(path: Path) -> bytes:
    line, *_ = read_lines(path, _HEAD, read_secret(path, len(_encode(bytes(NAMESPACE_BYTES))))) or [""]
    return parse_hex(path, line, NAMESPACE_BYTES)


def list_namespaces(home: Path) -> list[str]:
    """Return the names, in order. Raises StoreError."""
    folder = HomeLayout(home).namespaces
    with os_errors(f"list {folder}"):
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return sorted(name for name in found if _NAME.fullmatch(name))


def _path(home: Path, name: str) -> Path:
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name[:64]!r} is no name of a namespace", advice="Use up to 64 lower-case letters, digits, dots, - and _."
        )
    return HomeLayout(home).namespaces / f"{name}{_SUFFIX}"


def _encode(secret: bytes) -> bytes:
    return f"{_HEAD} v1\n{secret.hex()}\n".encode("ascii")
