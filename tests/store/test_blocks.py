from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, IntegrityError, NotFoundError, P2pkvError, StoreError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import Buffer
from p2pkv.store import files
from p2pkv.store.blocks import BlockFiles, BlockTotals
from p2pkv.store.files import map_os_error
from p2pkv.units import KIB, MIB

DATA = os.urandom(192 * KIB)
CID = Cid.of_block(DATA)


@pytest.fixture
def blocks(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "blocks")


def by_buffer(blocks: BlockFiles, cid: Cid) -> bytes:
    buffer = bytearray(MAX_CODED_BLOCK_BYTES)
    return bytes(buffer[: blocks.read_into(cid, buffer)])


def by_mapping(blocks: BlockFiles, cid: Cid) -> bytes:
    return bytes(blocks.read_mapped(cid))


Read = Callable[[BlockFiles, Cid], bytes]
every_way_to_read = pytest.mark.parametrize("read", [BlockFiles.read, by_buffer, by_mapping])

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zero filled": lambda data: bytes(len(data)),
    "longer": lambda data: data + b"\0",
    "huge": lambda data: data + bytes(MAX_CODED_BLOCK_BYTES),
    "swapped": lambda data: os.urandom(len(data)),
}


@every_way_to_read
def test_every_way_to_read_gives_the_bytes(blocks: BlockFiles, read: Read) -> None:
    blocks.write(CID, DATA)
    assert read(blocks, CID) == DATA
    assert blocks.size(CID) == len(DATA)


@every_way_to_read
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_removed_and_counted(blocks: BlockFiles, read: Read, damage: str) -> None:
    blocks.write(CID, DATA)
    Path(blocks.path(CID)).write_bytes(DAMAGES[damage](DATA))
    with pytest.raises(IntegrityError, match="removed"):
        read(blocks, CID)
    assert not blocks.has(CID)
    assert blocks.totals() == BlockTotals(0, 0, 1)
    with pytest.raises(NotFoundError):
        read(blocks, CID)


@every_way_to_read
def test_a_good_file_that_replaced_a_damaged_one_meanwhile_stays(
    blocks: BlockFiles, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks.write(CID, DATA)
    Path(blocks.path(CID)).write_bytes(DATA[::-1])
    matches = Cid.matches

    def matches_slowly(cid: Cid, data: bytes) -> bool:
        monkeypatch.undo()
        blocks.write(CID, DATA)
        return matches(cid, data)

    monkeypatch.setattr(Cid, "matches", matches_slowly)
    with pytest.raises(IntegrityError):
        read(blocks, CID)
    assert read(blocks, CID) == DATA


def test_a_buffer_that_is_too_short_costs_no_good_block(blocks: BlockFiles) -> None:
    blocks.write(CID, DATA)
    with pytest.raises(UsageError, match="does not fit"):
        blocks.read_into(CID, bytearray(len(DATA) - 1))
    assert blocks.read(CID) == DATA


def test_a_mapped_view_outlives_its_file(blocks: BlockFiles) -> None:
    blocks.write(CID, DATA)
    view = blocks.read_mapped(CID)
    assert view.readonly
    os.unlink(blocks.path(CID))
    assert view == DATA


def test_blocks_spread_over_folders(blocks: BlockFiles) -> None:
    cids = [Cid.of_block(bytes([number])) for number in range(100)]
    assert len({os.path.dirname(blocks.path(cid)) for cid in cids}) > 20


def test_a_block_above_the_bound_is_not_written(blocks: BlockFiles) -> None:
    data = bytes(MAX_CODED_BLOCK_BYTES + 1)
    with pytest.raises(UsageError):
        blocks.write(Cid.of_block(data), data)


def test_totals_follow_writes_replacements_and_damage(blocks: BlockFiles) -> None:
    blocks.write(CID, DATA)
    assert blocks.totals() == BlockTotals(1, len(DATA), 0)
    blocks.write(CID, DATA)
    other = b"another block"
    blocks.write(Cid.of_block(other), other)
    assert blocks.totals() == BlockTotals(2, len(DATA) + len(other), 0)
    Path(blocks.path(CID)).write_bytes(DATA[::-1])
    with pytest.raises(IntegrityError):
        blocks.read(CID)
    assert blocks.totals() == BlockTotals(1, len(other), 1)


def test_writes_may_be_short(tmp_path: Path) -> None:
    blocks = BlockFiles(tmp_path, write=lambda descriptor, data: os.write(descriptor, memoryview(data)[:1000]))
    blocks.write(CID, DATA)
    assert blocks.read(CID) == DATA


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
def test_a_failed_write_has_its_error_and_leaves_nothing(tmp_path: Path, number: int, error: type[P2pkvError]) -> None:
    def write(descriptor: int, data: Buffer) -> int:
        os.write(descriptor, memoryview(data)[:100])
        raise OSError(number, os.strerror(number))

    with pytest.raises(P2pkvError) as caught:
        BlockFiles(tmp_path, write=write).write(CID, DATA)
    assert type(caught.value) is error
    assert os.listdir(tmp_path) == ["tmp"]
    assert os.listdir(tmp_path / "tmp") == []


def test_an_unknown_errno_still_is_an_error_of_the_tree() -> None:
    assert type(map_os_error(OSError("no number at all"), "try")) is StoreError


def test_a_durable_write_syncs_the_file_and_then_its_folders(
    blocks: BlockFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files, "_sync", lambda path: synced.append(str(path)))
    blocks.write(CID, DATA)
    assert synced == []
    blocks.write(CID, DATA, durable=True)
    assert synced[0] == blocks.path(CID)
    assert set(synced[1:]) == {os.path.dirname(blocks.path(CID)), str(tmp_path / "blocks")}


def test_leftovers_of_interrupted_writes_are_cleared(blocks: BlockFiles, tmp_path: Path) -> None:
    (tmp_path / "blocks" / "tmp" / "torn-0").write_bytes(DATA[:100])
    assert blocks.clear_leftovers() == 1
    assert blocks.totals() == BlockTotals(0, 0, 0)


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


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    blocks = BlockFiles(small_disk)
    blocks.write(CID, DATA)
    (small_disk / "ballast").write_bytes(bytes(MIB - 256 * KIB))
    other = DATA[::-1]
    with pytest.raises(DiskFullError):
        blocks.write(Cid.of_block(other), other)
    assert blocks.read(CID) == DATA
    assert os.listdir(small_disk / "tmp") == []
    (small_disk / "ballast").unlink()
    blocks.write(Cid.of_block(other), other)
    assert blocks.read(Cid.of_block(other)) == other
