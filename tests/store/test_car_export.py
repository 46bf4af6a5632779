"""Artifacts to files: whole or not at all, and going on where it was interrupted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from p2pkv.errors import (
    DiskFullError,
    FetchIncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
    UsageError,
)
from p2pkv.store.car_file import export_car, write_car
from p2pkv.store.pack import write_at
from p2pkv.store.progress import Step
from p2pkv.store.store import Store, open_store
from p2pkv.store.stored_blocks import StoredBlocks
from tests.support.artifacts import Sample
from tests.support.cars import (
    LONG,
    SAMPLE,
    SIZE,
    Left,
    after,
    assert_kept,
    data_blocks,
    hold,
    in_order,
    whole,
)
from tests.support.stores import flip_block


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "home") as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder / "artifact.car"


@pytest.mark.parametrize("sample", [SAMPLE, LONG], ids=["inline tokens", "a block of tokens"])
def test_an_export_is_the_artifact_in_order(store: Store, file: Path, sample: Sample) -> None:
    hold(store, sample)
    heard: list[tuple[Step, int, int]] = []
    written = export_car(store, sample.cid, file, lambda *moment: heard.append(moment))
    assert file.read_bytes() == whole(sample)
    size = file.stat().st_size
    assert (written.artifact.cid, written.blocks, written.file_bytes) == (sample.cid, len(sample.blocks), size)
    assert os.listdir(file.parent) == [file.name]
    assert heard[-1] == (Step.SYNCING, size, size)
    assert {step for step, *_ in heard} == {Step.WRITING, Step.SYNCING}
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)
    assert store.holds.counts() == (0, 0)


def test_what_is_not_here_is_refused_and_nothing_is_touched(store: Store, file: Path) -> None:
    file.write_bytes(b"of before")
    with pytest.raises(NotFoundError):
        export_car(store, SAMPLE.cid, file)
    hold(store, SAMPLE, without=(data_blocks(SAMPLE)[2],))
    with pytest.raises(FetchIncompleteError, match=str(SAMPLE.cid)):
        export_car(store, SAMPLE.cid, file)
    assert (file.read_bytes(), os.listdir(file.parent)) == (b"of before", [file.name])
    assert store.holds.counts() == (0, 0)


@pytest.mark.parametrize("heard", [0, 1, 4, 8])
def test_an_interrupted_export_leaves_a_named_part_and_goes_on_with_it(
    store: Store, file: Path, heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(store, SAMPLE)
    part = file.with_name("artifact.car.part")
    with pytest.raises(Left):
        export_car(store, SAMPLE.cid, file, after(heard))
    assert os.listdir(file.parent) == [part.name]
    assert whole(SAMPLE).startswith(part.read_bytes())
    written: list[int] = []

    def note(descriptor: int, buffers: list[bytes], offset: int) -> None:
        written.append(offset)
        write_at(descriptor, buffers, offset)

    before = part.stat().st_size
    monkeypatch.setattr("p2pkv.store.car_file.write_at", note)
    export_car(store, SAMPLE.cid, file)
    assert file.read_bytes() == whole(SAMPLE)
    assert os.listdir(file.parent) == [file.name]
    assert min(written) == before  # nothing was written again


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_lies_there_becomes_the_artifact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A part of another artifact, one with a wrong byte, one that is too long: the first wrong section on is written."""
    folder = tmp_path_factory.mktemp("car")
    right = whole(SAMPLE)
    there = bytearray(right[: data.draw(st.integers(0, len(right)))])
    if there and data.draw(st.booleans()):
        there[data.draw(st.integers(0, len(there) - 1))] ^= 1
    there += data.draw(st.binary(max_size=200))
    (folder / "x.car.part").write_bytes(there)
    home = tmp_path_factory.mktemp("home")
    with open_store(home) as store:
        hold(store, SAMPLE)
        write_car(SAMPLE.cid, SAMPLE.blocks[SAMPLE.cid], store.blocks, folder / "x.car")
    assert (folder / "x.car").read_bytes() == right
    assert os.listdir(folder) == ["x.car"]


@pytest.mark.parametrize("there", [whole(SAMPLE) + b"more", bytes(2 * len(whole(SAMPLE)))], ids=["right and more", "another"])
def test_what_is_longer_is_cut_off(store: Store, file: Path, there: bytes) -> None:
    hold(store, SAMPLE)
    file.with_name("artifact.car.part").write_bytes(there)
    export_car(store, SAMPLE.cid, file)
    assert file.read_bytes() == whole(SAMPLE)


@pytest.mark.parametrize("position", [0, 1, -1])
def test_a_damaged_block_ends_an_export_and_the_file_is_as_it_was(store: Store, file: Path, position: int) -> None:
    hold(store, SAMPLE)
    file.write_bytes(b"of before")
    flip_block(Path(store.blocks.folder).parent, in_order(SAMPLE)[position], 8 * 7)
    with pytest.raises(IntegrityError):
        export_car(store, SAMPLE.cid, file)
    assert file.read_bytes() == b"of before"
    victim = in_order(SAMPLE)[position]
    store.write(victim, SAMPLE.blocks[victim])
    export_car(store, SAMPLE.cid, file)
    assert file.read_bytes() == whole(SAMPLE)


def test_a_full_disk_is_named_and_the_export_goes_on_when_there_is_room(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(store, SAMPLE)

    def full(descriptor: int, buffers: list[bytes], offset: int) -> None:
        if offset > SIZE // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_at(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr("p2pkv.store.car_file.write_at", full)
        with pytest.raises(DiskFullError):
            export_car(store, SAMPLE.cid, file)
    assert os.listdir(file.parent) == ["artifact.car.part"]
    export_car(store, SAMPLE.cid, file)
    assert file.read_bytes() == whole(SAMPLE)


def test_where_no_file_can_be_written(store: Store, file: Path) -> None:
    hold(store, SAMPLE)
    with pytest.raises(UsageError, match="a folder"):
        export_car(store, SAMPLE.cid, file.parent)
    with pytest.raises(StoreError):
        export_car(store, SAMPLE.cid, file / "no" / "folder.car")
    part = file.with_name("artifact.car.part")
    part.symlink_to(file.with_name("elsewhere"))
    with pytest.raises(StoreError):
        export_car(store, SAMPLE.cid, file)
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(UsageError, match="no file"):
        export_car(store, SAMPLE.cid, file)
    part.unlink()
    part.mkdir()
    with pytest.raises(StoreError):
        export_car(store, SAMPLE.cid, file)
    assert not file.exists()


def test_one_export_at_a_time_writes_a_file(store: Store, file: Path) -> None:
    hold(store, SAMPLE)
    refused: list[str] = []

    def write_too(step: Step, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(UsageError) as caught:
                export_car(store, SAMPLE.cid, file)
            refused.append(caught.value.message)

    export_car(store, SAMPLE.cid, file, write_too)
    assert "is being written" in refused[0]
    assert file.read_bytes() == whole(SAMPLE)


def test_what_is_exported_is_not_collected_meanwhile(store: Store, file: Path) -> None:
    hold(store, SAMPLE)  # and listed nowhere
    export_car(store, SAMPLE.cid, file, lambda *_: assert_kept(store))
    assert file.read_bytes() == whole(SAMPLE)
    assert store.collector.collect().blocks == len(SAMPLE.blocks)


def test_a_home_is_exported_without_its_node(tmp_path: Path, file: Path) -> None:
    with open_store(tmp_path / "home") as store:
        hold(store, SAMPLE)
    write_car(SAMPLE.cid, SAMPLE.blocks[SAMPLE.cid], StoredBlocks(tmp_path / "home" / "blocks"), file)
    assert file.read_bytes() == whole(SAMPLE)
