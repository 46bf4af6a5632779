"""A list in a JSON file that people may read: one object with the version of its form, the list, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from p2pkv.errors import StoreError, UnknownVersionError


def read_list(path: Path, data: bytes, name: str, version: int, damaged: Callable[[str], StoreError]) -> list[object]:
    """Return the list ``name`` in ``data``, what ``path`` holds.

    Raises what ``damaged`` makes of a complaint, UnknownVersionError for the file of a newer p2pkv.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise damaged("is not JSON") from None
    match document:
        case {"version": int(found)} if found != version:
            raise UnknownVersionError(f"{path} has version {found}; version {version} is known", advice="Upgrade p2pkv.")
        case {"version": int(), **rest} if rest.keys() == {name}:
            rows = rest[name]
            if isinstance(rows, list):
                return rows
    raise damaged(f"is not a list of {name}")
