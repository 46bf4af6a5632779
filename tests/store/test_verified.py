"""A block that was found intact lately is not hashed again, unless its file was touched or the time is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from p2pkv.errors import IntegrityError
from p2pkv.formats.cid import Cid
from p2pkv.limits import REVERIFY_AFTER_S
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.home import HomeLayout
from p2pkv.store.staging import adopt, open_staging
from p2pkv.store.verified import VerifiedLately

DATA = bytes(range(256)) * 8
CID = Cid.of_block(DATA)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blocks(tmp_path: Path, clock: Clock) -> Iterator[BlockPacks]:
    with closing(BlockPacks(tmp_path)) as blocks:
        blocks.write(CID, DATA)
        blocks.verified = VerifiedLately(clock)
        yield blocks


def hashes_of_a_reading(blocks: BlockPacks) -> int:
    with mock.patch.object(Cid, "matches", autospec=True, side_effect=Cid.matches) as matches:
        buffer = bytearray(len(DATA))
        assert blocks.read_into(CID, buffer) == len(DATA)
        assert buffer == DATA
    return matches.call_count


def path_of(blocks: BlockPacks) -> Path:
    location = blocks.locate(CID)
    assert location is not None
    return Path(blocks.folder) / location.file


def test_a_block_is_hashed_once(blocks: BlockPacks) -> None:
    assert [hashes_of_a_reading(blocks) for _ in range(3)] == [1, 0, 0]


def test_and_again_after_a_while(blocks: BlockPacks, clock: Clock) -> None:
    hashes_of_a_reading(blocks)
    clock.now = REVERIFY_AFTER_S
    assert [hashes_of_a_reading(blocks) for _ in range(2)] == [1, 0]


def test_who_reads_to_use_the_bytes_gets_them_hashed(blocks: BlockPacks) -> None:
    hashes_of_a_reading(blocks)
    with mock.patch.object(Cid, "matches", autospec=True, return_value=False), pytest.raises(IntegrityError):
        blocks.read(CID)


def test_a_change_of_the_file_is_seen_whatever_its_times_say(blocks: BlockPacks) -> None:
    hashes_of_a_reading(blocks)
    path = path_of(blocks)
    location, before = blocks.locate(CID), path.stat()
    assert location is not None
    with path.open("r+b") as file:
        file.seek(location.offset)
        file.write(bytes([DATA[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(IntegrityError):
        blocks.read_into(CID, bytearray(len(DATA)))


def test_another_file_in_its_place_is_seen(blocks: BlockPacks) -> None:
    hashes_of_a_reading(blocks)
    path = path_of(blocks)
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    assert hashes_of_a_reading(blocks) == 1


def test_blocks_written_behind_it_do_not_hide_damage(blocks: BlockPacks) -> None:
    hashes_of_a_reading(blocks)
    blocks.write(Cid.of_block(b"more"), b"more")
    assert hashes_of_a_reading(blocks) == 1


def test_what_was_published_is_verified_as_it_is_taken_over(tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path)
    layout.create()
    with closing(BlockPacks(layout.blocks)) as blocks, open_staging(tmp_path) as staging:
        staging.write(CID, DATA)
        adopt(layout, blocks, staging.name, [CID])
        assert hashes_of_a_reading(blocks) == 0
