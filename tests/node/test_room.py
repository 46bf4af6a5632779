"""A full disk in the middle of a fetch: it says so, and goes on by itself when there is room."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pkv.artifact.build import ModelDescription
from p2pkv.errors import DiskFullError
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.swarm.report import FetchEvent, FetchReport, FetchState, Progress
from p2pkv.units import MIB
from p2pkv_node.room import ROOM_BYTES, fetch_with_room
from tests.support.artifacts import Sample, make_sample
from tests.support.town import Town

GEOMETRY = LayerGeometry(LayerKind.FULL, kv_heads=8, k_dim=128, v_dim=128)


@pytest.fixture(scope="module")
def large() -> Sample:
    """16 MiB in blocks of 1 MiB."""
    description = ModelDescription(b"\1" * 32, "large", (GEOMETRY,) * 8, Dtype.BF16)
    return make_sample(range(512), description=description, created=int(time.time()))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True, check=False)  # noqa: S607 - wherever this system keeps it
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # noqa: S607 - as above


@pytest.fixture
async def town(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Town]:
    town = Town(tmp_path, nursery)
    await town.start("bootstrap", mirror=False)
    yield town
    await town.close()


async def test_a_fetch_on_a_full_disk_goes_on_when_there_is_room(small_disk: Path, town: Town, large: Sample) -> None:
    provider = await town.start("provider")
    await provider.plant(large.artifact, large.blocks)
    consumer = await town.start("disk/home")
    junk = small_disk / "junk"
    with suppress(OSError), junk.open("wb", buffering=0) as file:
        while consumer.node.store.collector.free_bytes() > 6 * MIB:
            file.write(bytes(MIB))
    told: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        told.append(event)
        if event["event"] == "progress" and event["state"] == "disk full":
            junk.unlink(missing_ok=True)

    report = await consumer.client.fetch(large.cid, patience_s=60.0, on_event=hear)
    assert report["complete"]
    assert report["local_bytes"] > 0  # it went on where it stopped
    states = [event["state"] for event in told if event["event"] == "progress"]
    assert "disk full" in states
    assert states[-1] == "done"
    assert all(consumer.node.store.read(cid) == data for cid, data in large.blocks.items())


# --- in virtual time ------------------------------------------------------------------------------------------------------


class Disk:
    """What the fetch and the waiting see of a disk."""

    def __init__(self, *free: int) -> None:
        self._free = list(free)
        self.tries: list[float] = []
        self.told: list[Progress] = []

    async def fetch(self, hear: Callable[[FetchEvent], None], seconds: float) -> FetchReport:
        self.tries.append(seconds)
        hear(Progress(FetchState.TRANSFERRING, "", 5, 10, ()))
        await trio.sleep(1)
        raise DiskFullError("full")

    async def free_bytes(self) -> int:
        return self._free.pop(0) if self._free else 0

    def hear(self, event: FetchEvent) -> None:
        if isinstance(event, Progress) and event.state is FetchState.DISK_FULL:
            self.told.append(event)

    def run(self, patience_s: float) -> Awaitable[FetchReport]:
        return fetch_with_room(self.fetch, self.free_bytes, self.hear, patience_s)


async def test_room_is_waited_for_as_long_as_the_patience_lasts(autojump_clock: MockClock) -> None:
    disk = Disk(MIB, ROOM_BYTES - 1, ROOM_BYTES)
    with pytest.raises(DiskFullError):
        await disk.run(10.0)
    assert disk.tries == pytest.approx([10.0, 6.0])
    assert trio.current_time() == pytest.approx(9.0)
    assert [event.detail for event in disk.told[:2]] == [
        "0 B are free; it goes on by itself with 8.0 MiB",
        "1.0 MiB are free; it goes on by itself with 8.0 MiB",
    ]
    assert {(event.done_bytes, event.total_bytes) for event in disk.told} == {(5, 10)}
