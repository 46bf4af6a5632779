"""A slice of an artifact: its first segments, and of these a range of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2pkv.errors import UsageError
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_LAYERS, MAX_SEGMENTS, SEGMENT_TOKENS


@dataclass(frozen=True, slots=True)
class Slice:
    """The first ``segments`` segments, and of these the ``layers``, one after another; ``None`` stands for all.

    Raises UsageError for what is a slice of no artifact: no segment or layer, or more than there can be.
    """

    segments: int | None = None
    layers: range | None = None

    def __post_init__(self) -> None:
        if self.segments is not None and not 1 <= self.segments <= MAX_SEGMENTS:
            raise UsageError(f"`segments` is not a number from 1 to {MAX_SEGMENTS}")
        layers = self.layers
        if layers is not None and not (layers.step == 1 and 0 <= layers.start < layers.stop <= MAX_LAYERS):
            raise UsageError(f"`layers` is not a range [first, end) within [0, {MAX_LAYERS})")

    def check(self, manifest: Manifest) -> None:
        """Raise UsageError where the artifact has not as many segments or layers."""
        if self.segments is not None and self.segments > len(manifest.segments):
            raise UsageError(f"`segments` is {self.segments}, and the artifact has {len(manifest.segments)}")
        if self.layers is not None and self.layers.stop > len(manifest.layers):
            raise UsageError(f"`layers` ends at {self.layers.stop}, and the artifact has {len(manifest.layers)}")

    def token_count(self, manifest: Manifest) -> int:
        """Return how many tokens of the artifact the segments hold."""
        count = manifest.tokens.count
        return count if self.segments is None else min(self.segments * SEGMENT_TOKENS, count)


WHOLE: Final = Slice()
"""All segments with all layers."""
