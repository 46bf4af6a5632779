"""The packs of a store over its life: filled, sealed, empty, left by a killed process, damaged, and opened again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from p2pkv.errors import IntegrityError, NotFoundError, StoreError
from p2pkv.formats.cid import Cid
from p2pkv.limits import READY_STEP_BYTES
from p2pkv.store import blocks as blocks_module, pack as pack_module
from p2pkv.store.blocks import BlockPacks, BlockTotals
from p2pkv.store.location import Location
from p2pkv.store.stored_blocks import StoredBlocks
from tests.store import packs
from tests.store.damages import (
    CID,
    DAMAGES,
    DATA,
    NAME,
    SMALL,
    SMALL_CIDS,
    Read,
    by_buffer,
    contents_of,
    every_way_to_read,
    overwrite,
    reopened,
)

WRITER = """
import sys
from pathlib import Path
from p2pkv.formats.cid import Cid
from p2pkv.store.blocks import BlockPacks
blocks = BlockPacks(Path(sys.argv[1]), max_pack_bytes=500_000)
blocks.make_ready()
for number in range(100_000):
    data = number.to_bytes(4, "big") * 2000
    blocks.write(Cid.of_block(data), data)
    print(number, flush=True)
"""


# --- packs that fill, and packs that hold nothing -------------------------------------------------------------------------


def test_packs_are_sealed_at_their_size_and_totals_stay_exact(folder: Path) -> None:
    most = 5000
    with closing(BlockPacks(folder, max_pack_bytes=most)) as blocks:
        for number, (cid, data) in enumerate(zip(SMALL_CIDS, SMALL, strict=True), 1):
            blocks.make_ready()
            blocks.write(cid, data)
            assert blocks.totals() == BlockTotals(number, number * 1000, 0)
        names = sorted(os.listdir(folder))
        assert names == [f"{number:08}.pack" for number in range(1, 5)]  # 64 + 5 * (64 + 1024) pass 5000
        assert all(contents_of(folder / name)[1] for name in names)
        assert {cid: blocks.read(cid) for cid in SMALL_CIDS} == dict(zip(SMALL_CIDS, SMALL, strict=True))
    assert [len(contents_of(folder / name)[0]) for name in sorted(os.listdir(folder))] == [5, 5, 5, 5]


def test_a_pack_without_blocks_is_removed(folder: Path) -> None:
    blocks = BlockPacks(folder)
    blocks.close()
    assert os.listdir(folder) == []
    blocks.make_ready()
    assert os.listdir(folder) == [NAME]
    blocks.close()
    assert os.listdir(folder) == []
    blocks.write(CID, DATA)  # a store that was closed opens another pack
    location = blocks.locate(CID)
    assert location is not None
    DAMAGES["flipped bit"](folder / location.file, location)
    with pytest.raises(IntegrityError):
        blocks.read(CID)
    blocks.close()  # its only block is buried
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"p2pk",
        packs.head()[:30],
        packs.head(),
        packs.head() + bytes(10_000),
        packs.head() + packs.record(DATA)[:-1000],
        packs.head() + packs.record(DATA, tag=b"DEAD"),
        bytes(5000),
    ],
)
def test_a_pack_without_blocks_that_a_killed_process_left_is_removed(folder: Path, left: bytes) -> None:
    (folder / NAME).write_bytes(left)
    assert not StoredBlocks(folder).has(CID)
    assert os.listdir(folder) == [NAME]
    with closing(BlockPacks(folder)) as blocks:
        assert os.listdir(folder) == []
        assert blocks.totals() == BlockTotals(0, 0, 0)
        blocks.write(CID, DATA)
    assert reopened(folder).read(CID) == DATA


# --- killed processes -----------------------------------------------------------------------------------------------------


def test_room_that_was_made_ready_before_a_crash_is_walked_and_given_back(folder: Path) -> None:
    blocks = BlockPacks(folder, max_pack_bytes=3 * READY_STEP_BYTES)
    while blocks.make_ready():
        pass
    for cid, data in zip(SMALL_CIDS, SMALL, strict=True):
        blocks.write(cid, data)
    assert (folder / NAME).stat().st_size == 3 * READY_STEP_BYTES
    # The process is gone without a word: what follows sees only the file.
    for after in (StoredBlocks(folder), reopened(folder), reopened(folder)):
        assert {cid: after.read(cid) for cid in SMALL_CIDS} == dict(zip(SMALL_CIDS, SMALL, strict=True))
    salt = (folder / NAME).read_bytes()[8:40]
    assert (folder / NAME).read_bytes() == packs.sealed(SMALL, salt)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 500, 1063])
def test_a_torn_last_record_costs_itself_and_the_pack_is_sealed_at_the_next_start(folder: Path, cut: int) -> None:
    whole = packs.unsealed(SMALL)
    (folder / NAME).write_bytes(whole[: -(1024 + 64) + cut])
    blocks = reopened(folder)
    assert [blocks.has(cid) for cid in SMALL_CIDS] == [True] * 19 + [False]
    assert blocks.totals() == BlockTotals(19, 19_000, 0)
    assert (folder / NAME).read_bytes() == packs.sealed(SMALL[:-1])
    with closing(blocks):
        blocks.write(SMALL_CIDS[-1], SMALL[-1])
    assert sorted(os.listdir(folder)) == [NAME, "00000002.pack"]
    assert reopened(folder).totals() == BlockTotals(20, 20_000, 0)


def test_a_process_that_is_killed_loses_no_block_that_it_had_stored(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == 150:
                    process.kill()
                    break
            stored = 150 + sum(1 for _ in process.stdout)
        finally:
            process.kill()
    assert len(os.listdir(folder)) > 1
    blocks = reopened(folder)
    for number in range(stored + 1):
        data = number.to_bytes(4, "big") * 2000
        assert blocks.read(Cid.of_block(data)) == data
    assert blocks.totals().blocks in (stored + 1, stored + 2)  # it may have stored one more than it could tell
    assert all(contents_of(folder / name)[1] for name in os.listdir(folder))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_seal_that_cannot_be_written_costs_no_block(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, buffers: Sequence[bytes], offset: int) -> None:
        os.pwrite(descriptor, b"".join(buffers)[:100], offset)
        raise OSError(number, os.strerror(number))

    blocks = BlockPacks(folder)
    blocks.make_ready()
    for cid, data in zip(SMALL_CIDS, SMALL, strict=True):
        blocks.write(cid, data)
    with monkeypatch.context() as patched:
        patched.setattr(pack_module, "write_at", fail)
        blocks.close()
        assert contents_of(folder / NAME) == ([cid.binary for cid in SMALL_CIDS], False)
        for after in (blocks, reopened(folder)):
            assert {cid: after.read(cid) for cid in SMALL_CIDS} == dict(zip(SMALL_CIDS, SMALL, strict=True))
        assert not contents_of(folder / NAME)[1]
    assert reopened(folder).totals() == BlockTotals(20, 20_000, 0)
    assert contents_of(folder / NAME)[1]


def test_a_folder_that_cannot_be_changed_still_gives_its_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, change: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (folder / NAME).write_bytes(packs.unsealed(SMALL))
    (folder / "00000002.pack").write_bytes(packs.head() + packs.record(DATA[::-1], CID))
    monkeypatch.setattr(blocks_module, "_change", refuse)
    blocks = reopened(folder)
    assert [blocks.read(cid) for cid in SMALL_CIDS] == SMALL
    with pytest.raises(IntegrityError):
        blocks.read(CID)
    assert not blocks.has(CID)
    assert reopened(folder).has(CID)  # not even marked, so that it is found again


# --- damaged packs at the start -------------------------------------------------------------------------------------------


def test_a_table_that_is_damaged_costs_a_walk_and_is_written_anew(folder: Path) -> None:
    whole = packs.sealed(SMALL)
    for place in (len(packs.unsealed(SMALL)), len(whole) - 64, len(whole) - 60, len(whole) - 30):
        (folder / NAME).write_bytes(whole)
        overwrite(folder / NAME, place, bytes([whole[place] ^ 4]))
        assert [StoredBlocks(folder).read(cid) for cid in SMALL_CIDS] == SMALL
        assert [reopened(folder).read(cid) for cid in SMALL_CIDS] == SMALL
        assert (folder / NAME).read_bytes() == whole


@every_way_to_read
@pytest.mark.parametrize("size", [0, 1, 999, 1001, 1024, 1024 + 64, 2000])
def test_a_header_with_a_wrong_size_yields_no_wrong_byte(folder: Path, read: Read, size: int) -> None:
    whole = packs.unsealed(SMALL)
    second = 64 + 1088
    (folder / NAME).write_bytes(whole[:second] + packs.header(SMALL_CIDS[1].binary, size) + whole[second + 64 :])
    blocks = reopened(folder)
    for cid, data in zip(SMALL_CIDS, SMALL, strict=True):
        with suppress(IntegrityError, NotFoundError):
            assert read(blocks, cid) == data
    assert not blocks.has(SMALL_CIDS[1])
    assert read(blocks, SMALL_CIDS[0]) == SMALL[0]


def test_what_is_no_pack_is_left_alone(folder: Path) -> None:
    for name in ("notes", "1.pack", ".00000001.pack", "00000001.pack.tmp"):
        (folder / name).write_text("mine")
    with closing(BlockPacks(folder)) as blocks:
        assert blocks.totals() == BlockTotals(0, 0, 0)
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("notes", "1.pack", ".00000001.pack", "00000001.pack.tmp"), "mine"
    )


def test_no_folder_at_all_is_an_error_of_the_tree(folder: Path) -> None:
    with pytest.raises(StoreError, match="packs"):
        BlockPacks(folder / "nowhere")


def test_what_cannot_be_read_or_is_not_ours_is_passed_over_and_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / NAME).mkdir()
    later = b"p2pkvPK2" + packs.sealed(SMALL)[8:]
    (folder / "00000002.pack").write_bytes(later)
    (folder / "00000003.pack").write_bytes(packs.unsealed([DATA]))
    with closing(BlockPacks(folder)) as blocks:
        assert blocks.read(CID) == DATA
        assert blocks.totals() == BlockTotals(1, len(DATA), 0)
        blocks.write(SMALL_CIDS[0], SMALL[0])
    assert sorted(os.listdir(folder)) == [f"{number:08}.pack" for number in range(1, 5)]
    assert (folder / "00000002.pack").read_bytes() == later
    assert NAME in caplog.text
    assert "00000002.pack is no pack of this version" in caplog.text


def test_a_bad_spot_in_one_pack_costs_that_pack_and_other_trouble_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, data in enumerate([SMALL[0], DATA], 1):
        (folder / f"{number:08}.pack").write_bytes(packs.sealed([data]))
    pread, wrong = os.pread, errno.EIO

    def fail_on_first(descriptor: int, size: int, offset: int) -> bytes:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == NAME:
            raise OSError(wrong, os.strerror(wrong))
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", fail_on_first)
    blocks = StoredBlocks(folder)
    assert (blocks.has(CID), blocks.has(SMALL_CIDS[0])) == (True, False)
    wrong = errno.ENOMEM
    with pytest.raises(StoreError):
        StoredBlocks(folder)


# --- starting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [packs.sealed, packs.unsealed])
def test_opening_reads_no_block(
    folder: Path, make: Callable[[Sequence[bytes]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / NAME).write_bytes(make([DATA] * 20))
    pread, counts = os.pread, []

    def count(descriptor: int, size: int, offset: int) -> bytes:
        counts.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", count)
    StoredBlocks(folder)
    BlockPacks(folder)
    assert sum(counts) < len(DATA) // 10


@pytest.mark.parametrize("make", [packs.sealed, packs.unsealed])
def test_opening_finds_small_blocks_many_at_a_time(
    folder: Path, make: Callable[[Sequence[bytes]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [number.to_bytes(2, "big") * (number % 1000) for number in range(2000)]
    mixed = [DATA, *small[:1000], DATA, *small[1000:]]
    (folder / NAME).write_bytes(make(mixed))
    pread, counts = os.pread, []

    def count(descriptor: int, size: int, offset: int) -> bytes:
        counts.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", count)
    for kind in (StoredBlocks, BlockPacks):
        counts.clear()
        blocks = kind(folder)
        assert len(counts) < 60
        assert all(blocks.read(Cid.of_block(data)) == data for data in mixed)


def test_a_store_of_many_blocks_opens(folder: Path) -> None:
    for number in range(1, 11):
        blocks = [(number * 10_000 + index).to_bytes(8, "big") for index in range(10_000)]
        (folder / f"{number:08}.pack").write_bytes(packs.sealed(blocks))
    opened = BlockPacks(folder)
    assert opened.totals() == BlockTotals(100_000, 800_000, 0)
    assert opened.read(Cid.of_block((54_321).to_bytes(8, "big"))) == (54_321).to_bytes(8, "big")


# --- threads --------------------------------------------------------------------------------------------------------------


class Forgetful(dict[bytes, Location]):
    """An index of which another thread drops an entry as soon as it was looked up."""

    def get(self, key: bytes, default: object = None) -> Location:
        if key in self:
            self.found = self.pop(key)
        return self.found


def test_a_block_that_another_thread_forgets_at_the_same_moment_is_forgotten(folder: Path) -> None:
    (folder / NAME).write_bytes(packs.head() + packs.record(DATA[::-1], CID))
    stored = StoredBlocks(folder)
    stored._index = Forgetful(stored._index)
    with pytest.raises(IntegrityError):
        stored.read(CID)
    assert not stored.has(CID)


def test_threads_write_read_and_damage_at_once(folder: Path) -> None:
    with closing(BlockPacks(folder, max_pack_bytes=20_000)) as blocks, ThreadPoolExecutor(8) as pool:

        def work(number: int) -> None:
            cid, data = SMALL_CIDS[number % 20], SMALL[number % 20]
            if number % 7 == 0:
                blocks.make_ready()
            blocks.write(cid, data)
            location = blocks.locate(cid)
            if number % 5 == 0 and location is not None:
                with suppress(FileNotFoundError):  # all of its blocks were damaged, and it is removed
                    overwrite(folder / location.file, location.offset, b"wrong")
            with suppress(IntegrityError, NotFoundError):
                assert (by_buffer if number % 2 else BlockPacks.read)(blocks, cid) == data

        list(pool.map(work, range(400)))
        for cid, data in zip(SMALL_CIDS, SMALL, strict=True):
            with suppress(IntegrityError, NotFoundError):
                assert blocks.read(cid) == data
        left = [cid for cid in SMALL_CIDS if blocks.has(cid)]
        assert (blocks.totals().blocks, blocks.totals().bytes) == (len(left), 1000 * len(left))
        assert len(os.listdir(folder)) > 10
    after = reopened(folder)
    for cid, data in zip(SMALL_CIDS, SMALL, strict=True):
        while after.has(cid):
            with suppress(IntegrityError):
                assert after.read(cid) == data
                break
    left = [cid for cid in SMALL_CIDS if after.has(cid)]
    assert (after.totals().blocks, after.totals().bytes) == (len(left), 1000 * len(left))
