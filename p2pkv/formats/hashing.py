"""Domain-separated BLAKE3-256 over length-prefixed parts: the only hash by which p2pkv makes keys (``docs/spec/keys.md``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from blake3 import blake3

DIGEST_BYTES: Final = 32


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the plain BLAKE3-256 of ``data``, as a CID holds it."""
    return blake3(data).digest()


def domain_hash(domain: str, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return BLAKE3-256 over ``domain`` and ``parts``, each behind its length as u64 little endian.

    The prefix makes the split into parts part of the hash: ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    return _framed(blake3(), domain, parts)


def keyed_hash(key: bytes, domain: str, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return BLAKE3-256, keyed with ``key`` (32 bytes), over the same framing as :func:`domain_hash`.

    Without the key nobody can tell what was hashed, not even by guessing it: what a private artifact uses wherever a public
    one has a plain hash (``docs/spec/private.md``).
    """
    return _framed(blake3(key=key), domain, parts)


def _framed(hasher: blake3, domain: str, parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    for part in (domain.encode("ascii"), *parts):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
