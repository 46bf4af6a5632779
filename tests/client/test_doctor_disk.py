"""What the doctor says of the disk under the home, and of its file system."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pkv.client.doctor import home as home_checks
from p2pkv.client.doctor.finding import State
from p2pkv.units import GIB, MIB


def disk(free: int, *, total: int = 100 * GIB, files: int = 1000, of_files: int = 10_000) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=total, f_files=of_files, f_favail=files)


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (disk(50 * GIB), State.OK),
        (disk(GIB - 1), State.WARNING),
        (disk(60 * MIB, total=GIB), State.OK),  # a small disk has a small reserve
        (disk(50 * MIB, total=GIB), State.WARNING),
        (disk(31 * MIB), State.PROBLEM),
        (disk(50 * GIB, files=100), State.PROBLEM),
        (disk(50 * GIB, files=0, of_files=0), State.OK),  # inodes are made as they are needed
    ],
)
def test_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, state: State) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert home_checks.check_disk(tmp_path / "not" / "there").state is state


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 0:25 / /data rw shared:1 master:2 - xfs /dev/vdb rw
29 28 0:26 / /data/my\\040share rw - nfs4 server:/x rw
30 27 0:27 / /ram rw - tmpfs tmpfs rw
31 27 0:28 / /box rw - ext4 /dev/vdc rw
32 27 0:29 / /box rw - overlay overlay rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind", "state"),
    [
        ("/somewhere", "ext4", State.OK),
        ("/data/home", "xfs", State.OK),
        ("/database", "ext4", State.OK),
        ("/data/my share/home", "nfs4", State.WARNING),
        ("/ram", "tmpfs", State.WARNING),
        ("/box/a", "overlay", State.WARNING),
    ],
)
def test_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, state: State) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert home_checks.file_system_of(Path(path), mounts) == kind
    monkeypatch.setattr(home_checks, "_existing", lambda _: Path(path))
    assert home_checks.check_file_system(Path(path), mounts).state is state


def test_a_system_without_a_list_of_mounts(tmp_path: Path) -> None:
    assert home_checks.check_file_system(tmp_path, tmp_path / "nothing").state is State.UNKNOWN
