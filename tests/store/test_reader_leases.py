"""Leases of readers: what they cover is not collected, and nobody touches another's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.errors import FetchIncompleteError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.store import reader_leases
from p2pkv.store.reader_leases import ReaderLeases
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import make_sample
from tests.support.cars import data_blocks, in_order

SAMPLE = make_sample(list(range(600)))


class Clock:
    """Seconds since the epoch, moved by hand, for all parts of a store."""

    def __init__(self, store: Store) -> None:
        self.now = 2_000_000_000.0
        for part in (store.holds, store.collector, store.index):
            part._clock = self

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        for cid, data in SAMPLE.blocks.items():
            store.write(cid, data)
        yield store


@pytest.fixture
def clock(store: Store) -> Clock:
    return Clock(store)


@pytest.fixture
def leases(store: Store, clock: Clock) -> ReaderLeases:
    return ReaderLeases(store, clock=clock)


def test_what_is_leased_stays_until_it_expires(store: Store, leases: ReaderLeases, clock: Clock) -> None:
    """Whether or not it is listed, and also behind a removal."""
    lent = leases.take(SAMPLE.cid, 60)
    assert lent.expires == clock.now + 60
    assert list(lent.blocks) == in_order(SAMPLE)
    assert lent.blocks == {cid: store.locate(cid) for cid in SAMPLE.blocks}
    store.index.add_artifact(SAMPLE.artifact, range(3))
    assert store.remove(SAMPLE.cid)
    clock.now += 59
    assert store.collector.collect().blocks == 0
    assert leases.renew(lent.lease, 30) == clock.now + 30
    clock.now += 29
    assert store.collector.collect().blocks == 0
    assert {cid: store.locate(cid) for cid in SAMPLE.blocks} == lent.blocks
    clock.now += 3
    assert store.collector.collect().blocks == len(SAMPLE.blocks)


def test_a_lease_that_is_given_back_ends_at_once(store: Store, leases: ReaderLeases) -> None:
    lent = leases.take(SAMPLE.cid, 60)
    assert leases.release(lent.lease)
    assert not leases.release(lent.lease)
    with pytest.raises(NotFoundError):
        leases.renew(lent.lease, 60)
    assert store.collector.collect().blocks == len(SAMPLE.blocks)


def test_reading_is_a_use(store: Store, leases: ReaderLeases, clock: Clock) -> None:
    store.index.add_artifact(SAMPLE.artifact, range(3))
    clock.now += 1000
    leases.take(SAMPLE.cid, 60)
    row = store.index.artifact(SAMPLE.cid)
    assert row is not None
    assert row.last_used == clock.now


def test_an_expired_lease_is_not_renewed(leases: ReaderLeases, clock: Clock) -> None:
    lent = leases.take(SAMPLE.cid, 10)
    clock.now += 12
    with pytest.raises(NotFoundError):
        leases.renew(lent.lease, 10)


def test_a_number_that_is_given_out_again_is_not_the_old_lease(store: Store, leases: ReaderLeases, clock: Clock) -> None:
    """Whoever still has the name of the old one neither renews nor ends the new one."""
    old = leases.take(SAMPLE.cid, 10)
    clock.now += 12
    new = leases.take(SAMPLE.cid, 10)
    assert leases._leases[new.lease].number == 1  # the index gave it to the old one, too
    leases.release(old.lease)
    assert store.collector.collect().blocks == 0


def test_what_is_not_whole_or_not_here_is_refused_and_leaves_no_lease(store: Store, leases: ReaderLeases) -> None:
    with pytest.raises(NotFoundError):
        leases.take(Cid.of_node(b"nobody"), 60)
    store.blocks._forget(data_blocks(SAMPLE)[1], store.blocks._find(data_blocks(SAMPLE)[1]))
    with pytest.raises(FetchIncompleteError):
        leases.take(SAMPLE.cid, 60)
    assert store.holds.counts() == (0, 0)


def test_there_are_so_many_and_expired_ones_make_room(
    store: Store, leases: ReaderLeases, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_leases, "MAX_LEASES", 3)
    names = [leases.take(SAMPLE.cid, 10).lease for _ in range(3)]
    assert len(set(names)) == 3
    with pytest.raises(UsageError, match="3 leases"):
        leases.take(SAMPLE.cid, 10)
    assert store.holds.counts() == (0, 3)
    leases.release(names[0])
    leases.take(SAMPLE.cid, 10)
    clock.now += 12
    assert [leases.take(SAMPLE.cid, 10) for _ in range(3)]


def test_many_threads_never_have_more_than_there_may_be(leases: ReaderLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_leases, "MAX_LEASES", 5)
    taken: list[str] = []
    refused: list[UsageError] = []

    def take() -> None:
        try:
            taken.append(leases.take(SAMPLE.cid, 60).lease)
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused), len(leases._leases)) == (5, 7, 5)
