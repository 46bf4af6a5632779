"""What the prefills of this node's programs were spared, in seconds, as far as anybody can know it.

A node computes no KV, so it does not know what computing would have taken. The programs do: one that computed whole steps of a
text measured how fast it was, and says so when it tells how its prefill went (``POST /v1/prefills``). At that rate, of the
same model on the same kind of device, the tokens that are loaded are worth seconds. What loading took is taken off, and so is
the time that went into looking in vain: a fetch that was slower than computing makes the sum smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pkv.limits import MAX_PREFILL_RATES


@dataclass(frozen=True, slots=True)
class ToldPrefill:
    """One prefill, as the program that wanted it saw it.

    ``model_id`` is 32 bytes, ``device`` the kind of device (``cpu``, ``cuda``). ``hit_tokens`` were loaded ``loading_s``
    seconds after the call; 0 for a miss. ``tokens_per_s`` is how fast others were computed, where that was measured.
    """

    model_id: bytes
    device: str
    hit_tokens: int
    loading_s: float
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    """Sums since the start, in seconds, over the ``rated`` prefills alone.

    ``computing_s`` is what computing the loaded tokens would have taken, ``loading_s`` what loading them took, and looking for
    them where there were none. The ``unrated`` ones came when no rate was known for their model and device: nobody knows what
    they saved.
    """

    rated: int
    unrated: int
    computing_s: float
    loading_s: float

    @property
    def saved_s(self) -> float:
        """Below zero where p2pkv took longer than computing would have."""
        return self.computing_s - self.loading_s


@dataclass(slots=True)
class Savings:
    """Keeps count, and remembers the rates."""

    _rates: dict[tuple[bytes, str], float] = field(default_factory=dict)
    _rated: int = 0
    _unrated: int = 0
    _computing_s: float = 0.0
    _loading_s: float = 0.0

    def add(self, told: ToldPrefill) -> float | None:
        """Count one prefill; return the seconds that it saved, ``None`` where no rate is known."""
        key = (told.model_id, told.device)
        remembered = self._rates.pop(key, None)
        rate = told.tokens_per_s if told.tokens_per_s is not None else remembered
        if rate is None:
            self._unrated += 1
            return None
        self._rates[key] = rate  # as the latest
        while len(self._rates) > MAX_PREFILL_RATES:
            del self._rates[next(iter(self._rates))]
        computing_s = told.hit_tokens / rate
        self._rated += 1
        self._computing_s += computing_s
        self._loading_s += told.loading_s
        return computing_s - told.loading_s

    def statistics(self) -> PrefillStatistics:
        """Return a frozen view."""
        return PrefillStatistics(self._rated, self._unrated, self._computing_s, self._loading_s)
