"""What a prefill through p2pkv gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2pkv.client.quorum import Agreement
from p2pkv.client.verification import Verification
from p2pkv.units import format_bytes, format_seconds, plural


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """How a prefill went. Times are seconds since the call.

    ``manifest`` is the CID of the artifact that was used, if any; ``miss`` says why there was no hit. ``refusals`` are the
    manifests that were found and not used, each with ``manifest``, ``code``, ``message`` and ``advice``. ``tokens_per_s`` is
    how fast this machine computed, where enough was computed to tell. ``verification`` is what a check beyond the signature
    found, where one was asked for and something was there to check.
    """

    prompt_tokens: int
    hit_tokens: int
    manifest: str | None = None
    miss: str | None = None
    bytes_by_peer: Mapping[str, int] = field(default_factory=dict)
    rate_by_peer: Mapping[str, float] = field(default_factory=dict)
    local_bytes: int = 0
    blocks_refused: int = 0
    peers_lost: int = 0
    peers_dropped: Sequence[str] = ()
    refusals: Sequence[Mapping[str, Any]] = ()
    tokens_per_s: float | None = None
    verification: Verification | Agreement | None = None
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came from peers."""
        return sum(self.bytes_by_peer.values())

    def __str__(self) -> str:
        if not self.hit_tokens:
            return f"no hit for {self.prompt_tokens:,} tokens: {self.miss or 'nothing published was found'}"
        text = f"hit {self.hit_tokens:,} of {self.prompt_tokens:,} tokens"
        if self.bytes_by_peer:
            text += f" from {plural(len(self.bytes_by_peer), 'peer')}, {format_bytes(self.bytes_fetched)}"
        else:
            text += " from the local store"
        return f"{text} in {format_seconds(self.times.get('loaded_s', 0.0))}"


@dataclass(frozen=True, slots=True)
class Prefill:
    """A cache that holds all of the prompt before its last canonical step, and how it came about.

    Hand ``cache`` to the model together with the full prompt: ``model.generate(ids, **prefill.generate_arguments)``. The
    model computes the last step, from token ``cached_tokens`` on, and with it the first new token's logits.
    """

    cache: Any
    cached_tokens: int
    report: PrefillReport
    generate_arguments: Mapping[str, Any]
