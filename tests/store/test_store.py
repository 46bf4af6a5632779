from __future__ import annotations

from pathlib import Path

from p2pkv.store.store import StoreStatistics, open_store
from tests.store.builders import make_artifact, tokens

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


def test_opening_clears_what_an_interrupted_write_left(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        leftover = store.layout.blocks / "tmp" / "torn-0"
        leftover.write_bytes(b"half a bl")
    with open_store(tmp_path):
        assert not leftover.exists()


def test_every_way_to_read_goes_through_the_store(tmp_path: Path) -> None:
    cid, data = next(iter(ARTIFACT.blocks.items()))
    with open_store(tmp_path) as store:
        store.write(cid, data)
        buffer = bytearray(store.size(cid))
        assert store.read_into(cid, buffer) == len(data)
        assert store.has(cid)
        assert buffer == store.read_mapped(cid) == store.read(cid) == data
