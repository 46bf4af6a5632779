"""Artifacts of some MiB for tests that let real nodes publish and fetch, and a reader of what their events tell of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.artifacts import Published, Shape, build, publish, random_segments
from p2pkv.client.calls import read_locations
from p2pkv.formats.cid import Cid
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, SEGMENT_TOKENS
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import read_located

SHAPE: Final = Shape("text", 4, LayerGeometry(LayerKind.FULL, kv_heads=2, k_dim=64, v_dim=64))  # 512 KiB a segment
_TOKENS_APART: Final = 10_000


@dataclass(frozen=True)
class Text:
    """An artifact that can be published again and again, as the same bytes."""

    published: Published
    segments: Sequence[Sequence[bytes]]
    first_token: int

    @property
    def cid(self) -> Cid:
        return self.published.manifest

    @property
    def token_ids(self) -> Sequence[int]:
        return range(self.first_token, self.first_token + len(self.segments) * SEGMENT_TOKENS)

    def publish(self, http: httpx.Client, home: Path) -> None:
        """Stage it and let the node of ``home`` take it over, as any publisher does."""
        publish(http, home, SHAPE, self.segments, first_token=self.first_token)


def make_text(number: int, segments: int) -> Text:
    """Return the artifact of this number; a longer one of the same number begins as a shorter one does."""
    first_token = _TOKENS_APART * number
    blocks = random_segments(SHAPE, segments, number)
    return Text(build(SHAPE, blocks, lambda cid, data: None, first_token=first_token), blocks, first_token)


class BlockReader:
    """Reads the blocks that a node's events tell of, as its clients do. For one thread."""

    def __init__(self, home: Path) -> None:
        self._folder = HomeLayout(home).blocks
        self._buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
        self.found: set[Cid] = set()
        self.damaged: list[Cid] = []

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] in ("matched", "segment"):
            for name, location in read_locations(event).items():
                cid = Cid.parse(name)
                if cid.matches(read_located(self._folder, location, self._buffer)):
                    self.found.add(cid)
                else:
                    self.damaged.append(cid)
