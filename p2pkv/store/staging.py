"""Staging: how a process that is not the daemon hands blocks to it, by name instead of by copy.

The publisher writes a pack into a folder of its own under ``staging/`` and tells the daemon its name. The daemon checks every
block, seals and syncs the pack and moves it among its own: after that a power cut loses nothing, and the artifact may be
listed and announced. While the publisher lives it holds a kernel lock on its folder; a folder without one is a leftover.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from p2pkv.errors import IntegrityError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.ports import Buffer
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.files import DISK_THREADS, os_errors
from p2pkv.store.home import HomeLayout
from p2pkv.store.pack import Contents, PackWriter, Record, Write, read_contents, seal
from p2pkv.store.progress import Progress, Step, ignore
from p2pkv.store.spool import clear_unlocked, create_locked

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_PACK: Final = "blocks.pack"
PUBLISH_AGAIN: Final = "Nothing was taken over: publish again; if this repeats, check the disk."


class Staging:
    """One folder of blocks on their way into a store. For one thread."""

    def __init__(self, folder: Path, pack: PackWriter) -> None:
        self._folder = folder
        self._pack = pack
        self._cids: dict[Cid, None] = {}

    @property
    def name(self) -> str:
        """What to tell the daemon."""
        return self._folder.name

    @property
    def cids(self) -> Sequence[Cid]:
        """What was written, each once, in order."""
        return tuple(self._cids)

    def write(self, cid: Cid, data: Buffer) -> None:
        """Add a block whose CID the caller computed. Raises DiskFullError, StoreError."""
        if cid in self._cids:
            return
        with os_errors(f"stage block {cid}"):
            self._pack.append(cid, memoryview(data).cast("B"))
        self._cids[cid] = None


@contextmanager
def open_staging(home: Path, *, write: Write = os.pwritev) -> Iterator[Staging]:
    """Create a staging folder under ``home``; what the daemon has not taken over by the end of the block is removed.

    Raises DiskFullError, StoreError.
    """
    layout = HomeLayout(home)
    layout.create()
    with os_errors(f"create a folder in {layout.staging}"):
        folder, descriptor = create_locked(layout.staging, lambda: secrets.token_hex(16))
    try:
        with os_errors(f"create {folder / _PACK}"):
            pack = PackWriter(f"{folder}/{_PACK}", write=write)
        try:
            yield Staging(folder, pack)
        finally:
            pack.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is a leftover for the next start
        os.close(descriptor)


class StagedBlocks:
    """What is staged in a folder, and behind it what is stored already; as it is when this is made. For one thread."""

    def __init__(self, descriptor: int | None, blocks: BlockPacks) -> None:
        self._descriptor = descriptor
        self._blocks = blocks
        records = read_contents(descriptor).records if descriptor is not None else []
        self._records = {record.cid: record for record in records}

    def has(self, cid: Cid) -> bool:
        """Return whether the block is staged or stored, at once."""
        return cid.binary in self._records or self._blocks.has(cid)

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes of a block. Raises NotFoundError, IntegrityError, StoreError."""
        record = self._records.get(cid.binary)
        if record is None or self._descriptor is None:
            return self._blocks.read(cid)
        with os_errors("read a staged block"):
            return _read_staged(self._descriptor, record)


@contextmanager
def open_staged(layout: HomeLayout, blocks: BlockPacks, name: str) -> Iterator[StagedBlocks]:
    """Look into the staging folder ``name``. Raises UsageError for a name that is none, IntegrityError, StoreError."""
    path = _pack_of(layout, name)
    with os_errors(f"read staged blocks in {path}"):
        descriptor = _open_pack(path)
    try:
        with os_errors(f"read staged blocks in {path}"):
            staged = StagedBlocks(descriptor, blocks)
        yield staged
    finally:
        if descriptor is not None:
            os.close(descriptor)


def adopt(layout: HomeLayout, blocks: BlockPacks, name: str, cids: Sequence[Cid], on_progress: Progress = ignore) -> None:
    """Check the blocks of the staging folder ``name`` and move their pack into ``blocks``, durably.

    Nothing is moved unless all of ``cids`` are here and right. A block that is stored already need not be staged, so the call
    can be repeated. Raises UsageError for a name that is none, NotFoundError, IntegrityError, DiskFullError, StoreError.
    """
    path = _pack_of(layout, name)
    with os_errors(f"read staged blocks in {path}"):
        contents = _check_and_sync(path, on_progress)
    staged = {record.cid for record in contents.records} if contents is not None else set()
    stored = [cid for cid in dict.fromkeys(cids) if cid.binary not in staged]
    for cid in stored:
        if not blocks.has(cid):
            raise NotFoundError(f"block {cid} was not staged", advice=PUBLISH_AGAIN)
        blocks.read(cid)
        on_progress(Step.VERIFYING, 0, 0)
    if contents is not None:
        with os_errors(f"take over staged blocks in {path}"):
            blocks.install(path, contents)
    blocks.sync(stored)


def clear_stale_staging(layout: HomeLayout) -> int:
    """Remove the staging folders of processes that are gone, and return how many. Raises StoreError."""
    with os_errors(f"clear {layout.staging}"):
        return clear_unlocked(layout.staging)


def _pack_of(layout: HomeLayout, name: str) -> str:
    """Return the path of the pack in the staging folder ``name``. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError("not the name of a staging folder", advice="Pass Staging.name.")
    return f"{layout.staging}/{name}/{_PACK}"


def _open_pack(path: str) -> int | None:
    """Open a staged pack, ``None`` where there is none. Raises IntegrityError for what is no file, OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IntegrityError("what is staged is no pack", advice=PUBLISH_AGAIN)
    return descriptor


def _read_staged(descriptor: int, record: Record) -> bytes:
    """Return the verified bytes of a staged block. Raises IntegrityError, OSError."""
    cid = Cid.from_bytes(record.cid)
    data = os.pread(descriptor, record.size, record.offset)
    if not cid.matches(data):
        raise IntegrityError(f"the staged block {cid} is damaged", advice=PUBLISH_AGAIN)
    return data


def _check_and_sync(path: str, on_progress: Progress) -> Contents | None:
    """Return what a staged pack holds once every hash is right and it is sealed on the disk; ``None`` for no block at all."""
    descriptor = _open_pack(path)
    if descriptor is None:
        return None
    try:
        contents = seal(descriptor)

        def check(record: Record) -> int:
            return len(_read_staged(descriptor, record))

        done, total = 0, sum(record.size for record in contents.records)
        with ThreadPoolExecutor(DISK_THREADS, "p2pkv-disk") as pool:
            try:
                # The disk takes what is sealed while blocks are hashed: either takes about as long.
                synced = pool.submit(os.fsync, descriptor)
                for size in pool.map(check, contents.records):
                    done += size
                    on_progress(Step.VERIFYING, done, total)
                on_progress(Step.SYNCING, done, total)
                synced.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # or the end would wait for all that is still to be read
                raise
        return contents if contents.records else None
    finally:
        os.close(descriptor)
