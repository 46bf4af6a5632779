"""Codecs of block payloads by name. A block is decodable on its own, and its decoded size is known before it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2pkv.errors import FormatError, IntegrityError


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """``encode`` and ``decode`` of one codec; ``decode`` gets the coded bytes and the decoded size it must produce."""

    name: str
    encode: Callable[[memoryview], bytes | memoryview]
    decode: Callable[[memoryview, int], memoryview]


def _decode_raw(data: memoryview, raw_size: int) -> memoryview:
    if len(data) != raw_size:
        raise IntegrityError(f"a raw block of {len(data)} bytes declares {raw_size} decoded")
    return data


RAW: Final = BlockCodec("raw", lambda data: data, _decode_raw)

_CODECS: Final = {codec.name: codec for codec in (RAW,)}


def codec_named(name: str) -> BlockCodec:
    """Return the codec called ``name``. Raises FormatError for one that this version does not know."""
    try:
        return _CODECS[name]
    except KeyError:
        advice = f"Known codecs: {', '.join(sorted(_CODECS))}. Upgrade p2pkv, or ask the publisher for one of these."
        raise FormatError(f"codec {name[:64]!r} is unknown here", advice=advice) from None
