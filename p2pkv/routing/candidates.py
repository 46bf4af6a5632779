"""Which manifest to take, of those that providers offer: the longest match, waiting a little for a better one. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from p2pkv.artifact.match import Match
from p2pkv.formats.cid import Cid

# How long a longer match may still come after the first one. Look-ups run in parallel, so their answers lie close together.
GRACE_S: Final = 0.1


@dataclass(slots=True)
class Candidate:
    """One manifest on offer: how many of its ``segments`` match, as peers say, and which peers offer it."""

    manifest: Cid
    matched: int
    segments: int
    peers: list[str] = field(default_factory=list)


class Candidates:
    """Collects matches; :meth:`choose` names the manifest to open next. ``best_possible`` is the longest match in segments."""

    def __init__(self, best_possible: int) -> None:
        self._best_possible = best_possible
        self._open: dict[Cid, Candidate] = {}
        self._tried: dict[Cid, Candidate] = {}
        self._first_at: float | None = None

    def add(self, peer: str, match: Match, now: float) -> None:
        if match.manifest in self._tried:
            return
        candidate = self._open.setdefault(match.manifest, Candidate(match.manifest, match.matched, match.segments))
        # Peers may disagree out of malice; the manifest itself decides, so believing the longest costs one refusal.
        candidate.matched = max(candidate.matched, match.matched)
        if peer not in candidate.peers:
            candidate.peers.append(peer)
        if self._first_at is None:
            self._first_at = now

    def choose(self, now: float, *, searching: bool) -> Candidate | None:
        """Return the best candidate once nothing better is worth waiting for, each only once; ``None`` for not now."""
        best = max(self._open.values(), key=lambda c: (c.matched, len(c.peers)), default=None)
        if best is None or self._first_at is None:
            return None
        if searching and best.matched < self._best_possible and now < self._first_at + GRACE_S:
            return None
        self._tried[best.manifest] = self._open.pop(best.manifest)
        return best

    def take_rival(self, segments: int) -> Cid | None:
        """Return the longest match of so many segments that is open, as chosen, for whoever looks for another of one text."""
        rivals = (candidate for candidate in self._open.values() if candidate.segments == segments)
        rival = max(rivals, key=lambda candidate: candidate.matched, default=None)
        if rival is None:
            return None
        self._tried[rival.manifest] = self._open.pop(rival.manifest)
        return rival.manifest

    def put_back(self, manifest: Cid) -> None:
        """Offer one that was chosen once more."""
        self._open[manifest] = self._tried.pop(manifest)

    def get_timer(self) -> float | None:
        """Return when :meth:`choose` will stop waiting; ``None`` while there is nothing to choose."""
        return self._first_at + GRACE_S if self._first_at is not None and self._open else None

    def __bool__(self) -> bool:
        return bool(self._open)
