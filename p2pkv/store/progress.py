"""How far work on a large file is: what whoever started it hears, from the thread that does it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias


class Step(StrEnum):
    """What is being done now, in the words that people see."""

    WAITING = "waiting for other files"
    READING = "reading"
    VERIFYING = "verifying"
    COMPARING = "comparing with what is there"
    WRITING = "writing"
    SYNCING = "syncing to the disk"


Progress: TypeAlias = Callable[[Step, int, int], None]
"""Hears ``(step, done, total)`` in bytes. May raise to end the work, which then is as after a kill."""


def ignore(step: Step, done: int, total: int) -> None:
    """Hear how far it is and do nothing."""
