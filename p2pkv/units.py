"""Sizes and durations, named once, and how they are shown to people."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

MINUTE: Final = 60
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR


def format_bytes(count: float) -> str:
    """Return ``count`` bytes as a person reads it: ``831 B``, ``12.3 KiB``, ``82.9 MiB``."""
    if count < KIB:
        return f"{count:.0f} B"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    raise AssertionError("unreachable: every count of a KiB or more has a unit")


def parse_bytes(text: str) -> int | None:
    """Return the bytes that ``831``, ``10 KiB``, ``1.5MiB`` or ``2gib`` stand for; ``None`` for anything else."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?(B|KiB|MiB|GiB)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        return None
    number, unit = match.groups(default="B")
    return int(float(number) * {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB}[unit.lower()])


def format_rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with the digits that matter: ``0.4 ms``, ``312 ms``, ``3.86 s``, ``2 min 05 s``."""
    if seconds < 0.001:
        return f"{seconds * 1000:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < MINUTE:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    return f"{minutes} min {rest:02d} s"


def plural(count: int, noun: str) -> str:
    """Return ``1 peer``, ``2 peers``, ``3,774 tokens``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
