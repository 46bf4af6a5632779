"""Passphrases for commands: asked for on the terminal, or read from a file; never an argument, which others can see."""

from __future__ import annotations

import getpass
import os
import stat
from pathlib import Path
from typing import Annotated, Final

import typer

from p2pkv.errors import UsageError
from p2pkv.limits import MAX_PASSPHRASE_BYTES
from p2pkv.store.files import os_errors, read_up_to

_HOW: Final = "Run it on a terminal, or give the passphrase with --passphrase-file FILE, such as /dev/fd/3."

PassphraseFileOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="Read the key's passphrase from this file, /dev/fd/N for an open descriptor, instead of asking for it.",
        readable=False,  # what is wrong with it is told with its remedy
    ),
]


def read_passphrase(path: Path) -> bytes:
    """Return the passphrase in a file or pipe, without the end of its line.

    Raises UsageError where it is missing, open to other users, empty, longer than MAX_PASSPHRASE_BYTES or has a second line.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path} with a passphrase", advice="Name the file that holds it.")
    with os_errors(f"read the passphrase in {path}"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISCHR(mode) and stat.S_IMODE(mode) & 0o077:
                raise UsageError(
                    f"the file {path} with a passphrase is open to other users of this machine",
                    advice=f"Run `chmod 600 {path}`; if others had access to this machine, change the passphrase.",
                )
            data = read_up_to(descriptor, MAX_PASSPHRASE_BYTES + 2)
        finally:
            os.close(descriptor)
    passphrase = data.removesuffix(b"\n").removesuffix(b"\r")
    if b"\n" in passphrase:
        raise UsageError(f"{path} has more than one line", advice="Put the passphrase alone in the file.")
    return _checked(passphrase)


def ask_passphrase(what: str) -> bytes:
    """Ask for a passphrase on the terminal, which does not show it. Raises UsageError without a terminal."""
    if not _has_terminal():
        raise UsageError(f"{what}, and there is no terminal to ask on", advice=_HOW)
    return _checked(getpass.getpass(f"{what}: ").encode())


def ask_new_passphrase() -> bytes:
    """Ask for a new passphrase, twice. Raises UsageError without a terminal, and where the two differ."""
    chosen = ask_passphrase("New passphrase of the key")
    if ask_passphrase("The same once more") != chosen:
        raise UsageError("the two passphrases differ", advice="Nothing was written; run the command again.")
    return chosen


def _checked(passphrase: bytes) -> bytes:
    if not passphrase:
        raise UsageError("the passphrase is empty", advice="Choose one, or leave the key without.")
    if len(passphrase) > MAX_PASSPHRASE_BYTES:
        raise UsageError(f"the passphrase has more than {MAX_PASSPHRASE_BYTES} bytes", advice="Choose a shorter one.")
    return passphrase


def _has_terminal() -> bool:
    """Return whether this process has a terminal of its own, wherever its input comes from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
