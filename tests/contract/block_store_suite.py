"""What every :class:`p2pkv.ports.BlockStore` promises; the real one and its twin in memory both run this suite."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from p2pkv.errors import DiskFullError, IntegrityError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import BlockStore

DATA = bytes(range(256)) * 8
CID = Cid.of_block(DATA)


@dataclass(frozen=True)
class Subject:
    """A store under test, a way to put wrong bytes in a block's place, and a way to fill up its disk and free it again."""

    store: BlockStore
    damage: Callable[[Cid, bytes], None]
    fill_disk: Callable[[bool], None]


class BlockStoreSuite:
    """Subclass and provide the fixture ``subject``."""

    def test_a_written_block_is_there_and_reads_back(self, subject: Subject) -> None:
        assert not subject.store.has(CID)
        subject.store.write(CID, DATA)
        assert subject.store.has(CID)
        assert subject.store.read(CID) == DATA

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_is_taken_and_may_be_reused_afterwards(
        self, subject: Subject, kind: Callable[[bytearray], bytes]
    ) -> None:
        buffer = bytearray(DATA)
        subject.store.write(CID, kind(buffer))
        buffer[:] = bytes(len(buffer))
        assert subject.store.read(CID) == DATA

    @pytest.mark.parametrize("size", [1, 4095, 4096, MAX_CODED_BLOCK_BYTES])
    def test_sizes_from_one_byte_to_the_largest_block(self, subject: Subject, size: int) -> None:
        data = bytes(size)
        subject.store.write(Cid.of_block(data), data)
        assert subject.store.read(Cid.of_block(data)) == data

    def test_nodes_and_sha256_blocks_are_blocks_too(self, subject: Subject) -> None:
        sha = Cid(Codec.RAW, HashFunction.SHA2_256, hashlib.sha256(DATA).digest())
        for cid in (Cid.of_node(DATA), sha):
            subject.store.write(cid, DATA)
            assert subject.store.read(cid) == DATA
        assert not subject.store.has(CID)

    def test_a_block_is_read_into_the_front_of_a_buffer(self, subject: Subject) -> None:
        subject.store.write(CID, DATA)
        assert subject.store.size(CID) == len(DATA)
        buffer = bytearray(b"\xff" * (len(DATA) + 1))
        assert subject.store.read_into(CID, memoryview(buffer)) == len(DATA)
        assert buffer == DATA + b"\xff"
        with pytest.raises(UsageError):
            subject.store.read_into(CID, memoryview(bytearray(len(DATA) - 1)))

    def test_a_missing_block_is_not_found(self, subject: Subject) -> None:
        with pytest.raises(NotFoundError, match=str(CID)):
            subject.store.read(CID)
        with pytest.raises(NotFoundError, match=str(CID)):
            subject.store.size(CID)
        with pytest.raises(NotFoundError, match=str(CID)):
            subject.store.read_into(CID, memoryview(bytearray(len(DATA))))

    def test_a_damaged_block_is_refused_and_can_be_written_again(self, subject: Subject) -> None:
        subject.store.write(CID, DATA)
        subject.damage(CID, bytes([DATA[0] ^ 1]) + DATA[1:])
        with pytest.raises(IntegrityError):
            subject.store.read(CID)
        assert not subject.store.has(CID)
        subject.store.write(CID, DATA)
        assert subject.store.read(CID) == DATA
        subject.damage(CID, bytes([DATA[0] ^ 1]) + DATA[1:])
        with pytest.raises(IntegrityError):
            subject.store.read_into(CID, memoryview(bytearray(len(DATA))))
        assert not subject.store.has(CID)

    def test_writing_heals_a_damaged_block(self, subject: Subject) -> None:
        subject.store.write(CID, DATA)
        subject.damage(CID, b"")
        subject.store.write(CID, DATA)
        assert subject.store.read(CID) == DATA

    def test_a_full_disk_is_named_loses_nothing_and_ends(self, subject: Subject) -> None:
        subject.store.write(CID, DATA)
        other = DATA[::-1]
        subject.fill_disk(True)
        with pytest.raises(DiskFullError):
            subject.store.write(Cid.of_block(other), other)
        assert not subject.store.has(Cid.of_block(other))
        assert subject.store.read(CID) == DATA
        subject.fill_disk(False)
        subject.store.write(Cid.of_block(other), other)
        assert subject.store.read(Cid.of_block(other)) == other

    def test_threads_may_write_the_same_and_other_blocks_at_once(self, subject: Subject) -> None:
        blocks = [number.to_bytes(4, "big") * 500 for number in range(40)] * 3
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda data: subject.store.write(Cid.of_block(data), data), blocks))
            read = list(pool.map(lambda data: subject.store.read(Cid.of_block(data)), blocks))
        assert read == blocks
