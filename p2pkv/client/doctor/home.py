"""Checks of the home: its folder, keys, disk, trust list, index and packs. They read and change nothing.

Each raises P2pkvError or OSError where it cannot look; :func:`p2pkv.client.doctor.examine.examine` makes a finding of it.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from p2pkv.client.doctor.finding import Finding, State
from p2pkv.client.doctor.machine import moment
from p2pkv.limits import FULL_DISK_BYTES, MIN_FREE_BYTES, MIN_FREE_INODES, MIN_FREE_SHARE, STATEMENTS_STALE_S
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.publisher_key import read_key_file
from p2pkv.store.secrets import read_node_key
from p2pkv.store.statement_files import StatementFiles
from p2pkv.store.survey import IndexSurvey, PackSurvey
from p2pkv.store.trust_file import TrustFile
from p2pkv.trust.rules import trusted_publishers
from p2pkv.units import format_bytes, plural

_NETWORK: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"}
    | {"glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3", "smbfs"}
)
_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_MOUNTS: Final = Path("/proc/self/mountinfo")


def check_home(home: Path) -> Finding:
    """Whether the folder is there, is its user's own, closed to others, and can be written."""
    name = "home"
    try:
        found = home.stat()
    except FileNotFoundError:
        advice = "`p2pkv-node` and `p2pkv keygen` make it. If you have one, name it with --home or P2PKV_HOME."
        return Finding(name, State.WARNING, f"{home} does not exist yet", advice)
    if not stat.S_ISDIR(found.st_mode):
        return Finding(name, State.PROBLEM, f"{home} is no folder", "Name another one with --home or P2PKV_HOME.")
    quoted = shlex.quote(str(home))
    if found.st_uid != os.geteuid():
        owner = user_name(found.st_uid)
        return Finding(
            name,
            State.PROBLEM if os.geteuid() else State.WARNING,  # root may, and would leave files that the owner may not change
            f"{home} belongs to {owner}, and this is {user_name(os.geteuid())}",
            f"Run p2pkv as its owner, for example with `sudo -u {owner} p2pkv doctor --home {quoted}`.",
        )
    if os.statvfs(home).f_flag & os.ST_RDONLY:
        advice = "Mount it for writing, or choose another home with P2PKV_HOME."
        return Finding(name, State.PROBLEM, f"{home} is on a file system that is mounted read-only", advice)
    closed = [folder for folder in (home, *_folders(home)) if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)]
    if closed:
        advice = f"Run `chmod -R u+rwX {quoted}`."
        return Finding(name, State.PROBLEM, f"{closed[0]} cannot be read and written by its owner", advice)
    others = stat.S_IMODE(found.st_mode) & 0o077
    if others:
        state = State.PROBLEM if others & 0o022 else State.WARNING
        may = "change" if others & 0o022 else "read"
        return Finding(name, state, f"other users of this machine may {may} {home}", f"Run `chmod 700 {quoted}`.")
    return Finding(name, State.OK, f"{home}, yours alone")


def _folders(home: Path) -> list[Path]:
    layout = HomeLayout(home)
    return [folder for folder in (layout.blocks, layout.staging, layout.keys) if folder.exists()]


def check_keys(home: Path) -> Finding:
    """Whether keys, namespaces and grants that are there can be read, by their owner alone. Raises as reading keys does."""
    layout = HomeLayout(home)
    found: list[str] = []
    for label, path, read in (
        ("the node's key", layout.node_key, read_node_key),
        ("a publisher's key", layout.publisher_key, read_key_file),
    ):
        if path.exists():
            read(path)
            found.append(label)
    exposed = next(filter(_open_to_others, _secret_paths(layout)), None)
    if exposed is not None:
        return Finding(
            "keys",
            State.PROBLEM,
            f"other users of this machine may look into {exposed}",
            f"Run `chmod -R go= {shlex.quote(str(exposed))}`; if others had access to this machine, make new keys.",
        )
    return Finding("keys", State.OK, f"{' and '.join(found)}, readable by you alone" if found else "none yet")


def _secret_paths(layout: HomeLayout) -> Iterator[Path]:
    """Yield the folders of secrets that are there, and what is in them."""
    for folder in (layout.keys, layout.namespaces, layout.grants, layout.issued_grants):
        if folder.is_dir():
            yield folder
            yield from sorted(folder.iterdir())


def _open_to_others(path: Path) -> bool:
    try:
        return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)
    except FileNotFoundError:
        return False  # taken away just now


def check_disk(home: Path) -> Finding:
    """Whether there is room for bytes and files where the home is, or would be."""
    name = "disk"
    found = os.statvfs(_existing(home))
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    counts_files = found.f_files > 0  # some file systems make inodes as they need them
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if counts_files:
        text += f", room for {plural(found.f_favail, 'file')}"
    advice = (
        "Free some room on that disk, for example with `p2pkv gc`, or move the home to a larger one. Transfers that wait "
        "for room go on by themselves."
    )
    if free < FULL_DISK_BYTES or (counts_files and found.f_favail < MIN_FREE_INODES):
        return Finding(name, State.PROBLEM, f"full: {text}", advice)
    if free < min(MIN_FREE_BYTES, MIN_FREE_SHARE * total):
        return Finding(name, State.WARNING, f"nearly full: {text}", advice)
    return Finding(name, State.OK, text)


def check_file_system(home: Path, mounts: Path = _MOUNTS) -> Finding:
    """Whether the file system keeps what it is given, and has locks that hold. ``mounts`` is like Linux's mountinfo."""
    name = "file system"
    kind = file_system_of(_existing(home).resolve(), mounts)
    if kind is None:
        advice = "The home belongs on a disk of this machine, not on a network file system."
        return Finding(name, State.UNKNOWN, "this system does not tell its kind", advice)
    if kind in _NETWORK:
        return Finding(
            name,
            State.WARNING,
            f"{kind}, a network file system: SQLite's log and the lock of the home may fail there",
            "Move the home to a disk of this machine, and set P2PKV_HOME.",
        )
    if kind in _MEMORY:
        advice = "Move the home to a disk, unless its blocks and keys may be lost."
        return Finding(name, State.WARNING, f"{kind}: all of it is gone when this machine restarts", advice)
    if kind == "overlay":
        advice = "Mount a volume there, unless its blocks and keys may be lost."
        return Finding(name, State.WARNING, "overlay: all of it is gone when this container is removed", advice)
    return Finding(name, State.OK, kind)


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the kind of file system of ``path``, absolute and without links; ``None`` where the system does not tell."""
    found: tuple[int, str] | None = None
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        front, _, back = line.partition(" - ")
        columns, kind = front.split(" "), back.split(" ")[0]
        if len(columns) < 5 or not kind:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), columns[4]))
        # Of two at one place, the later covers the earlier.
        if path.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), kind
    return found[1] if found else None


def check_trust(home: Path) -> Finding:
    """Whether anybody is trusted. Raises StoreError, UnknownVersionError."""
    trusted = trusted_publishers(TrustFile(HomeLayout(home).trust).rules())
    if not trusted:
        return Finding(
            "trust",
            State.WARNING,
            "nobody is trusted, so nothing that others published is used here",
            "Run `p2pkv trust add did:key:z6Mk...` for each publisher that you know; `p2pkv keygen` tells them their name.",
        )
    return Finding("trust", State.OK, plural(len(trusted), "trusted publisher"))


def check_revocations(home: Path, now: float) -> Finding:
    """Whether this home heard lately what trusted publishers take back; ``now`` is in seconds since the epoch.

    A publisher of whom no statement is known here may have made none: of that there is nothing to hear. Raises StoreError,
    UnknownVersionError.
    """
    trust = HomeTrust(HomeLayout(home))
    followed = trust.followed()
    last = {publisher: trust.records.heard(publisher) or 0.0 for publisher in followed if publisher in trust.records}
    stale = sorted((at, publisher) for publisher, at in last.items() if now - at > STATEMENTS_STALE_S)
    name = "revocations"
    if stale:
        at, publisher = stale[0]
        return Finding(
            name,
            State.WARNING,
            f"not heard since {moment(at)} what {publisher} takes back{_and_more(len(stale) - 1)}",
            "Let the node run where it reaches others. Without a network, ask the publisher for the file of its list, and run "
            "`p2pkv trust hear FILE`.",
        )
    if not last:
        return Finding(name, State.OK, "no trusted publisher took anything back, as far as is known here")
    return Finding(name, State.OK, f"heard within the last day, of {plural(len(last), 'trusted publisher')}")


def times_signed(home: Path) -> list[int]:
    """Return when each publisher that said something of itself said the last of it. Raises StoreError, UnknownVersionError."""
    records = StatementFiles(HomeLayout(home).statements).values()
    return [record.signed for record in records if record.signed is not None]


def check_index(index: IndexSurvey | None, packs: PackSurvey | None, aside: Sequence[Path]) -> Finding:
    """``packs`` are ``None`` where they cannot be looked at; ``aside`` are the damaged indexes that the node moved away."""
    name = "index"
    if index is None:
        if packs is not None and packs.blocks:
            advice = "Start the node: it lists anew what the packs hold."
            return Finding(name, State.WARNING, f"missing, although there are {plural(packs.blocks, 'block')}", advice)
        return Finding(name, State.OK, "none yet")
    text = f"{plural(index.artifacts, 'artifact')}, {index.complete} of them complete"
    if aside:
        return Finding(
            name,
            State.WARNING,
            f"{text}; it was made anew, and the damaged one is {aside[-1].name}{_and_more(len(aside) - 1)}",
            f"Check `p2pkv pins`, and the disk. Then remove the files {shlex.quote(str(aside[-1]))}* and the like.",
        )
    return Finding(name, State.OK, text)


def check_packs(packs: PackSurvey, damaged: int | None) -> Finding:
    """``damaged`` blocks were found by the running node since its start, ``None`` where none runs."""
    text = f"{plural(packs.blocks, 'block')} in {plural(packs.packs, 'pack')}, {format_bytes(packs.bytes)}"
    if packs.unreadable:
        return Finding(
            "packs",
            State.PROBLEM,
            f"{packs.unreadable[0]} cannot be read as a pack{_and_more(len(packs.unreadable) - 1)}; {text} besides",
            "Stop the node and move such files out of blocks/: what was in them is fetched again. Then check the disk.",
        )
    if damaged:
        advice = (
            "They are fetched again when they are wanted. If this repeats, check the disk, for example with `smartctl -a`."
        )
        return Finding(
            "packs", State.WARNING, f"{plural(damaged, 'damaged block')} found since the node started; {text}", advice
        )
    return Finding("packs", State.OK, text)


def user_name(number: int) -> str:
    """Return the name of a user id, else the number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _existing(path: Path) -> Path:
    """Return ``path``, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
