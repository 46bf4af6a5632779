"""The block store's contract, held by the store on disk and by its twin in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from p2pkv.store.blocks import BlockPacks
from p2pkv.store.store import Store, open_store
from sims.store import MemoryBlockStore
from tests.contract.block_store_suite import DATA, BlockStoreSuite, Subject
from tests.support.stores import damage_block


class TestStoreOnDisk(BlockStoreSuite):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        full = False

        def write(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            if full:
                os.pwrite(descriptor, b"".join(buffers)[:7], offset)  # the last bytes that fit
                raise OSError(errno.ENOSPC, "No space left on device")
            return os.pwritev(descriptor, buffers, offset)

        def fill_disk(now: bool) -> None:
            nonlocal full
            full = now

        with open_store(tmp_path) as opened:
            with closing(BlockPacks(opened.layout.blocks, write=write)) as blocks:
                store = Store(opened.layout, blocks, opened.database)
                yield Subject(store, lambda cid, data: damage_block(tmp_path, cid, data), fill_disk)
                left = store.statistics()
            assert BlockPacks(opened.layout.blocks).totals().blocks == left.blocks


class TestStoreInMemory(BlockStoreSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        store = MemoryBlockStore()

        def fill_disk(now: bool) -> None:
            store.capacity = len(DATA) if now else None

        return Subject(store, store.damage, fill_disk)
