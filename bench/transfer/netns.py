"""A network of this process's own: loopback and nothing else, so that nobody's packets are counted or disturbed."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

# linux/sched.h, linux/sockios.h, linux/if.h
_CLONE_NEWUSER: Final = 0x1000_0000
_CLONE_NEWNET: Final = 0x4000_0000
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 0x1
_IFREQ: Final = struct.Struct("16sH22x")


def isolate() -> bool:
    """Move this process, and those it starts from now on, into a new network namespace with loopback up.

    Call it before there are threads. Returns ``False`` where the system does not let it; then nothing has changed.
    """
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "unshare"):
        return False
    if libc.unshare(_CLONE_NEWNET) != 0:
        # Who is not root needs a user namespace as well, and stays who it is in there.
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", _IFF_UP))
    return True


def loopback_bytes() -> int:
    """Return how many bytes went through loopback since the namespace was made: packets with their headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("there is no loopback interface")
