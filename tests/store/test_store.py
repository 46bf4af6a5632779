from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pkv.errors import HomeLockedError, IntegrityError
from p2pkv.store.store import StoreStatistics, open_store
from tests.store import packs
from tests.store.builders import make_artifact, tokens
from tests.support.stores import block_location, cut_off, damage_block, flip_block

ARTIFACT = make_artifact(tokens(2, 3))


def test_statistics_show_what_is_stored(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.statistics() == StoreStatistics(0, 0, 0, 0, 0)
        for cid, data in ARTIFACT.blocks.items():
            store.write(cid, data)
        store.index.add_artifact(ARTIFACT.opened, range(3))
        expected = StoreStatistics(len(ARTIFACT.blocks), sum(map(len, ARTIFACT.blocks.values())), 1, 1, 0)
        assert store.statistics() == expected
    with open_store(tmp_path) as store:
        assert store.statistics() == expected


def test_opening_seals_what_an_interrupted_write_left(tmp_path: Path) -> None:
    blocks = list(ARTIFACT.blocks.values())
    with open_store(tmp_path) as store:
        pack = store.layout.blocks / "00000007.pack"
    pack.write_bytes(packs.unsealed(blocks[:2]) + packs.record(blocks[2])[:-100])
    with open_store(tmp_path) as store:
        assert store.statistics().blocks == 2
        assert pack.read_bytes() == packs.sealed(blocks[:2])


def test_only_the_one_that_holds_the_lock_touches_the_packs(tmp_path: Path) -> None:
    left = packs.unsealed([b"a block"]) + b"torn"
    with open_store(tmp_path) as store:
        pack = store.layout.blocks / "00000007.pack"
        pack.write_bytes(left)
        with pytest.raises(HomeLockedError), open_store(tmp_path):
            pass
        assert pack.read_bytes() == left


def test_a_store_that_was_only_opened_leaves_no_pack(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.blocks.make_ready()
        assert len(os.listdir(store.layout.blocks)) == 1
    assert os.listdir(store.layout.blocks) == []


def test_every_way_to_read_goes_through_the_store(tmp_path: Path) -> None:
    cid, data = next(iter(ARTIFACT.blocks.items()))
    with open_store(tmp_path) as store:
        store.write(cid, data)
        buffer = bytearray(store.size(cid))
        assert store.read_into(cid, buffer) == len(data)
        assert store.has(cid)
        assert buffer == store.read(cid) == data
        pack, location = block_location(tmp_path, cid)
        assert store.locate(cid) == location
        assert pack.read_bytes()[location.offset :][: location.size] == data


@pytest.mark.parametrize("damage", ["overwritten", "flipped", "cut off"])
def test_the_ways_to_damage_a_block_damage_it_and_spare_the_one_before(tmp_path: Path, damage: str) -> None:
    (first, data), (victim, _) = list(ARTIFACT.blocks.items())[:2]
    with open_store(tmp_path) as store:
        for cid in (first, victim):
            store.write(cid, ARTIFACT.blocks[cid])
        match damage:
            case "overwritten":
                damage_block(tmp_path, victim, b"wrong")
            case "flipped":
                flip_block(tmp_path, victim, -1)
            case _:
                cut_off(tmp_path, victim)
        assert store.read(first) == data
        with pytest.raises(IntegrityError):
            store.read(victim)
    with open_store(tmp_path) as store:
        assert (store.has(first), store.has(victim)) == (True, False)
