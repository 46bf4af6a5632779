"""Sequence numbers of a publisher: each is higher than all before it, and none is given twice, whatever a crash undoes.

The last number lies beside the key file, in ``FILE.sequence``. The next one is written and synced before anybody hears of it:
a crash loses a number, never gives one again. Numbers follow the clock, in milliseconds since the epoch, where the clock is
ahead of the last one: so they go on upward where the file was lost, and on another machine with the same key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from p2pkv.errors import KeyFileError
from p2pkv.formats.dagcbor import MAX_INT
from p2pkv.limits import MAX_KEY_FILE_BYTES
from p2pkv.store.files import locked, os_errors, replace_file
from p2pkv.store.secrets import read_lines, read_secret_up_to

_HEAD: Final = "p2pkv sequence"


def sequence_at(now: float) -> int:
    """Return the number of a moment in seconds since the epoch, for a publisher who keeps no file."""
    return int(now * 1000)


def sequence_file(key_file: Path) -> Path:
    """Where the last number of the key in ``key_file`` lies."""
    return key_file.with_name(f"{key_file.name}.sequence")


def next_sequence(key_file: Path, did: str, now: float, *, above: int = 0) -> int:
    """Return the next number of the publisher ``did``, whose key is in ``key_file``; ``now`` is in seconds since the epoch.

    It is higher than ``above`` too, a number that the publisher is known to have used, on another machine for example.

    Raises KeyFileError where the file of numbers is damaged, of another publisher, or at its end; DiskFullError, StoreError.
    """
    path = sequence_file(key_file)
    with locked(key_file.parent, os.O_RDONLY):  # not the file of the key or of the numbers: both are replaced
        last = _read(path, did)
        number = max(last + 1, above + 1, sequence_at(now))
        if number > MAX_INT:
            raise KeyFileError(f"the numbers in {path} are at their end", advice="Go on with a new key.")
        with os_errors(f"write {path}"):
            replace_file(path, f"{_HEAD} v1\n{did}\n{number}\n".encode("ascii"))
    return number


def _read(path: Path, did: str) -> int:
    """Return the last number, 0 where there is none yet. Raises KeyFileError, UnknownVersionError, StoreError."""
    if not path.exists():
        return 0
    match read_lines(path, _HEAD, read_secret_up_to(path, MAX_KEY_FILE_BYTES)):
        case [publisher, number] if re.fullmatch(r"0|[1-9][0-9]{0,18}", number):
            if publisher != did:
                raise KeyFileError(
                    f"the sequence numbers in {path} are those of {publisher[:64]!r}, not of {did}",
                    advice="Move that file to the key it belongs to; without one, numbers follow the clock.",
                )
            return int(number)
    raise KeyFileError(
        f"{path} does not hold the last sequence number",
        advice="Bring back a copy of it, or remove it where the clock of this machine was right whenever it signed.",
    )
