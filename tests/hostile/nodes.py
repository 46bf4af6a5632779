"""Nodes that liars write: any change to a decoded node, encoded again, also with what the profile leaves out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from tests.support.cbor import encoded

Change: TypeAlias = Callable[[Any], Any]

ABSURD: Final = (0, -1, -(2**63), 2**31, 2**32 - 1, 2**32, 2**63 - 1)
BEYOND: Final = (2**63, 2**64 - 1, -(2**63) - 1, -(2**64))
"""Integers of CBOR that the profile does not have."""


def changed(node: Any, change: Change) -> bytes:
    """Return the bytes of a copy of ``node`` that ``change`` was applied to."""
    node = copy.deepcopy(node)
    change(node)
    return encoded(node)


def put(*path: str | int, value: Any) -> Change:
    """Return the change that sets what lies at ``path``."""

    def change(node: Any) -> None:
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value

    return change


def without(name: str) -> Change:
    """Return the change that takes a field away."""

    def change(node: Any) -> None:
        del node[name]

    return change


def flipped(data: bytes, position: int) -> bytes:
    """Return ``data`` with one bit changed, counted from its start."""
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)
