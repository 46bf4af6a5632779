"""``p2pkv keygen``: make a publisher's key."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer
from nacl.signing import SigningKey

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption, ask_new_passphrase, ask_passphrase, read_passphrase
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_key_file, write_publisher_key
from p2pkv.store.secrets import SEED_BYTES

KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Key to sign with. [default: keys/publisher.key in the home]"),
]


def keygen(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the key. [default: keys/publisher.key in the home]")
    ] = None,
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Encrypt the key; asks for a passphrase, twice.")] = False,
    passphrase_file: PassphraseFileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a publisher key and print its did:key.

    The key signs what you publish. Give the did:key to those who shall trust you; keep the file to yourself and a copy of it
    in a safe place: without it nobody can publish under your name again. With --passphrase or --passphrase-file the key is
    of no use to whoever finds the file, nor to you without the passphrase. A file that exists is never overwritten.

    \b
    Example:
      p2pkv keygen --out team.key --passphrase
    """
    with reporting(as_json, interrupted="Run the command again; a key that was written already is not overwritten.") as output:
        path = key_path(out, home_of(home))
        secret = read_passphrase(passphrase_file) if passphrase_file is not None else None
        if secret is None and passphrase:
            secret = ask_new_passphrase()
        did = write_publisher_key(path, secrets.token_bytes(SEED_BYTES), secret)
        encrypted = secret is not None
        pairs = [("publisher", did), ("key file", f"{path}{', under its passphrase' if encrypted else ''}")]
        output.result({"did": did, "file": str(path), "encrypted": encrypted}, fields(pairs))


def key_path(path: Path | None, home: Path) -> Path:
    """Return the key file that an option names, by default the home's; absolute."""
    return path.expanduser().absolute() if path is not None else HomeLayout(home).publisher_key


def load_key(path: Path | None, home: Path, passphrase_file: Path | None = None) -> SigningKey:
    """Return the publisher key in ``path``, by default the home's.

    The passphrase of an encrypted one is read from ``passphrase_file``, else asked for on the terminal. Raises UsageError
    where there is neither, WrongPassphraseError, what ``read_key_file`` raises.
    """
    file = read_key_file(key_path(path, home))
    return file.open(passphrase_of(passphrase_file) if file.encrypted else None)


def passphrase_of(path: Path | None) -> bytes:
    """Return the passphrase in a file, else ask for it. Raises UsageError."""
    return read_passphrase(path) if path is not None else ask_passphrase("Passphrase of the key")
