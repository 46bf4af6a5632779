"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a check went. ``PROBLEM``: something does not work; ``WARNING``: it works, and not as well as it could."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Finding:
    """``name`` says what was looked at, ``found`` what there is, ``advice`` what to do; it is empty where all is well."""

    name: str
    state: State
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "state": self.state.value, "found": self.found, "advice": self.advice}
