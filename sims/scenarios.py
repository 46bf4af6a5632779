"""The scenarios, as tables: who is there, on what link, and what happens when. Times are seconds from its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sims.network import Link

_MBIT_S: Final = 1_000_000 / 8
UPLINK: Final = 100 * _MBIT_S
_LINK: Final = Link(up=UPLINK, down=10 * UPLINK, latency_s=0.005)
_SLOW: Final = Link(up=UPLINK / 10, down=UPLINK, latency_s=0.005)


@dataclass(frozen=True, slots=True)
class Seeder:
    """A provider that holds everything. It joins, freezes for good, or dies at the times given; a liar sends wrong blocks."""

    link: Link = _LINK
    joins_at: float = 0.0
    stalls_at: float | None = None
    leaves_at: float | None = None
    lies: bool = False

    def seconds_until(self, time: float) -> float:
        """Return how long it has been of use by ``time``."""
        ends = [end for end in (self.stalls_at, self.leaves_at) if end is not None]
        return 0.0 if self.lies else max(0.0, min([time, *ends]) - self.joins_at)


@dataclass(frozen=True, slots=True)
class Scenario:
    """``consumers`` fetch the same ``blocks`` blocks from ``seeders``, the first of which is the publisher."""

    name: str
    about: str
    seeders: tuple[Seeder, ...]
    consumers: int = 1
    blocks: int = 256

    def ideal_s(self, data_bytes: int) -> float:
        """Return the time that uplinks alone allow: the seeders' for one consumer, all uplinks together for many."""
        if self.consumers > 1:
            ups = sum(seeder.link.up or 0.0 for seeder in self.seeders)
            together = ups + self.consumers * (_LINK.up or 0.0)
            return max(data_bytes / ups, self.consumers * data_bytes / together)
        low, high = 0.0, 1e6
        for _ in range(100):
            middle = (low + high) / 2
            sent = sum((seeder.link.up or 0.0) * seeder.seconds_until(middle) for seeder in self.seeders)
            low, high = (middle, high) if sent < data_bytes else (low, middle)
        return high


CONSUMER_LINK: Final = _LINK
BASE: Final = "one_seeder"

SCENARIOS: Final = (
    Scenario(BASE, "One seeder.", (Seeder(),)),
    Scenario("four_seeders", "Four equal seeders.", (Seeder(),) * 4),
    Scenario("one_slow", "Four seeders, one with a tenth of the uplink.", (*(Seeder(),) * 3, Seeder(_SLOW))),
    Scenario("one_stalls", "Four seeders, one falls silent half-way.", (*(Seeder(),) * 3, Seeder(stalls_at=0.7))),
    Scenario("one_lies", "Four seeders, one sends wrong blocks.", (*(Seeder(),) * 3, Seeder(lies=True))),
    Scenario("one_leaves", "Four seeders, one dies half-way.", (*(Seeder(),) * 3, Seeder(leaves_at=0.7))),
    Scenario("three_join", "One seeder, three more join later.", (Seeder(), *(Seeder(joins_at=1.5),) * 3)),
    Scenario("flash_crowd", "Fifty consumers start together behind one publisher.", (Seeder(),), consumers=50),
)
