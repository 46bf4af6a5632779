"""The curve of Ed25519 (RFC 8032, section 5.1) in a few lines of slow arithmetic, for what no library makes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, TypeAlias

from nacl.signing import SigningKey

Point: TypeAlias = tuple[int, int]

PRIME: Final = 2**255 - 19
ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, PRIME) % PRIME
_ROOT_OF_MINUS_ONE: Final = pow(2, (PRIME - 1) // 4, PRIME)
IDENTITY: Final[Point] = (0, 1)


def add(one: Point, other: Point) -> Point:
    (x1, y1), (x2, y2) = one, other
    product = _D * x1 * x2 * y1 * y2 % PRIME
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, PRIME) % PRIME
    return x, (y1 * y2 + x1 * x2) * pow(1 - product, -1, PRIME) % PRIME


def multiply(factor: int, point: Point) -> Point:
    result = IDENTITY
    while factor:
        if factor & 1:
            result = add(result, point)
        point = add(point, point)
        factor >>= 1
    return result


def point_with(y: int) -> Point | None:
    """Return the point with this ``y`` and an even ``x``, ``None`` where there is none."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, PRIME) % PRIME
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if (x * x - square) % PRIME:
        x = x * _ROOT_OF_MINUS_ONE % PRIME
    if (x * x - square) % PRIME:
        return None
    return (x if x % 2 == 0 else PRIME - x), y


def encodings(point: Point) -> Iterator[bytes]:
    """Yield the encoding of ``point`` and then those that only lenient readers take: y not reduced, the sign of x = 0."""
    x, y = point
    for number in (y, y + PRIME):
        for sign in (x & 1, 1 - (x & 1)) if x == 0 else (x & 1,):
            if number < 2**255:
                yield (number | sign << 255).to_bytes(32, "little")


def _point_of_order_eight() -> Point:
    y = 2
    while True:
        point = point_with(y)
        if point is not None:
            small = multiply(ORDER, point)
            if multiply(4, small) != IDENTITY:
                return small
        y += 1


_base = point_with(4 * pow(5, -1, PRIME) % PRIME)
assert _base is not None
BASE: Final[Point] = _base
SMALL_ORDER: Final = tuple(multiply(factor, _point_of_order_eight()) for factor in range(8))
"""All eight points whose order divides eight, the identity first."""


def secret_scalar(key: SigningKey) -> int:
    """Return the number by which the public point of ``key`` is a multiple of the base."""
    low = bytearray(hashlib.sha512(bytes(key)).digest()[:32])
    low[0] &= 248
    low[31] = low[31] & 127 | 64
    return int.from_bytes(low, "little")


def sign(secret: int, public: bytes, message: bytes, nonce: int, r: bytes) -> bytes:
    """Return the signature by ``secret`` under the encoded key ``public``, with ``r`` for R, ``nonce`` times the base."""
    challenge = int.from_bytes(hashlib.sha512(r + public + message).digest(), "little")
    return r + ((nonce + challenge * secret) % ORDER).to_bytes(32, "little")
