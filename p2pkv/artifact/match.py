"""How far an artifact matches a text, as the store finds it and the exchange sends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2pkv.formats.cid import Cid


@dataclass(frozen=True, slots=True)
class Match:
    """One manifest: the last matching segment and, of its ``segments`` segments, which the provider holds."""

    manifest: Cid
    matched: int
    segments: int
    held: bytes  # bitmap, segment i at bit i % 8 of byte i // 8

    def holds(self, index: int) -> bool:
        return bool(self.held[index // 8] >> (index % 8) & 1)


def bitmap(held: Iterable[int], segments: int) -> bytes:
    """Return the bitmap of ``held`` over ``segments`` segments."""
    bits = sum(1 << index for index in set(held))
    return bits.to_bytes(-(-segments // 8), "little")
