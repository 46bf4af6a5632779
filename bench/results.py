"""What every bench makes of its rows: medians by case, and a file of JSON with the machine beside the figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any


def medians(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median of every float by the rows' ``case``."""
    by_case: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    return {
        case: {name: median(row[name] for row in measured) for name, value in measured[0].items() if isinstance(value, float)}
        for case, measured in by_case.items()
    }


def machine() -> dict[str, Any]:
    """Return what figures depend on; call it before the first measurement: ``load`` is that of others, the last minute's."""
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON, with the folders that are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
