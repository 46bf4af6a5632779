"""Collecting: what belongs to nothing goes, what was unused longest goes above the quota, and what is held never does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_PIN_NAME_BYTES
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.collect import Collected, Collector
from p2pkv.store.database import Database
from p2pkv.store.files import Reserve
from p2pkv.store.holds import Holds
from p2pkv.store.home import HomeLayout
from p2pkv.store.index import ArtifactIndex
from p2pkv.store.store import Store, open_store
from p2pkv.store.stored_blocks import StoredBlocks
from tests.support.artifacts import Sample, make_sample

TOKENS = list(range(600))
ONE, OTHER = make_sample(TOKENS), make_sample(TOKENS[::-1], seed=1)
LONGER = make_sample([*TOKENS, *range(300)])  # shares two segments with the first
PACK_BYTES = 20_000
SHARED = set(ONE.blocks) & set(LONGER.blocks)


def size_of(*samples: Sample) -> int:
    return sum(map(len, {cid: data for sample in samples for cid, data in sample.blocks.items()}.values()))


class Place:
    """A store's parts, with a clock and a quota that a test can move."""

    def __init__(self, home: Path) -> None:
        self.layout = HomeLayout(home)
        self.layout.create()
        self.now = 1000.0
        self.database = Database(self.layout.index)
        self.blocks = BlockPacks(self.layout.blocks, max_pack_bytes=PACK_BYTES)
        self.index = ArtifactIndex(self.database, clock=lambda: self.now)
        self.holds = Holds(self.database, clock=lambda: self.now)
        self.reserve = Reserve(self.layout.reserve, 4096)

    def close(self) -> None:
        self.blocks.close()
        self.database.close()

    def collector(self, quota: int = 0) -> Collector:
        return Collector(self.database, self.blocks, self.reserve, quota=quota, clock=lambda: self.now)

    def put(self, sample: Sample) -> None:
        for cid, data in sample.blocks.items():
            self.blocks.write(cid, data)

    def add(self, sample: Sample) -> None:
        self.put(sample)
        self.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)))
        self.now += 10

    def listed(self) -> set[Cid]:
        return {row.manifest_cid for row in self.index.artifacts()}

    def here(self, sample: Sample) -> set[Cid]:
        return {cid for cid, data in sample.blocks.items() if self.blocks.has(cid) and self.blocks.read(cid) == data}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(tmp_path)) as place:
        yield place


# --- what belongs to nothing ----------------------------------------------------------------------------------------------


def test_what_no_artifact_has_goes_and_the_rest_stays(place: Place) -> None:
    place.add(ONE)
    place.put(OTHER)
    collected = place.collector().collect()
    assert (collected.blocks, collected.bytes) == (len(OTHER.blocks), size_of(OTHER))
    assert (collected.evicted, collected.left, collected.over_quota) == ((), size_of(ONE), False)
    assert place.here(ONE) == set(ONE.blocks)
    assert not place.here(OTHER)


def test_the_disk_gets_its_room_back(place: Place) -> None:
    place.add(ONE)
    place.put(OTHER)
    used = sum(path.stat().st_blocks * 512 for path in place.layout.blocks.iterdir())
    collected = place.collector().collect()
    left = sum(path.stat().st_blocks * 512 for path in place.layout.blocks.iterdir())
    assert collected.freed > 0
    assert used - left >= collected.freed - 4096  # the table that a pack gets when it is sealed


def test_what_was_replaced_gives_its_room_back_too(place: Place) -> None:
    place.add(ONE)
    place.put(ONE)
    collected = place.collector().collect()
    assert (collected.blocks, collected.freed > 0) == (0, True)
    assert place.here(ONE) == set(ONE.blocks)


def test_what_is_kept_is_there_after_a_restart_and_what_went_is_not(place: Place, tmp_path: Path) -> None:
    place.add(ONE)
    place.put(OTHER)
    place.collector().collect()
    place.close()
    lying = StoredBlocks(place.layout.blocks)
    assert all(lying.read(cid) == data for cid, data in ONE.blocks.items())
    assert not any(lying.has(cid) for cid in OTHER.blocks)
    place.__init__(tmp_path)  # type: ignore[misc]  # the fixture closes what is open


def test_a_removed_artifact_goes_but_for_what_others_share(place: Place) -> None:
    place.add(ONE)
    place.add(LONGER)
    place.index.remove_artifact(LONGER.cid)
    place.collector().collect()
    assert place.here(ONE) == set(ONE.blocks)
    assert place.here(LONGER) == SHARED


def test_a_damaged_manifest_costs_itself_alone(place: Place) -> None:
    place.add(ONE)
    location = place.blocks.locate(ONE.cid)
    assert location is not None
    with (place.layout.blocks / location.file).open("r+b") as file:
        file.seek(location.offset)
        file.write(b"\0" * 8)
    place.collector().collect()
    assert place.here(ONE) == set(ONE.blocks) - {ONE.cid}


# --- above the quota ------------------------------------------------------------------------------------------------------


def test_the_artifact_that_was_unused_longest_goes(place: Place) -> None:
    place.add(ONE)
    place.add(OTHER)
    place.index.touch(ONE.cid)
    collector = place.collector(quota=size_of(ONE, OTHER) - 1)
    assert collector.due()
    collected = collector.collect()
    assert [(gone.manifest_cid, gone.bytes) for gone in collected.evicted] == [(OTHER.cid, size_of(OTHER))]
    assert place.listed() == {ONE.cid}
    assert place.here(ONE) == set(ONE.blocks)
    assert not collector.due()


def test_below_the_quota_nothing_goes(place: Place) -> None:
    place.add(ONE)
    place.add(OTHER)
    collector = place.collector(quota=size_of(ONE, OTHER))
    assert not collector.due()
    assert collector.collect().evicted == ()


def test_a_shared_prefix_counts_once_and_stays_with_who_is_left(place: Place) -> None:
    place.add(ONE)
    place.add(LONGER)
    collected = place.collector(quota=size_of(ONE, LONGER) - 1).collect()
    assert [gone.manifest_cid for gone in collected.evicted] == [ONE.cid, LONGER.cid][: len(collected.evicted)]
    assert collected.evicted[0].bytes == size_of(ONE, LONGER) - size_of(LONGER)


@pytest.mark.parametrize("hold", [lambda p: p.holds.pin("mine", ONE.cid), lambda p: p.holds.lease(ONE.cid, 60)])
def test_what_is_held_stays_whatever_the_quota(place: Place, hold: Callable[[Place], object]) -> None:
    place.add(ONE)
    place.add(OTHER)
    hold(place)
    collected = place.collector(quota=1).collect()
    assert [gone.manifest_cid for gone in collected.evicted] == [OTHER.cid]
    assert collected.over_quota
    assert place.here(ONE) == set(ONE.blocks)


def test_a_hold_that_is_gone_holds_nothing(place: Place) -> None:
    place.add(ONE)
    place.holds.pin("mine", ONE.cid)
    lease = place.holds.lease(ONE.cid, 60)
    assert place.holds.unpin("mine") == 1
    place.holds.release(lease)
    place.holds.lease(ONE.cid, 60)
    place.now += 62
    assert [gone.manifest_cid for gone in place.collector(quota=1).collect().evicted] == [ONE.cid]


def test_what_is_being_fetched_stays_although_it_is_not_listed(place: Place) -> None:
    place.holds.lease(ONE.cid, 60)
    place.put(ONE)
    place.put(OTHER)
    place.collector(quota=1).collect()
    assert place.here(ONE) == set(ONE.blocks)
    assert not place.here(OTHER)


def test_a_dry_run_tells_and_changes_nothing(place: Place) -> None:
    place.add(ONE)
    place.put(OTHER)
    told = place.collector(quota=1).collect(dry_run=True)
    assert ([gone.manifest_cid for gone in told.evicted], told.dry_run, told.freed) == ([ONE.cid], True, 0)
    assert place.listed() == {ONE.cid}
    assert place.here(OTHER) == set(OTHER.blocks)
    done = place.collector(quota=1).collect()
    assert (done.blocks, done.bytes, done.left) == (told.blocks, told.bytes, told.left)


# --- at the same time -----------------------------------------------------------------------------------------------------


class Interrupted(Collector):
    """Lets a test do something between the decision and the sweep."""

    between: Callable[[], object] = staticmethod(lambda: None)

    def _decide(self, references: object, dry_run: bool) -> object:  # type: ignore[override]
        plan = super()._decide(references, dry_run)  # type: ignore[arg-type]
        self.between()
        return plan


@pytest.mark.parametrize("use", ["has", "read", "write"])
def test_what_is_used_meanwhile_stays(place: Place, use: str) -> None:
    place.put(OTHER)
    cid, data = next(iter(OTHER.blocks.items()))
    collector = Interrupted(place.database, place.blocks, place.reserve)
    calls: dict[str, Callable[[Cid], object]] = {
        "has": place.blocks.has,
        "read": place.blocks.read,
        "write": lambda cid: place.blocks.write(cid, data),
    }
    collector.between = lambda: calls[use](cid)
    assert collector.collect().blocks == len(OTHER.blocks) - 1
    assert place.blocks.read(cid) == data


def test_a_reader_that_the_sweep_overtakes_is_told_that_the_block_is_gone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add(ONE)
    place.put(OTHER)
    cid = max(OTHER.blocks, key=lambda cid: len(OTHER.blocks[cid]))
    buffer = bytearray(len(OTHER.blocks[cid]))
    place.blocks.read_into(cid, buffer)  # it is verified now, and will not be hashed again
    preadv = os.preadv
    swept: list[Collected] = []

    def read_late(*arguments: object) -> int:
        if not swept:
            swept.append(place.collector().collect())
        return preadv(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", read_late)
    with pytest.raises(NotFoundError):
        place.blocks.read_into(cid, buffer)
    assert place.blocks.totals().damaged == 0


# --- on a full disk -------------------------------------------------------------------------------------------------------


def test_the_reserve_makes_room_for_the_decision(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.add(ONE)
    place.reserve.refill()
    writing, full = place.database.writing, []

    def fail_while_the_reserve_is_there(action: str, *, durable: bool = False) -> object:
        if place.layout.reserve.exists():
            full.append(action)
            raise DiskFullError("cannot do it")
        return writing(action, durable=durable)

    monkeypatch.setattr(place.database, "writing", fail_while_the_reserve_is_there)
    assert [gone.manifest_cid for gone in place.collector(quota=1).collect().evicted] == [ONE.cid]
    assert len(full) == 1
    assert place.layout.reserve.stat().st_size == 4096  # and is taken again


# --- pins and the store ---------------------------------------------------------------------------------------------------


def test_pins_have_names_and_need_an_artifact(place: Place) -> None:
    place.add(ONE)
    assert place.holds.pin("a", ONE.cid)
    assert not place.holds.pin("a", ONE.cid)
    assert place.holds.pin("b", ONE.cid)
    assert [(pin.name, pin.manifest_cid, pin.created) for pin in place.holds.pins()] == [
        ("a", ONE.cid, 1010),
        ("b", ONE.cid, 1010),
    ]
    with pytest.raises(NotFoundError):
        place.holds.pin("a", OTHER.cid)
    for name in ("", "  ", "two\nlines", "x" * (MAX_PIN_NAME_BYTES + 1)):
        with pytest.raises(UsageError):
            place.holds.pin(name, ONE.cid)
    assert place.holds.unpin("a", OTHER.cid) == 0
    assert place.holds.unpin("a", ONE.cid) == 1


def test_a_pinned_artifact_is_not_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.index.add_artifact(ONE.artifact, ())
        store.holds.pin("release", ONE.cid)
        with pytest.raises(UsageError, match="pinned as release"):
            store.remove(ONE.cid)
        store.holds.unpin("release")
        assert store.remove(ONE.cid)
        assert not store.remove(ONE.cid)


def test_a_lease_is_renewed_until_it_has_expired(place: Place) -> None:
    lease = place.holds.lease(ONE.cid, 60)
    place.holds.renew(lease, 600)
    place.now += 500
    place.holds.renew(lease, 10)
    place.now += 12
    with pytest.raises(NotFoundError):
        place.holds.renew(lease, 10)


def test_a_store_has_a_reserve_from_its_first_start(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert isinstance(store, Store)
        assert store.layout.reserve.stat().st_blocks > 0
