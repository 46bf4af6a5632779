"""Of several manifests of one publisher for the same text, which to take: the one that it signed last. Sans-IO.

An older artifact is not a wrong one, and whoever offers it may not know better, or may replay it on purpose. So a manifest
that may be used is not taken while another is on offer that may be of the same text, for at most GRACE_S.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2pkv.errors import SupersededError
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.routing.candidates import GRACE_S, Candidates
from p2pkv.trust.policy import superseded


class Contest:
    """Enter each manifest that may be used with :meth:`enter`, and open what it names next, until that is the same one.

    :meth:`refuse` says that one cannot be used, also after it had won: then the others are candidates again.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._usable: dict[Cid, Manifest] = {}  # in the order in which they came: it is about the text of the first
        self._until = 0.0
        self._winner: Cid | None = None

    @property
    def under_way(self) -> bool:
        """Whether something may be used and nothing is taken yet."""
        return bool(self._usable) and self._winner is None

    def enter(self, cid: Cid, manifest: Manifest, now: float) -> Cid:
        """Return which manifest to open next: ``cid`` again where it is to be taken."""
        if not self._usable:
            self._until = now + GRACE_S
        self._usable[cid] = manifest
        return self._winner if self._winner is not None else self.next(now)

    def next(self, now: float) -> Cid:
        """While it is under way: return which manifest to open next."""
        first = next(iter(self._usable.values()))
        rival = self._candidates.take_rival(len(first.segments)) if now < self._until else None
        if rival is not None:
            return rival
        same = {cid: manifest for cid, manifest in self._usable.items() if _same_text(manifest, first)}
        self._winner = max(same, key=lambda cid: same[cid].sequence)
        return self._winner

    def leave(self, cid: Cid) -> None:
        """A rival does not come in time; it is a candidate again."""
        self._candidates.put_back(cid)

    def refuse(self, cid: Cid) -> None:
        """A manifest cannot be used. Where it had won, another may."""
        self._usable.pop(cid, None)
        if cid == self._winner:
            for other in self._usable:
                self._candidates.put_back(other)
            self._usable.clear()
            self._winner = None

    def get_timer(self) -> float | None:
        """Return until when a rival is waited for; ``None`` while nothing is."""
        return self._until if self.under_way else None

    def superseded(self) -> Iterator[tuple[Cid, SupersededError]]:
        """Yield the manifests that were not taken because their publisher signed the one that was taken later."""
        if self._winner is not None:
            taken = self._usable[self._winner]
            for cid, manifest in self._usable.items():
                if _same_text(manifest, taken) and (error := superseded(manifest, taken.sequence)) is not None:
                    yield cid, error


def _same_text(one: Manifest, other: Manifest) -> bool:
    """Whether both say that they are of the same publisher, model and text."""
    return (one.publisher, one.model_id, one.dtype, one.last_chain_key) == (
        other.publisher,
        other.model_id,
        other.dtype,
        other.last_chain_key,
    )
