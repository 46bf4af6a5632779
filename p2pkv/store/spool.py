"""Folders for what is on its way to another place: a kernel lock is held on each while its process lives.

One without a lock is a leftover of a process that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def create_locked(parent: Path, name: Callable[[], str]) -> tuple[Path, int]:
    """Create a folder (mode 0700) in ``parent`` and return it with the descriptor that holds its lock until it is closed.

    ``name`` gives another name at each call. Raises OSError.
    """
    while True:
        folder = parent / name()
        folder.mkdir(mode=0o700)
        descriptor = _open(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Somebody who clears leftovers just now may have taken the folder for one, before the lock.
            if os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return folder, descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def clear_unlocked(parent: Path, ours: Callable[[str], bool] = lambda name: True) -> int:
    """Remove the folders in ``parent`` whose processes are gone and whose name is one of ``ours``; return how many.

    Raises OSError.
    """
    cleared = 0
    for name in filter(ours, os.listdir(parent)):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # taken away, or no folder of ours
            descriptor = _open(parent / name)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(parent / name)
                cleared += 1
            except BlockingIOError:
                pass  # its process is alive
            finally:
                os.close(descriptor)
    return cleared


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
