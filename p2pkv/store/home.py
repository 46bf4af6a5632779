"""The p2pkv home: one folder per node, one process at a time.

The lock is the kernel's (``flock``), so it ends with its process, whatever ends that; the pid inside only names it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from p2pkv.errors import HomeLockedError, StoreError
from p2pkv.limits import MAX_SOCKET_PATH_BYTES
from p2pkv.store.files import os_errors

_PID_BYTES: Final = 20


def default_home() -> Path:
    """Return ``$P2PKV_HOME``, else the platform's folder for user data; absolute, created by nobody yet."""
    chosen = os.environ.get("P2PKV_HOME")
    home = Path(chosen).expanduser() if chosen else platformdirs.user_data_path("p2pkv", appauthor=False)
    return home.absolute()


@dataclass(frozen=True, slots=True)
class HomeLayout:
    """Where everything lies under one home."""

    home: Path

    @property
    def lock(self) -> Path:
        return self.home / "lock"

    @property
    def index(self) -> Path:
        return self.home / "index.sqlite"

    @property
    def blocks(self) -> Path:
        return self.home / "blocks"

    @property
    def staging(self) -> Path:
        return self.home / "staging"

    @property
    def keys(self) -> Path:
        return self.home / "keys"

    @property
    def node_key(self) -> Path:
        return self.keys / "node.key"

    @property
    def publisher_key(self) -> Path:
        """Where ``p2pkv keygen`` puts a key that was given no other place."""
        return self.keys / "publisher.key"

    @property
    def trust(self) -> Path:
        return self.home / "trust.json"

    @property
    def control_socket(self) -> Path:
        """``control.sock`` in the home; where that is too long for a unix socket, in a private folder for temporary files.

        The second form depends on ``$TMPDIR``, which the daemon and its clients then have to share.
        """
        path = self.home.absolute() / "control.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"p2pkv-{os.getuid()}-{name}" / "control.sock"

    def secure_control_socket(self) -> Path:
        """Return :attr:`control_socket` after making sure that nobody else can have put it there; for both of its ends.

        Raises StoreError where the folder belongs to someone else or is open to others.
        """
        path = self.control_socket
        if path.parent == self.home.absolute():
            return path
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise StoreError(f"no path for the control socket is short enough: {path}", advice="Set a shorter TMPDIR.")
        with os_errors(f"create {path.parent}"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            found = path.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StoreError(
                f"{path.parent} is not a private folder of this user",
                advice="Remove it, or choose a home with a shorter path.",
            )
        return path

    def create(self) -> None:
        """Create the folders that are missing, open to their owner alone. Raises DiskFullError, StoreError."""
        with os_errors(f"create the home {self.home}"):
            for folder in (self.home, self.blocks, self.staging, self.keys):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold ``home``, which exists, for this process. Raises HomeLockedError with the holder's pid, StoreError."""
    path = HomeLayout(home).lock
    with os_errors(f"open the lock {path}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with os_errors(f"lock {path}"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomeLockedError(f"{_holder(descriptor)} uses the home {home}") from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
        # The file stays: were it removed, two processes could each hold the lock of "the" file.
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, _PID_BYTES, 0).strip()
    return f"process {int(text)}" if text.isdigit() else "another process"
