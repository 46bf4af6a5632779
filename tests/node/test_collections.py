"""The sums of what was collected."""

from __future__ import annotations

from dataclasses import replace

from p2pkv.formats.cid import Cid
from p2pkv.store.collect import Collected, Evicted
from p2pkv_node.collecting import Collection, Collections, Why

EVICTED = Evicted(Cid.of_node(b"an artifact"), "tiny", 5000, 100)
COLLECTED = Collected((EVICTED, EVICTED), blocks=7, bytes=10_000, freed=8192, left=5, over_quota=True, dry_run=False)


def test_they_are_summed_and_the_last_one_is_remembered() -> None:
    collections = Collections()
    assert collections.statistics().last is None
    collections.add(COLLECTED, Why.ABOVE_HIGH_MARK, 1000.0)
    assert collections.statistics().over_quota
    collections.add(replace(COLLECTED, evicted=(EVICTED,), freed=1024, over_quota=False), Why.ASKED_FOR, 2000.0)
    figures = collections.statistics()
    assert figures.count == {Why.ABOVE_HIGH_MARK: 1, Why.ASKED_FOR: 1}
    assert (figures.evicted, figures.freed_bytes, figures.over_quota) == (3, 8192 + 1024, False)
    assert figures.last == Collection(2000.0, Why.ASKED_FOR, 1, 1024)


def test_one_that_took_room_does_not_turn_the_sum_back() -> None:
    collections = Collections()
    collections.add(COLLECTED, Why.ASKED_FOR, 1000.0)
    collections.add(replace(COLLECTED, freed=-512), Why.ASKED_FOR, 2000.0)
    assert collections.statistics().freed_bytes == 8192
