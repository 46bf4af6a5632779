from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pkv.errors import HomeLockedError, StoreError
from p2pkv.limits import MAX_SOCKET_PATH_BYTES
from p2pkv.store.home import HomeLayout, default_home, lock_home
from p2pkv.store.store import open_store

HOLDER = """
import sys
from pathlib import Path
from p2pkv.store.store import open_store
with open_store(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run another process that has ``home`` open, until it is told to end or killed."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            yield process
        finally:
            process.kill()


def test_the_home_is_the_environments_or_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("P2PKV_HOME", str(tmp_path / "chosen"))
    assert default_home() == tmp_path / "chosen"
    monkeypatch.setenv("P2PKV_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home().name == "p2pkv"
    assert default_home().is_relative_to(tmp_path)


def test_a_second_process_is_told_who_holds_the_home(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(HomeLockedError, match=f"process {process.pid} uses") as caught, open_store(tmp_path):
            pass
        assert "P2PKV_HOME" in caught.value.advice


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
        assert HomeLayout(tmp_path).lock.read_text() == f"{process.pid}\n"
        with open_store(tmp_path):
            pass


def test_the_lock_holds_within_one_process_and_ends_with_its_block(tmp_path: Path) -> None:
    with lock_home(tmp_path), pytest.raises(HomeLockedError, match=f"process {os.getpid()} "), lock_home(tmp_path):
        pass
    with lock_home(tmp_path):
        pass


def test_a_lock_file_without_a_pid_still_names_the_home(tmp_path: Path) -> None:
    with lock_home(tmp_path):
        HomeLayout(tmp_path).lock.write_text("")
        with pytest.raises(HomeLockedError, match=f"another process uses the home {tmp_path}"), lock_home(tmp_path):
            pass


def test_folders_are_private(tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path / "new" / "home")
    layout.create()
    for folder in (layout.home, layout.blocks, layout.staging, layout.keys):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_home_that_is_a_file_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the home"):
        HomeLayout(tmp_path / "file").create()


def test_the_control_socket_lies_in_the_home_where_it_fits(tmp_path: Path) -> None:
    home = Path("/h" * 10)
    assert HomeLayout(home).control_socket == home / "control.sock"
    assert HomeLayout(home).secure_control_socket() == home / "control.sock"


@pytest.fixture
def short_temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_long_home_gets_a_short_private_socket(short_temp: Path) -> None:
    layout = HomeLayout(Path("/" + "h" * 200))
    path = layout.secure_control_socket()
    assert path == layout.secure_control_socket() != HomeLayout(Path("/" + "i" * 200)).control_socket
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("attack", ["open folder", "link", "file"])
def test_a_socket_folder_that_others_made_is_refused(short_temp: Path, attack: str) -> None:
    layout = HomeLayout(Path("/" + "h" * 200))
    folder = layout.control_socket.parent
    if attack == "open folder":
        folder.mkdir()
        folder.chmod(0o755)
    elif attack == "link":
        (short_temp / "target").mkdir(mode=0o700)
        folder.symlink_to(short_temp / "target")
    else:
        folder.write_text("")
    with pytest.raises(StoreError):
        layout.secure_control_socket()
