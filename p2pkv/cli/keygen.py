"""``p2pkv keygen``: make a publisher's key."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer
from nacl.signing import SigningKey

from p2pkv.cli.options import HomeOption, JsonOption, home_of
from p2pkv.cli.output import fields, reporting
from p2pkv.formats.did import encode_did
from p2pkv.store.home import HomeLayout
from p2pkv.store.secrets import SEED_BYTES, read_publisher_key, write_publisher_key


def keygen(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the key. [default: keys/publisher.key in the home]")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a publisher key and print its did:key.

    The key signs what you publish. Give the did:key to those who shall trust you; keep the file to yourself and a copy of it
    in a safe place: without it nobody can publish under your name again. A file that exists is never overwritten.

    \b
    Example:
      p2pkv keygen --out team.key
    """
    with reporting(as_json, interrupted="Run the command again; a key that was written already is not overwritten.") as output:
        path = out.expanduser().absolute() if out is not None else HomeLayout(home_of(home)).publisher_key
        seed = secrets.token_bytes(SEED_BYTES)
        write_publisher_key(path, seed)
        did = encode_did(bytes(SigningKey(seed).verify_key))
        output.result({"did": did, "file": str(path)}, fields([("publisher", did), ("key file", str(path))]))


def load_key(path: Path | None, home: Path) -> SigningKey:
    """Return the publisher key in ``path``, by default the home's. Raises what ``read_publisher_key`` raises."""
    return SigningKey(read_publisher_key(path.expanduser() if path is not None else HomeLayout(home).publisher_key))
