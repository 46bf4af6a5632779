"""Canonical CBOR of any value, CIDs as links, by an independent encoder: also of what the strict profile leaves out."""

from __future__ import annotations

from typing import Any

import cbor2

from p2pkv.formats.cid import Cid


def encoded(value: Any) -> bytes:
    return cbor2.dumps(_with_links(value), canonical=True)


def _with_links(value: Any) -> Any:
    match value:
        case Cid():
            return cbor2.CBORTag(42, b"\0" + value.binary)
        case dict():
            return {key: _with_links(item) for key, item in value.items()}
        case list():
            return [_with_links(item) for item in value]
        case _:
            return value
