from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, IntegrityError, NotFoundError, P2pkvError, StoreError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.store import files
from p2pkv.store.blocks import BlockPacks, BlockTotals
from p2pkv.store.files import map_os_error
from p2pkv.store.location import Location, is_pack, read_located
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv.units import KIB, MIB
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
    reopened,
)


@pytest.fixture
def blocks(folder: Path) -> Iterator[BlockPacks]:
    with closing(BlockPacks(folder)) as blocks:
        yield blocks


# --- reading --------------------------------------------------------------------------------------------------------------


@every_way_to_read
@pytest.mark.parametrize("kind", [StoredBlocks, BlockPacks])
def test_every_way_to_read_gives_the_bytes(blocks: BlockPacks, folder: Path, read: Read, kind: type[StoredBlocks]) -> None:
    blocks.write(SMALL_CIDS[0], SMALL[0])
    blocks.write(CID, DATA)
    assert read(blocks, CID) == DATA
    assert blocks.size(CID) == len(DATA)
    location = blocks.locate(CID)
    assert location is not None
    blocks.close()
    assert read(kind(folder), CID) == DATA
    assert kind(folder).locate(CID) == location
    buffer = memoryview(bytearray(len(DATA) + 5))
    assert read_located(folder, location, buffer) == DATA


@every_way_to_read
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_refused_forgotten_counted_and_buried(
    blocks: BlockPacks, folder: Path, read: Read, damage: str, sealed: bool
) -> None:
    blocks.write(SMALL_CIDS[0], SMALL[0])
    blocks.write(CID, DATA)
    if sealed:
        blocks.close()
    location = blocks.locate(CID)
    assert location is not None
    DAMAGES[damage](folder / NAME, location)
    assert blocks.has(CID)
    with pytest.raises(IntegrityError, match="damaged on this machine's disk"):
        read(blocks, CID)
    assert not blocks.has(CID)
    assert blocks.locate(CID) is None
    assert blocks.totals() == BlockTotals(1, len(SMALL[0]), 1)
    with pytest.raises(NotFoundError):
        read(blocks, CID)
    with pytest.raises(NotFoundError):
        blocks.size(CID)
    assert CID.binary not in contents_of(folder / NAME)[0]
    assert not StoredBlocks(folder).has(CID)
    after = reopened(folder)
    assert not after.has(CID)
    assert after.totals().damaged == 0
    if damage not in ("cut off before its header", "emptied", "huge"):  # these cost the neighbour too
        assert after.read(SMALL_CIDS[0]) == SMALL[0]
        assert contents_of(folder / NAME) == ([SMALL_CIDS[0].binary], True)


@every_way_to_read
def test_a_reader_that_may_change_nothing_refuses_and_forgets(blocks: BlockPacks, folder: Path, read: Read) -> None:
    blocks.write(CID, DATA)
    blocks.close()
    stored = StoredBlocks(folder)
    DAMAGES["flipped bit"](folder / NAME, Location(NAME, 128, len(DATA)))
    before = (folder / NAME).read_bytes()
    with pytest.raises(IntegrityError):
        read(stored, CID)
    with pytest.raises(NotFoundError):
        read(stored, CID)
    assert (folder / NAME).read_bytes() == before


@every_way_to_read
def test_a_good_record_that_was_appended_meanwhile_stays(
    blocks: BlockPacks, folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks.write(CID, DATA)
    DAMAGES["swapped"](folder / NAME, Location(NAME, 128, len(DATA)))
    matches = Cid.matches

    def matches_slowly(cid: Cid, data: bytes) -> bool:
        monkeypatch.undo()
        blocks.write(CID, DATA)
        return matches(cid, data)

    monkeypatch.setattr(Cid, "matches", matches_slowly)
    with pytest.raises(IntegrityError):
        read(blocks, CID)
    assert read(blocks, CID) == DATA
    assert blocks.totals() == BlockTotals(1, len(DATA), 1)
    assert contents_of(folder / NAME)[0] == [CID.binary]
    assert read(reopened(folder), CID) == DATA


@every_way_to_read
@pytest.mark.parametrize("kind", [StoredBlocks, BlockPacks])
def test_threads_that_find_the_same_damage_are_all_told(
    folder: Path, read: Read, kind: type[StoredBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / NAME).write_bytes(packs.head() + packs.record(DATA[::-1], CID))
    stored = kind(folder)
    matches = Cid.matches

    def matches_after_another(cid: Cid, data: bytes) -> bool:
        monkeypatch.undo()
        with pytest.raises(IntegrityError):
            read(stored, CID)
        return matches(cid, data)

    monkeypatch.setattr(Cid, "matches", matches_after_another)
    with pytest.raises(IntegrityError):
        read(stored, CID)
    assert not stored.has(CID)


@every_way_to_read
@pytest.mark.parametrize("grows", [False, True])
def test_a_pack_that_is_gone_means_that_its_blocks_are_missing(
    blocks: BlockPacks, folder: Path, read: Read, grows: bool
) -> None:
    blocks.write(CID, DATA)
    if not grows:
        blocks.close()
    (folder / NAME).unlink()
    with pytest.raises(NotFoundError, match=str(CID)):
        read(blocks, CID)
    assert not blocks.has(CID)
    assert blocks.totals() == BlockTotals(0, 0, 0)
    blocks.write(CID, DATA)
    assert read(blocks, CID) == DATA


def test_a_buffer_that_is_too_short_costs_no_good_block(blocks: BlockPacks) -> None:
    blocks.write(CID, DATA)
    with pytest.raises(UsageError, match="does not fit"):
        blocks.read_into(CID, bytearray(len(DATA) - 1))
    assert blocks.read(CID) == DATA
    assert blocks.totals().damaged == 0


def test_bytes_at_a_location_are_what_lies_there(folder: Path) -> None:
    (folder / NAME).write_bytes(DATA)
    buffer = memoryview(bytearray(len(DATA)))
    assert read_located(folder, Location(NAME, 5, 1000), buffer) == DATA[5:1005]
    assert read_located(folder, Location(NAME, len(DATA) - 10, 1000), buffer) == DATA[-10:]
    assert len(read_located(folder, Location(NAME, 2**40, 1000), buffer)) == 0
    assert len(read_located(folder, Location(NAME, 0, 0), buffer)) == 0
    with pytest.raises(UsageError, match="does not fit"):
        read_located(folder, Location(NAME, 0, len(DATA) + 1), buffer)
    with pytest.raises(NotFoundError):
        read_located(folder, Location("00000002.pack", 0, 1), buffer)
    (folder / "00000003.pack").mkdir()
    with pytest.raises(StoreError):
        read_located(folder, Location("00000003.pack", 0, 1), buffer)


def test_reads_may_be_short(blocks: BlockPacks, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks.write(CID, DATA)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:1000]], offset))
    assert by_buffer(blocks, CID) == DATA


NO_PACKS = [
    "",
    ".",
    "..",
    "../" + NAME,
    "/" + NAME,
    "1.pack",
    "0000001.pack",
    NAME + "\n",
    NAME + ".tmp",
    NAME.upper(),
    "x" + NAME,
]


@pytest.mark.parametrize("name", [*NO_PACKS, "\u0660" * 7 + "\u0661.pack", "00000001/pack", NAME.upper(), NAME + "/../x"])
def test_names_that_are_no_pack(name: str) -> None:
    assert not is_pack(name)
    assert is_pack(NAME)
    assert is_pack("123456789.pack")


# --- writing --------------------------------------------------------------------------------------------------------------


def test_a_block_above_the_bound_is_not_written(blocks: BlockPacks, folder: Path) -> None:
    data = bytes(MAX_CODED_BLOCK_BYTES + 1)
    with pytest.raises(UsageError):
        blocks.write(Cid.of_block(data), data)
    assert os.listdir(folder) == []


def test_the_smallest_and_the_largest_block_survive_a_restart(blocks: BlockPacks, folder: Path) -> None:
    for data in (b"", b"x", bytes(MAX_CODED_BLOCK_BYTES)):
        blocks.write(Cid.of_block(data), data)
    for close in (False, True):  # walked, and by the table
        if close:
            blocks.close()
        for data in (b"", b"x", bytes(MAX_CODED_BLOCK_BYTES)):
            assert StoredBlocks(folder).read(Cid.of_block(data)) == data


def test_totals_follow_writes_replacements_and_damage(blocks: BlockPacks, folder: Path) -> None:
    blocks.write(CID, DATA)
    assert blocks.totals() == BlockTotals(1, len(DATA), 0)
    blocks.write(CID, DATA)
    other = b"another block"
    blocks.write(Cid.of_block(other), other)
    assert blocks.totals() == BlockTotals(2, len(DATA) + len(other), 0)
    location = blocks.locate(CID)
    assert location is not None
    DAMAGES["swapped"](folder / NAME, location)
    with pytest.raises(IntegrityError):
        blocks.read(CID)
    assert blocks.totals() == BlockTotals(1, len(other), 1)
    blocks.close()
    # The record before the damaged one is good, and there again.
    assert reopened(folder).totals() == BlockTotals(2, len(DATA) + len(other), 0)
    assert reopened(folder).read(CID) == DATA


def test_totals_take_the_size_of_the_record_that_counts(folder: Path) -> None:
    (folder / NAME).write_bytes(packs.head() + packs.record(b"not it at all", CID) + packs.record(DATA))
    assert reopened(folder).totals() == BlockTotals(1, len(DATA), 0)
    (folder / "00000002.pack").write_bytes(packs.head() + packs.record(b"torn", CID))
    blocks = reopened(folder)
    assert blocks.totals() == BlockTotals(1, len(b"torn"), 0)
    with pytest.raises(IntegrityError):
        blocks.read(CID)
    assert blocks.totals() == BlockTotals(0, 0, 1)
    assert reopened(folder).read(CID) == DATA


def test_later_packs_and_records_win_and_numbers_are_numbers(folder: Path) -> None:
    for name, wrong in (("00000009.pack", b"9"), ("00000010.pack", b"10"), ("100000000.pack", b""), ("99999999.pack", b"99")):
        good = packs.record(DATA) if name == "100000000.pack" else b""
        (folder / name).write_bytes(packs.head() + packs.record(wrong, CID) + good)
    assert StoredBlocks(folder).locate(CID) == Location("100000000.pack", 64 + 64 + 64, len(DATA))
    with closing(reopened(folder)) as blocks:
        assert blocks.read(CID) == DATA
        blocks.write(SMALL_CIDS[0], SMALL[0])
        assert (folder / "100000001.pack").exists()


@pytest.mark.parametrize("step", [1000, 63, 64, 65])
def test_writes_may_be_short(folder: Path, step: int) -> None:
    def write(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(bytes(buffer[:step]) for buffer in buffers[:1]), offset)

    with closing(BlockPacks(folder, write=write)) as blocks:
        for data in (DATA, *SMALL):
            blocks.write(Cid.of_block(data), data)
        assert [blocks.read(Cid.of_block(data)) for data in (DATA, *SMALL)] == [DATA, *SMALL]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EIO, StoreError),
        (errno.EROFS, StoreError),
        (errno.EMFILE, StoreError),
    ],
)
@pytest.mark.parametrize("stored", [0, 3])
def test_a_failed_write_has_its_error_and_leaves_nothing(
    folder: Path, number: int, error: type[P2pkvError], stored: int
) -> None:
    fails = False

    def write(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not fails:
            return os.pwritev(descriptor, buffers, offset)
        os.pwrite(descriptor, b"".join(buffers)[:100], offset)
        raise OSError(number, os.strerror(number))

    blocks = BlockPacks(folder, write=write)
    for data in SMALL[:stored]:
        blocks.write(Cid.of_block(data), data)
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    fails = True
    with pytest.raises(P2pkvError) as caught:
        blocks.write(CID, DATA)
    assert type(caught.value) is error
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    assert not blocks.has(CID)
    assert blocks.totals() == BlockTotals(stored, stored * 1000, 0)
    fails = False
    blocks.write(CID, DATA)
    blocks.close()
    after = reopened(folder)
    assert after.read(CID) == DATA
    assert after.totals() == BlockTotals(stored + 1, stored * 1000 + len(DATA), 0)
    assert len(os.listdir(folder)) == 1


def test_an_unknown_errno_still_is_an_error_of_the_tree() -> None:
    assert type(map_os_error(OSError("no number at all"), "try")) is StoreError


def test_writing_syncs_nothing_and_sync_does_packs_before_their_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files, "_sync", lambda path: synced.append(str(path)))
    with closing(BlockPacks(folder, max_pack_bytes=5000)) as blocks:
        for cid, data in zip(SMALL_CIDS, SMALL, strict=True):
            blocks.write(cid, data)
        assert synced == []
        blocks.sync([SMALL_CIDS[0], SMALL_CIDS[1], SMALL_CIDS[-1]])
        last = blocks.locate(SMALL_CIDS[-1])
    assert last is not None
    assert last.file != NAME
    assert set(synced[:-1]) == {str(folder / NAME), str(folder / last.file)}
    assert synced[2:] == [str(folder)]
    with pytest.raises(NotFoundError):
        blocks.sync([CID])


# --- a disk that is really full -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)  # noqa: S607 - wherever this system keeps it
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)  # noqa: S607 - as above


@pytest.mark.parametrize("ready", [False, True])
def test_a_disk_that_is_really_full(small_disk: Path, ready: bool) -> None:
    blocks = BlockPacks(small_disk)
    if ready:
        blocks.make_ready()  # a file that is larger than the disk, and holds nothing
    blocks.write(CID, DATA)
    (small_disk / "ballast").write_bytes(bytes(MIB - 256 * KIB))
    other = DATA[::-1]
    with pytest.raises(DiskFullError):
        blocks.write(Cid.of_block(other), other)
    assert blocks.read(CID) == DATA
    assert not blocks.has(Cid.of_block(other))
    assert (small_disk / NAME).stat().st_size == 64 + 64 + len(DATA)
    assert StoredBlocks(small_disk).read(CID) == DATA
    (small_disk / "ballast").unlink()
    blocks.write(Cid.of_block(other), other)
    assert blocks.read(Cid.of_block(other)) == other
    filler = 0
    with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while filler < 2 * MIB:
            filler += ballast.write(bytes(4096))
    blocks.close()  # not even the table finds room
    after = reopened(small_disk)
    assert (after.read(CID), after.read(Cid.of_block(other))) == (DATA, other)
    (small_disk / "ballast").unlink()
    assert reopened(small_disk).totals() == BlockTotals(2, 2 * len(DATA), 0)
    assert contents_of(small_disk / NAME) == ([CID.binary, Cid.of_block(other).binary], True)
