"""A disk without a byte left: removing, collecting and opening work, and what was stored stays."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import Store, open_store
from p2pkv.units import MIB
from tests.support.artifacts import Sample, make_sample

ONE = make_sample(list(range(600)))
OTHER = make_sample(list(range(600, 1_200)), seed=1)
FILLER = {Cid.of_block(data): data for data in (bytes([number]) * 500_000 for number in range(40))}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home on a file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True, check=False)  # noqa: S607 - wherever this system keeps it
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield folder / "home"
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # noqa: S607 - as above


def add(store: Store, sample: Sample) -> None:
    for cid, data in sample.blocks.items():
        store.write(cid, data)
    store.index.add_artifact(sample.artifact, range(len(sample.artifact.chain_keys)), durable=True)


def fill(store: Store) -> None:
    """Store blocks until the disk refuses one, and take what is left to the last page."""
    with suppress(DiskFullError):
        for cid, data in FILLER.items():
            store.write(cid, data)
    fill_up(store.layout.home.parent)


def fill_up(disk: Path) -> None:
    with suppress(OSError), (disk / "junk").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def whole(store: Store, sample: Sample) -> bool:
    return all(store.has(cid) and store.read(cid) == data for cid, data in sample.blocks.items())


def test_collecting_gives_a_full_disk_its_room_back(home: Path) -> None:
    with open_store(home) as store:
        add(store, ONE)
        fill(store)
        assert store.collector.due()
        collected = store.collector.collect()
        assert collected.freed > 8 * MIB
        assert whole(store, ONE)
        add(store, OTHER)
        assert whole(store, OTHER)


def test_an_artifact_can_be_removed_from_a_full_disk(home: Path) -> None:
    with open_store(home) as store:
        add(store, ONE)
        add(store, OTHER)
        fill(store)
        store.remove(ONE.cid)
        store.collector.collect()
        assert not any(store.has(cid) for cid in ONE.blocks)
        assert whole(store, OTHER)


def test_a_home_on_a_full_disk_opens_and_collects(home: Path) -> None:
    with open_store(home) as store:
        add(store, ONE)
        fill(store)
    (home.parent / "junk").unlink(missing_ok=True)
    fill_up(home.parent)
    with open_store(home) as store:
        assert whole(store, ONE)
        assert store.collector.collect().freed > 8 * MIB
        assert whole(store, ONE)
    assert HomeLayout(home).reserve.stat().st_blocks > 0
