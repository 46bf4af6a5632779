"""Changes to valid bytes that a liar or a broken disk would make: structure mostly stays, one thing in it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import cbor2

from p2pkv.errors import FormatError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from tests.support.cbor import encoded

Draw: TypeAlias = Callable[[int], int]
"""Returns a number from 0 to below its argument, which is at least 1: the only source of chance here."""

Mutation: TypeAlias = Callable[[bytes, Sequence[bytes], Draw], bytes]

# What a field of a length or a number is most likely to be wrong with: ends of every integer type, and beside them.
_EDGES: Final = (
    0,
    1,
    23,
    24,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0xFFFF,
    0x10000,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_WIDTHS: Final = (1, 2, 4, 8)
# First bytes of every kind of CBOR item, in short and long, definite and indefinite form, and the braces of JSON.
_HEADS: Final = bytes(
    [major << 5 | info for major in range(8) for info in (0, 1, 20, 22, 23, 24, 25, 26, 27, 28, 31)] + list(b'{}[]",:0e-')
)


def chance(seed: int) -> Draw:
    """Return a source that is fast and no better than it has to be: a linear congruential generator (Knuth's MMIX)."""
    state = seed

    def draw(bound: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (state >> 33) % bound

    draw(1)
    return draw


def _range(data: bytes, draw: Draw) -> tuple[int, int]:
    """Return a piece ``[start, end)`` of ``data``, short ones more often."""
    start = draw(len(data) + 1)
    longest = len(data) - start
    return start, start + draw(min(longest, draw(longest + 1) + 1) + 1)


def _flip(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    changed = bytearray(data or b"\0")
    changed[draw(len(changed))] ^= 1 << draw(8)
    return bytes(changed)


def _replace(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    changed = bytearray(data or b"\0")
    changed[draw(len(changed))] = draw(256)
    return bytes(changed)


def _head(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    changed = bytearray(data or b"\0")
    changed[draw(len(changed))] = _HEADS[draw(len(_HEADS))]
    return bytes(changed)


def _insert(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    at = draw(len(data) + 1)
    return data[:at] + bytes(draw(256) for _ in range(1 + draw(8))) + data[at:]


def _cut(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    start, end = _range(data, draw)
    return data[:start] + data[end:]


def _end_early(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    return data[: draw(len(data) + 1)]


def _duplicate(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    start, end = _range(data, draw)
    return data[:end] + data[start:end] * (1 + draw(3)) + data[end:]


def _splice(data: bytes, others: Sequence[bytes], draw: Draw) -> bytes:
    other = others[draw(len(others))]
    start, end = _range(other, draw)
    at, until = _range(data, draw)
    return data[:at] + other[start:end] + data[until:]


def _garbage_behind(data: bytes, others: Sequence[bytes], draw: Draw) -> bytes:
    return data + others[draw(len(others))][: 1 + draw(64)]


def _number(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    """Overwrite what may be a length or a number, in either order of bytes."""
    width = _WIDTHS[draw(len(_WIDTHS))]
    value = (_EDGES[draw(len(_EDGES))] + draw(3) - 1) % (1 << 8 * width)
    at = draw(max(len(data) - width, 0) + 1)
    return data[:at] + value.to_bytes(width, "little" if draw(2) else "big") + data[at + width :]


# What a field may be instead: every kind of value, its bounds, and what is outside of the profile.
_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 257, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), -(2**63) - 1, 10**40,
    "", "raw", "é" * 40, "\x1b[2J", [], [0], {}, {"": 0}, 0.5, -0.0, 1e300, float("nan"), float("inf"),
)  # fmt: skip
_NODE_VALUES: Final[tuple[Any, ...]] = (
    *_VALUES, b"", bytes(31), bytes(32), bytes(33), cbor2.undefined, cbor2.CBORTag(42, b""), cbor2.CBORTag(43, bytes(37)),
    Cid.of_node(b""), Cid.of_block(b""),
)  # fmt: skip


def _in_tree(data: bytes, _: Sequence[bytes], draw: Draw) -> bytes:
    """Change one value of a node or of JSON and write it again, so that what reads fields sees it; else ``data`` stays."""
    match _tree(data):
        case None:
            return data
        case (int(start), value):
            return data[:start] + json.dumps(_change(_copy(value), _VALUES, draw)).encode()
        case (None, value):
            node: bytes = encoded(_change(_copy(value), _NODE_VALUES, draw))
            return node


@lru_cache(maxsize=4096)
def _tree(data: bytes) -> tuple[int | None, Any] | None:
    """Return what a node, or JSON from some place on, says; that is asked about the same few inputs again and again."""
    try:
        return None, dagcbor.decode(data)
    except FormatError:
        pass
    start = data.find(b"{")  # behind a prefix, as events have it
    try:
        return start, json.loads(data[start:])
    except (ValueError, RecursionError):
        return None


def _change(value: Any, values: Sequence[Any], draw: Draw) -> Any:
    """Return ``value`` with one thing in it removed, doubled, put elsewhere, or replaced by one of ``values``."""
    root: list[Any] = [value]
    places: list[tuple[Any, Any]] = [(root, 0)]
    for container, key in places:  # grows while it is walked
        inner = container[key]
        if isinstance(inner, dict | list):
            places += [(inner, place) for place in (inner if isinstance(inner, dict) else range(len(inner)))]
    container, key = places[draw(len(places))]
    match draw(4):
        case 0 if container is not root:
            del container[key]
        case 1 if isinstance(container, list) and container is not root:
            container.insert(key, _copy(container[key]))
        case 2:
            other, its_key = places[draw(len(places))]
            container[key] = _copy(other[its_key])
        case _:
            container[key] = _copy(values[draw(len(values))])
    return root[0]


def _copy(value: Any) -> Any:
    """Return ``value`` with containers of its own, so that none ends up inside itself."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


MUTATIONS: Final[tuple[Mutation, ...]] = (
    _flip, _replace, _head, _insert, _cut, _end_early, _duplicate, _splice, _garbage_behind, _number,
    _in_tree, _in_tree, _in_tree,
)  # fmt: skip
_MOST: Final = 4


def mutate(seeds: Sequence[bytes], draw: Draw) -> bytes:
    """Return one of ``seeds`` with one to four mutations."""
    data = seeds[draw(len(seeds))]
    for _ in range(1 + draw(_MOST)):
        data = MUTATIONS[draw(len(MUTATIONS))](data, seeds, draw)
    return data
