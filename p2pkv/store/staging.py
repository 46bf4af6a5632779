"""Staging: how a process that is not the daemon hands blocks to it, by name instead of by copy.

The publisher writes files into a folder of its own under ``staging/`` and tells the daemon its name. The daemon checks every
file, moves them among its blocks and syncs files and folders: after that a power cut loses nothing, and the artifact may be
listed and announced. While the publisher lives it holds a kernel lock on its folder; a folder without one is a leftover.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from p2pkv.errors import IntegrityError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import Buffer
from p2pkv.store.blocks import BlockFiles
from p2pkv.store.files import Write, os_errors, read_up_to, side_by_side, write_new
from p2pkv.store.home import HomeLayout

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_PUBLISH_AGAIN: Final = "Nothing was taken over: publish again; if this repeats, check the disk."


class Staging:
    """One folder of blocks on their way into a store. For one thread."""

    def __init__(self, folder: Path, write: Write) -> None:
        self._folder = folder
        self._write = write
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
            write_new(self._folder / str(cid), data, write=self._write)
        self._cids[cid] = None


@contextmanager
def open_staging(home: Path, *, write: Write = os.write) -> Iterator[Staging]:
    """Create a staging folder under ``home``; what the daemon has not taken over by the end of the block is removed.

    Raises DiskFullError, StoreError.
    """
    layout = HomeLayout(home)
    layout.create()
    with os_errors(f"create a folder in {layout.staging}"):
        folder, descriptor = _create_locked(layout.staging)
    try:
        yield Staging(folder, write)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is a leftover for the next start
        os.close(descriptor)


def adopt(layout: HomeLayout, blocks: BlockFiles, name: str, cids: Sequence[Cid]) -> None:
    """Check the blocks ``cids`` of the staging folder ``name`` and move them into ``blocks``, durably.

    Nothing is moved unless all are right. A block that is stored already need not be staged, so the call can be repeated.
    Raises UsageError for a name that is none, NotFoundError, IntegrityError, DiskFullError, StoreError.
    """
    if not _NAME.fullmatch(name):
        raise UsageError("not the name of a staging folder", advice="Pass Staging.name.")
    wanted = list(dict.fromkeys(cids))
    folder = f"{layout.staging}/{name}"
    with os_errors(f"read staged blocks in {folder}"):
        # Hashing one file goes on while others wait for the disk.
        sizes = side_by_side(lambda cid: _check_and_sync(f"{folder}/{cid}", cid), wanted)
    stored = [cid for cid, size in zip(wanted, sizes, strict=True) if size is None]
    for cid in stored:
        if not blocks.has(cid):
            raise NotFoundError(f"block {cid} was not staged", advice=_PUBLISH_AGAIN)
        blocks.read(cid)
    with os_errors(f"take over staged blocks in {folder}"):
        for cid, size in zip(wanted, sizes, strict=True):
            if size is not None:
                blocks.install(f"{folder}/{cid}", cid, size)
    blocks.sync(stored)
    blocks.sync_names(wanted)


def clear_stale_staging(layout: HomeLayout) -> int:
    """Remove the staging folders of processes that are gone, and return how many. Raises StoreError."""
    cleared = 0
    with os_errors(f"clear {layout.staging}"):
        for name in os.listdir(layout.staging):
            with suppress(FileNotFoundError, NotADirectoryError):
                descriptor = _open_folder(layout.staging / name)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(layout.staging / name)
                    cleared += 1
                except BlockingIOError:
                    pass  # its publisher is alive
                finally:
                    os.close(descriptor)
    return cleared


def _create_locked(parent: Path) -> tuple[Path, int]:
    while True:
        folder = parent / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        descriptor = _open_folder(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # A daemon that starts just now may have taken the folder for a leftover, before the lock.
            if os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return folder, descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _check_and_sync(path: str, cid: Cid) -> int | None:
    """Return the size of a staged file once its hash is right and it is on the disk; ``None`` where there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        whole = stat.S_ISREG(found.st_mode) and found.st_size <= MAX_CODED_BLOCK_BYTES
        if not whole or not cid.matches(read_up_to(descriptor, found.st_size)):
            raise IntegrityError(f"the staged block {cid} is damaged", advice=_PUBLISH_AGAIN)
        os.fsync(descriptor)
        return found.st_size
    finally:
        os.close(descriptor)
