"""``p2pkv keygen``: make a publisher's key."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli.key_file import key_path
from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption, ask_new_passphrase, read_passphrase
from p2pkv.store.publisher_key import write_publisher_key
from p2pkv.store.secrets import SEED_BYTES


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
