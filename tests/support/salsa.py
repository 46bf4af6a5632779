"""HSalsa20 (https://cr.yp.to/snuffle/xsalsa-20110204.pdf) in a few slow lines: what NaCl makes the key of a box with."""

from __future__ import annotations

import struct
from typing import Final

_CONSTANT: Final = struct.unpack("<4I", b"expand 32-byte k")
# Columns, then rows, of the four by four words.
_QUARTERS: Final = (
    (0, 4, 8, 12), (5, 9, 13, 1), (10, 14, 2, 6), (15, 3, 7, 11),
    (0, 1, 2, 3), (5, 6, 7, 4), (10, 11, 8, 9), (15, 12, 13, 14),
)  # fmt: skip


def hsalsa20(key: bytes, block: bytes = bytes(16)) -> bytes:
    """Return 32 bytes of a ``key`` of 32 bytes and a ``block`` of 16."""
    k, n = struct.unpack("<8I", key), struct.unpack("<4I", block)
    words = [_CONSTANT[0], *k[:4], _CONSTANT[1], *n, _CONSTANT[2], *k[4:], _CONSTANT[3]]
    for _ in range(10):
        for quarter in _QUARTERS:
            for step, bits in enumerate((7, 9, 13, 18)):
                target, one, other = (quarter[(step + shift) % 4] for shift in (1, 0, 3))
                words[target] ^= _rotated(words[one] + words[other], bits)
    return struct.pack("<8I", *(words[place] for place in (0, 5, 10, 15, 6, 7, 8, 9)))


def _rotated(word: int, bits: int) -> int:
    word &= 0xFFFFFFFF
    return (word << bits | word >> 32 - bits) & 0xFFFFFFFF
