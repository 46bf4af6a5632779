"""A copy of the pins beside the index, as JSON: what a person said is worth keeping survives the loss of the index.

The index decides, within the transaction that collects. The copy is brought up to date after each change and at each start,
and read by nobody but whoever makes a lost index anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from p2pkv.errors import CidError, StoreError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_PINS_FILE_BYTES
from p2pkv.store.files import os_errors, replace_file
from p2pkv.store.holds import Pin
from p2pkv.store.versioned_json import read_list

VERSION: Final = 1
_TOO_LARGE: Final = f"is larger than {MAX_PINS_FILE_BYTES} bytes"


class PinsFile:
    """The pins in ``path``; a missing file has none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Pin]:
        """Return the pins. Raises StoreError for a damaged file, UnknownVersionError for that of a newer p2pkv."""
        data = self._bytes()
        return [] if data is None else self._parse(data)

    def write(self, pins: Iterable[Pin]) -> None:
        """Replace the pins, durably; a file that says the same is left alone. Raises DiskFullError, StoreError."""
        rows = [{"name": pin.name, "manifest": str(pin.manifest_cid), "created": pin.created} for pin in pins]
        data = json.dumps({"version": VERSION, "pins": rows}, indent=1, ensure_ascii=False).encode() + b"\n"
        if len(data) > MAX_PINS_FILE_BYTES:
            raise StoreError(f"{self._path} would be too large: no copy of the pins is kept", advice="Take some away.")
        before = self._bytes()
        if before != data and (rows or before is not None):
            with os_errors(f"write {self._path}"):
                replace_file(self._path, data)

    def _bytes(self) -> bytes | None:
        with os_errors(f"read {self._path}"):
            try:
                with self._path.open("rb") as file:
                    return file.read(MAX_PINS_FILE_BYTES + 1)
            except FileNotFoundError:
                return None

    def _parse(self, data: bytes) -> list[Pin]:
        if len(data) > MAX_PINS_FILE_BYTES:
            raise self._damaged(_TOO_LARGE)
        return [self._pin(row) for row in read_list(self._path, data, "pins", VERSION, self._damaged)]

    def _pin(self, row: object) -> Pin:
        match row:
            case {"name": str(name), "manifest": str(manifest), "created": int(created), **rest} if not rest:
                try:
                    return Pin(name, Cid.parse(manifest), created)
                except CidError as error:
                    raise self._damaged(f"pins what is none ({error.message})") from None
        raise self._damaged("has an entry without exactly name, manifest and created")

    def _damaged(self, complaint: str) -> StoreError:
        return StoreError(
            f"the index is lost, and {self._path}, the copy of its pins, {complaint}",
            advice="Mend the file, or move it away: then nothing is pinned any more, and the node starts.",
        )
