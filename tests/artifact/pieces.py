"""Parts of the tiny artifact of the golden vectors, with changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2pkv import keys
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Tokens
from p2pkv.formats.segment import BlockRef
from tests.support import samples

NODE = samples.manifest().segments[0]


def tokens_of(ids: list[int], **changes: Any) -> Tokens:
    encoded = keys.encode_tokens(ids)
    return replace(Tokens(len(ids), digest(encoded), encoded, None), **changes)


def block_ref(number: int = 0, **changes: Any) -> BlockRef:
    return replace(samples.segment().layers[number][0], **changes)
