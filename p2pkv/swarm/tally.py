"""What the fetches of a node have received, all together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Since the start: bytes of verified blocks and nodes by the way they came, and blocks whose hash was wrong."""

    lane_bytes: int = 0
    stream_bytes: int = 0
    blocks_refused: int = 0
