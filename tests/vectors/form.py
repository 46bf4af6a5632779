"""The form of the files of golden vectors: what an entry holds, and how it is written."""

from __future__ import annotations

import json
from typing import Any

from tests.vectors.encoding import Piece, hashed, joined


def vector(name: str, comment: str, pieces: list[Piece], **more: Any) -> dict[str, Any]:
    lines = [{"hex": data.hex(), "comment": note} for data, note in pieces]
    return {"name": name, "comment": comment, **more, "pieces": lines}


def hash_vector(name: str, comment: str, pieces: list[Piece], **more: Any) -> dict[str, Any]:
    return vector(name, comment, pieces, digest=hashed(joined(pieces)).hex(), **more)


def refused(name: str, hexadecimal: str) -> dict[str, str]:
    return {"name": name, "hex": hexadecimal}


def render(document: dict[str, Any]) -> str:
    """Return JSON in which every piece and every refused form has a line of its own."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    sections = []
    for section, content in document.items():
        if not isinstance(content, list):
            sections.append(f"  {text(section)}: {text(content)}")
        elif section != "vectors":
            rows = ",\n".join(f"    {text(row)}" for row in content)
            sections.append(f"  {text(section)}: [\n{rows}\n  ]")
        else:
            vectors = []
            for entry in content:
                lines = [f"      {text(key)}: {text(value)}" for key, value in entry.items() if key != "pieces"]
                pieces = ",\n".join(f"        {text(piece)}" for piece in entry["pieces"])
                lines.append(f'      "pieces": [\n{pieces}\n      ]')
                vectors.append("    {\n" + ",\n".join(lines) + "\n    }")
            sections.append(f"  {text(section)}: [\n" + ",\n".join(vectors) + "\n  ]")
    return "{\n" + ",\n".join(sections) + "\n}\n"
