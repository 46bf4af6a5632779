"""What a fetch keeps from being collected, in virtual time: while it lasts, and a while for those who read what it brought."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from p2pkv.errors import DiskFullError
from p2pkv.formats.cid import Cid
from p2pkv.limits import READ_LEASE_S
from p2pkv.swarm.report import FetchEvent, Matched
from sims.network import Link
from sims.node import MemoryCatalog
from tests.support.artifacts import PUBLISHER, Sample
from tests.support.sim_town import Town, prompt


class WatchedCatalog(MemoryCatalog):
    """Notes leases: when they are taken, for how long, and what becomes of them. A full disk has none to give."""

    def __init__(self, *, full: bool = False) -> None:
        super().__init__()
        self.full = full
        self.taken: list[tuple[Cid, float]] = []
        self.renewed: list[tuple[int, float]] = []

    def lease(self, manifest: Cid, seconds: float) -> int:
        if self.full:
            raise DiskFullError("there is no room for a lease")
        self.taken.append((manifest, seconds))
        return len(self.taken)

    def renew(self, lease: int, seconds: float) -> None:
        self.renewed.append((lease, seconds))


async def test_what_is_fetched_is_leased_before_it_comes_and_a_while_for_its_readers(
    autojump_clock: MockClock, town: Town, sample: Sample
) -> None:
    await town.provider("a", sample)
    consumer = town.node("c", trusted=[PUBLISHER])
    catalog = consumer.context.catalog = WatchedCatalog()

    def look(event: FetchEvent) -> None:
        if isinstance(event, Matched):
            assert catalog.taken == [(sample.cid, 60.0 + READ_LEASE_S)]
            assert catalog.renewed == []

    assert (await consumer.fetch(prompt(), emit=look, patience_s=60.0)).hit_tokens == 600
    assert catalog.renewed == [(1, READ_LEASE_S)]


async def test_a_cancelled_fetch_shortens_its_lease_too(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample, link=Link(up=10_000))
    consumer = town.node("c", trusted=[PUBLISHER])
    catalog = consumer.context.catalog = WatchedCatalog()
    with trio.move_on_after(0.5):
        await consumer.fetch(prompt())
    assert len(catalog.taken) == 1
    assert catalog.renewed == [(1, READ_LEASE_S)]


async def test_a_fetch_goes_on_without_a_lease(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    await town.provider("a", sample)
    consumer = town.node("c", trusted=[PUBLISHER])
    consumer.context.catalog = WatchedCatalog(full=True)
    assert (await consumer.fetch(prompt())).hit_tokens == 600
