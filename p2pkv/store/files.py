"""File operations with a promise: all or nothing, durable where asked, and every OSError mapped in one table.

``durable`` means: when the call has returned, a power cut does not undo it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from p2pkv.errors import DiskFullError, MachineError, StoreError
from p2pkv.ports import Buffer

Item = TypeVar("Item")
Result = TypeVar("Result")
# Enough to keep a disk busy while others hash.
DISK_THREADS: Final = 8

_OPEN_FILES: Final = "Raise the limit of open files, for example with `ulimit -n 65536`."
_PERMISSIONS: Final = "Check who owns the p2pkv home and that it can be written, or choose another with P2PKV_HOME."

# What the system says -> what the caller gets; every other errno is a StoreError with its usual advice.
_BY_ERRNO: Final[dict[int, tuple[type[MachineError], str | None]]] = {
    errno.ENOSPC: (DiskFullError, None),
    errno.EDQUOT: (DiskFullError, None),
    errno.EMFILE: (StoreError, _OPEN_FILES),
    errno.ENFILE: (StoreError, _OPEN_FILES),
    errno.EACCES: (StoreError, _PERMISSIONS),
    errno.EPERM: (StoreError, _PERMISSIONS),
    errno.EROFS: (StoreError, _PERMISSIONS),
}


# fallocate(2): give the room back, leave the size. The two have these values on every Linux.
_PUNCH_HOLE: Final = 0x02 | 0x01


def map_os_error(error: OSError, action: str) -> MachineError:
    """Return the error of the tree for ``error``, which came up while trying to ``action``."""
    cls, advice = _BY_ERRNO.get(error.errno or 0, (StoreError, None))
    return cls(f"cannot {action}: {error.strerror or error}", advice=advice)


@contextmanager
def os_errors(action: str) -> Iterator[None]:
    """Map every OSError of the block; ``action`` completes the sentence "cannot ..."."""
    try:
        yield
    except OSError as error:
        raise map_os_error(error, action) from error


@contextmanager
def locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[None]:
    """Keep all others who lock ``path`` waiting, threads of this process too, until the block ends.

    ``flags`` open it, by default a file of its own that is made where it is missing. Raises StoreError.
    """
    with os_errors(f"lock {path}"):
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        with os_errors(f"lock {path}"):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_private_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, all of them open to their owner alone. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def write_new(path: str | Path, data: Buffer) -> None:
    """Create ``path`` (mode 0600) with ``data``; on any failure nothing is left behind. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            left = memoryview(data).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
    except BaseException:
        os.unlink(path)
        raise


def read_up_to(descriptor: int, size: int) -> bytes:
    """Return the next ``size`` bytes; fewer only where the file ends. Raises OSError."""
    data = os.read(descriptor, size)
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


def sync_paths(paths: Iterable[str]) -> None:
    """Flush files and folders to the disk, several at once. Raises OSError."""
    side_by_side(_sync, list(paths))


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return ``work`` of each item, several at once, for work that waits for the disk. Raises what the first raised."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(DISK_THREADS, "p2pkv-disk") as pool:
        return list(pool.map(work, items))


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` (mode 0600) in the place of ``path``, durably; readers see the old or the new, whole. Raises OSError."""
    _publish(path, data, os.replace)


def create_file(path: Path, data: bytes) -> None:
    """Like :func:`replace_file`, but never over a file that exists. Raises FileExistsError, other OSError."""
    _publish(path, data, os.link)


def _publish(path: Path, data: bytes, put: Callable[[Path, Path], None]) -> None:
    temp = _beside(path)
    write_new(temp, data)
    try:
        _sync(temp)
        put(temp, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temp)
    _sync(path.parent)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reserve:
    """A file that keeps some room for the time when the disk is full, so that what was stored can be taken away even then."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def refill(self) -> None:
        """Take the room, where there is any."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size)
            finally:
                os.close(descriptor)

    def spend_on(self, work: Callable[[], Result]) -> Result:
        """Do ``work``, once more with the room of the reserve where the disk has none. Raises what ``work`` raises."""
        try:
            return work()
        except DiskFullError:
            with suppress(FileNotFoundError), os_errors("give up the reserve"):
                os.unlink(self._path)
            return work()


def punch_hole(descriptor: int, offset: int, length: int) -> bool:
    """Give the room of these bytes back to the disk, and return whether it could; they read as zeros then.

    It needs no room itself. Not every system and file system can.
    """
    if _FALLOCATE is None or length <= 0:
        return False
    return bool(_FALLOCATE(descriptor, _PUNCH_HOLE, offset, length) == 0)


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return fallocate(2) of the C library: `os` has the portable half of it only, which cannot give back."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


_FALLOCATE: Final = _find_fallocate()
