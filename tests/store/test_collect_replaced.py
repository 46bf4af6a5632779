"""Blocks that were stored again: a program that reads the copy before under a lease finds it until the lease ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pkv.errors import UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.store.location import read_located
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import Sample, make_sample

SAMPLE = make_sample(list(range(600)))
LONGER = make_sample([*range(600), *range(300)])  # shares two segments with it


def publish(store: Store, sample: Sample) -> None:
    with open_staging(store.layout.home) as staging:
        for cid, data in sample.blocks.items():
            staging.write(cid, data)
        store.adopt(staging.name, staging.cids)
    store.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)), durable=True)


@pytest.mark.parametrize("again", [SAMPLE, LONGER])
def test_a_leased_copy_stays_where_it_lies(tmp_path: Path, again: Sample) -> None:
    buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
    with open_store(tmp_path) as store:
        publish(store, SAMPLE)
        lease = store.lease(SAMPLE.cid, 60)
        places = {cid: place for cid in SAMPLE.blocks if (place := store.locate(cid)) is not None}
        publish(store, again)
        moved = {cid for cid, place in places.items() if store.locate(cid) != place}
        assert moved == set(SAMPLE.blocks) & set(again.blocks)
        store.collector.collect()
        for cid, place in places.items():
            assert read_located(store.layout.blocks, place, buffer) == SAMPLE.blocks[cid]

        store.holds.release(lease)
        assert store.collector.collect().freed > 0
        assert not any(_is_there(store, cid, places[cid].file) for cid in moved)
        assert all(store.read(cid) == data for cid, data in (SAMPLE.blocks | again.blocks).items())


def _is_there(store: Store, cid: Cid, file: str) -> bool:
    """Return whether a pack still has the bytes of a block."""
    path = store.layout.blocks / file
    return path.exists() and (SAMPLE.blocks | LONGER.blocks)[cid] in path.read_bytes()


def test_a_file_that_is_no_pack_is_left_alone(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        publish(store, SAMPLE)
        foreign = store.layout.blocks / "00000099.pack"
        foreign.write_bytes(b"somebody's notes")
        store.lease(SAMPLE.cid, 60)
        store.collector.collect()
        assert foreign.read_bytes() == b"somebody's notes"


def test_what_is_pinned_is_not_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        publish(store, SAMPLE)
        store.holds.pin("test", SAMPLE.cid)
        assert not store.index.remove_artifact(SAMPLE.cid)
        with pytest.raises(UsageError, match="pinned as test"):
            store.remove(SAMPLE.cid)
        store.holds.unpin("test")
        assert store.remove(SAMPLE.cid)
        assert not store.remove(SAMPLE.cid)
