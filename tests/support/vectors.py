"""Golden vectors as the tests read them: data of ``tests/vectors/*.json``."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import Value

FOLDER = Path(__file__).parent.parent / "vectors"


@dataclass(frozen=True)
class Vector:
    """One vector: its bytes, and whatever else the file says of it."""

    name: str
    data: bytes
    fields: dict[str, Any]


def document(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / file).read_text(encoding="utf-8"))
    return content


def load(file: str) -> dict[str, Vector]:
    """Return the vectors of ``file`` by name; the pieces of one, joined, are its bytes."""
    return {
        entry["name"]: Vector(entry["name"], bytes.fromhex("".join(piece["hex"] for piece in entry["pieces"])), entry)
        for entry in document(file)["vectors"]
    }


def refused(file: str) -> dict[str, dict[str, Any]]:
    """Return by name what every reader has to refuse."""
    return {entry["name"]: entry for entry in document(file)["refused"]}


def from_dag_json(value: Any) -> Value:
    """Return the value that DAG-JSON shows."""
    match value:
        case {"/": {"bytes": str(text)}}:
            return base64.b64decode(text + "=" * (-len(text) % 4))
        case {"/": str(text)}:
            return Cid.parse(text)
        case dict():
            return {key: from_dag_json(item) for key, item in value.items()}
        case list():
            return [from_dag_json(item) for item in value]
        case None | bool() | int() | str():
            return value
        case _:
            raise TypeError(f"{value!r} is not DAG-JSON")
