"""``p2pkv key``: look at a key file, and change its passphrase."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli.key_file import KeyOption, find_key, passphrase_of
from p2pkv.cli.options import HomeOption, JsonOption, home_of, show_help
from p2pkv.cli.output import fields, reporting
from p2pkv.cli.passphrase import PassphraseFileOption, ask_new_passphrase, read_passphrase
from p2pkv.errors import UsageError
from p2pkv.store.publisher_key import change_passphrase

app = typer.Typer(
    invoke_without_command=True,
    callback=show_help,
    help="Look at a publisher's key file, and change its passphrase.",
    epilog="Example: p2pkv key show --key team.key",
)


@app.command()
def show(key: KeyOption = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Print the did:key of a key file. Needs no passphrase.

    \b
    Example:
      p2pkv key show --key team.key
    """
    with reporting(as_json) as output:
        file = find_key(key, home_of(home))
        pairs = [
            ("publisher", file.did),
            ("key file", str(file.path)),
            ("encrypted", "yes, with a passphrase" if file.encrypted else "no"),
        ]
        output.result({"did": file.did, "file": str(file.path), "encrypted": file.encrypted}, fields(pairs))


@app.command()
def passphrase(
    key: KeyOption = None,
    remove: Annotated[bool, typer.Option("--remove", help="Leave the key without a passphrase.")] = False,
    passphrase_file: PassphraseFileOption = None,
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read the new passphrase from this file instead of asking for it.", readable=False),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a key file a passphrase, change it, or take it away.

    The key and its did:key stay the same. The file is replaced whole or not at all. Copies of the old file open with the old
    passphrase: whoever has one keeps it.

    \b
    Example:
      p2pkv key passphrase --key team.key
    """
    with reporting(as_json) as output:
        if remove and new_passphrase_file is not None:
            raise UsageError("--remove and --new-passphrase-file say different things", advice="Give one of the two.")
        file = find_key(key, home_of(home))
        old = passphrase_of(passphrase_file) if file.encrypted else None
        file.open(old)  # a wrong passphrase is told before a new one is asked for
        if remove:
            new = None
        else:
            new = read_passphrase(new_passphrase_file) if new_passphrase_file is not None else ask_new_passphrase()
        change_passphrase(file, old, new)
        document = {"did": file.did, "file": str(file.path), "encrypted": new is not None}
        state = "under its new passphrase" if new is not None else "without a passphrase now"
        output.result(document, [f"{file.path} is {state}"])
