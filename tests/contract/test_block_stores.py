"""The block store's contract, held by the store on disk and by its twin in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.formats.cid import Cid
from p2pkv.ports import Buffer
from p2pkv.store.blocks import BlockFiles
from p2pkv.store.store import Store, open_store
from sims.store import MemoryBlockStore
from tests.contract.block_store_suite import DATA, BlockStoreSuite, Subject


class TestStoreOnDisk(BlockStoreSuite):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        full = False

        def write(descriptor: int, data: Buffer) -> int:
            if full:
                os.write(descriptor, memoryview(data)[:7])  # the last bytes that fit
                raise OSError(errno.ENOSPC, "No space left on device")
            return os.write(descriptor, data)

        def fill_disk(now: bool) -> None:
            nonlocal full
            full = now

        with open_store(tmp_path) as opened:
            store = Store(opened.layout, BlockFiles(opened.layout.blocks, write=write), opened.index)

            def damage(cid: Cid, data: bytes) -> None:
                Path(store.blocks.path(cid)).write_bytes(data)

            yield Subject(store, damage, fill_disk)
            assert os.listdir(opened.layout.blocks / "tmp") == []


class TestStoreInMemory(BlockStoreSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        store = MemoryBlockStore()

        def fill_disk(now: bool) -> None:
            store.capacity = len(DATA) if now else None

        return Subject(store, store.damage, fill_disk)
