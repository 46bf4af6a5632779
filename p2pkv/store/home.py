"""The p2pkv home: one folder per node, one process at a time.

The lock is the kernel's (``flock``), so it ends with its process, whatever ends that. The pid inside
only names the holder, and is believed where the system confirms it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from p2pkv.errors import HomeLockedError, StoreError
from p2pkv.limits import LOCK_PATIENCE_S, MAX_SOCKET_PATH_BYTES
from p2pkv.store.files import os_errors

_PID_BYTES: Final = 20
_LOCK_PAUSE_S: Final = 0.02


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
    def pins(self) -> Path:
        return self.home / "pins.json"

    @property
    def reserve(self) -> Path:
        return self.home / "reserve"

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
    def statements(self) -> Path:
        """What publishers took back, and which keys follow theirs."""
        return self.home / "statements"

    @property
    def namespaces(self) -> Path:
        """Secrets in which private artifacts are published."""
        return self.keys / "namespaces"

    @property
    def grants(self) -> Path:
        """What publishers let this home's reader open."""
        return self.home / "grants"

    @property
    def issued_grants(self) -> Path:
        """What this home's publisher let others open."""
        return self.home / "issued-grants"

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


@dataclass(frozen=True, slots=True)
class Holder:
    """Whoever holds a home: ``pid`` as its lock file says, ``None`` where it says nothing.

    ``confirmed``: a process of this machine with that pid was seen to hold it. Else the holder may run in another container or
    on another machine, where numbers mean other processes, or the system does not tell.
    """

    pid: int | None
    confirmed: bool


# The locks of this process, for children that are forked and execute nothing else.
_held: Final[set[int]] = set()


def _let_go() -> None:
    """Close a forked child's copies: a lock lives as long as any copy is open, also beyond the process that took it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold ``home``, which exists, for this process.

    Waits for at most LOCK_PATIENCE_S. Raises HomeLockedError, which names the holder as far as it is certain; StoreError.
    """
    path = HomeLayout(home).lock
    with os_errors(f"open the lock {path}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(descriptor)
    try:
        with os_errors(f"lock {path}"):
            if not _take(descriptor):
                raise _locked(home, _holder(descriptor))
        with suppress(OSError):  # a full disk has no room for the name; the lock holds without it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except BaseException:
        _held.discard(descriptor)
        os.close(descriptor)
        raise
    try:
        yield
    finally:
        if descriptor in _held:  # not in a forked child
            _held.remove(descriptor)
            # The file stays: were it removed, two processes could each hold the lock of "the" file.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def find_holder(home: Path) -> Holder | None:
    """Return who holds ``home``, ``None`` where nobody does. Changes nothing. Raises StoreError."""
    path = HomeLayout(home).lock
    with os_errors(f"look at the lock {path}"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # Shared, and for an instant: whoever starts meanwhile waits for longer than that.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(descriptor)
        finally:
            os.close(descriptor)
    return None


def _take(descriptor: int) -> bool:
    """Take the lock, and return whether it came free within LOCK_PATIENCE_S. Raises OSError."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True


def _holder(descriptor: int) -> Holder:
    text = os.pread(descriptor, _PID_BYTES, 0).strip()
    if not text.isdigit():
        return Holder(None, confirmed=False)
    return Holder(int(text), _holds(int(text), descriptor))


def _holds(pid: int, descriptor: int) -> bool:
    """Return whether the process ``pid`` of this machine has locked the file of ``descriptor``, as far as it can be seen.

    The number alone proves nothing: it may be of another container's process, even equal to our own, or of one that has ended.
    """
    ours = os.fstat(descriptor)
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # no such process, not ours to look at, or a system without /proc
        return False
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), ours):
                with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as info:
                    if any(line.startswith("lock:") and "FLOCK" in line for line in info):
                        return True
    return False


def _locked(home: Path, holder: Holder) -> HomeLockedError:
    if holder.confirmed:
        return HomeLockedError(
            f"process {holder.pid} uses the home {home}",
            advice=f"Use the node that runs (`p2pkv status`), end it with `kill {holder.pid}`, or choose another home with "
            "--home or P2PKV_HOME.",
        )
    hint = "" if holder.pid is None else f"; its lock file says {holder.pid}, which no process of this machine confirms"
    return HomeLockedError(
        f"another process uses the home {home}{hint}",
        advice="It may run in another container or on another machine: end it there, or choose another home with --home or "
        "P2PKV_HOME.",
    )
