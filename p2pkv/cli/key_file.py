"""The key that a command signs or opens with: its option, its file, and where its passphrase comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from nacl.signing import SigningKey

from p2pkv.cli.passphrase import ask_passphrase, read_passphrase
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import KeyFile, read_key_file

KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Key to sign with. [default: keys/publisher.key in the home]"),
]


def key_path(path: Path | None, home: Path) -> Path:
    """Return the key file that an option names, by default the home's; absolute."""
    return path.expanduser().absolute() if path is not None else HomeLayout(home).publisher_key


def find_key(path: Path | None, home: Path) -> KeyFile:
    """Return the key file that an option names, by default the home's, not opened. Raises what ``read_key_file`` raises."""
    return read_key_file(key_path(path, home))


def open_key(file: KeyFile, passphrase_file: Path | None) -> SigningKey:
    """Return the key in a file. The passphrase of an encrypted one is read from ``passphrase_file``, else asked for.

    Raises UsageError where there is neither file nor terminal, what :meth:`KeyFile.open` raises.
    """
    return file.open(passphrase_of(passphrase_file) if file.encrypted else None)


def passphrase_of(path: Path | None) -> bytes:
    """Return the passphrase in a file, else ask for it. Raises UsageError."""
    return read_passphrase(path) if path is not None else ask_passphrase("Passphrase of the key")
