from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pkv.errors import HomeLockedError, StoreError
from p2pkv.limits import MAX_SOCKET_PATH_BYTES
from p2pkv.store.home import Holder, HomeLayout, default_home, find_holder, lock_home
from p2pkv.store.store import open_store

HOLDER = """
import sys
from pathlib import Path
from p2pkv.store.store import open_store
with open_store(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


# The parent holds the home; the child, forked and nothing else, outlives it until its stdin ends.
PARENT = """
import os, sys
from pathlib import Path
from p2pkv.store.store import open_store
with open_store(Path(sys.argv[1])):
    if os.fork():
        print("open", flush=True)
    sys.stdin.read()
"""

# The child leaves the block, as one that fails does, and the parent stays.
LEAVING = """
import os, sys
from pathlib import Path
from p2pkv.store.home import lock_home
with lock_home(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print("open" if os.waitpid(child, 0)[1] == 0 else "it failed", flush=True)
        sys.stdin.read()
"""

LOOKER = """
import sys
from pathlib import Path
from p2pkv.store.home import find_holder
print("open", flush=True)
while True:
    find_holder(Path(sys.argv[1]))
"""

OPENER = """
import sys
from pathlib import Path
from p2pkv.errors import HomeLockedError
from p2pkv.store.store import open_store
try:
    with open_store(Path(sys.argv[1])):
        print("open")
except HomeLockedError as error:
    print(error.message)
"""

# What Linux's pid namespaces are for: a container, in which numbers mean other processes.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def require_containers() -> None:
    if shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make pid namespaces here")


@contextmanager
def holder(home: Path, *, code: str = HOLDER, wrap: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run another process that has ``home`` open, until it is told to end or killed."""
    command = [*wrap, sys.executable, "-c", code, str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
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
        assert f"kill {process.pid}" in caught.value.advice
        assert "P2PKV_HOME" in caught.value.advice
        assert find_holder(tmp_path) == Holder(process.pid, confirmed=True)


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
        assert HomeLayout(tmp_path).lock.read_text() == f"{process.pid}\n"
        assert find_holder(tmp_path) is None
        with open_store(tmp_path):
            pass


def test_a_holder_that_is_just_being_killed_is_waited_for(tmp_path: Path) -> None:
    for _ in range(10):
        with holder(tmp_path) as process:
            process.kill()  # and nobody waits for its end
            with open_store(tmp_path):
                pass


def test_a_forked_child_does_not_keep_the_home_of_its_parent(tmp_path: Path) -> None:
    with holder(tmp_path, code=PARENT) as parent:
        assert find_holder(tmp_path) == Holder(parent.pid, confirmed=True)
        parent.kill()
        parent.wait(timeout=20)
        with open_store(tmp_path):
            pass


def test_a_forked_child_that_leaves_takes_nothing_away(tmp_path: Path) -> None:
    with holder(tmp_path, code=LEAVING) as parent:
        assert find_holder(tmp_path) == Holder(parent.pid, confirmed=True)


def test_looking_who_holds_the_home_keeps_nobody_from_it(tmp_path: Path) -> None:
    with lock_home(tmp_path):
        pass
    with holder(tmp_path, code=LOOKER):
        for _ in range(300):
            with lock_home(tmp_path):
                pass


@pytest.mark.parametrize("pid", ["living", "own", "nobody's"])
def test_a_number_that_is_not_the_holders_is_never_said_to_hold_it(tmp_path: Path, pid: str) -> None:
    """As after a recycled pid: the number in the file is that of somebody else."""
    with holder(tmp_path), holder(tmp_path / "other") as bystander:
        number = {"living": bystander.pid, "own": os.getpid(), "nobody's": 2**22 + 1}[pid]
        HomeLayout(tmp_path).lock.write_text(f"{number}\n")
        assert find_holder(tmp_path) == Holder(number, confirmed=False)
        with pytest.raises(HomeLockedError, match=f"^another process uses the home {tmp_path}; its lock file says {number}, "):
            open_store(tmp_path).__enter__()


def test_a_holder_in_another_container_is_not_taken_for_a_process_of_this_one(tmp_path: Path) -> None:
    require_containers()
    with holder(tmp_path, wrap=CONTAINER):
        assert HomeLayout(tmp_path).lock.read_text() == "1\n"
        assert find_holder(tmp_path) == Holder(1, confirmed=False)
        # The second one is process 1 too, and has the lock file open: it must not take itself for the holder.
        command = [*CONTAINER, sys.executable, "-c", OPENER, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout.startswith(f"another process uses the home {tmp_path}; its lock file says 1, ")


def test_the_home_can_be_held_where_nothing_can_be_written(tmp_path: Path) -> None:
    """As on a full disk: only the holder's name is missing then."""
    code = (
        "import resource; from pathlib import Path; from p2pkv.store.home import find_holder, lock_home; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); home = Path({str(tmp_path)!r})\n"
        "with lock_home(home): print(find_holder(home))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{Holder(None, confirmed=False)}\n"
    assert find_holder(tmp_path) is None


def test_the_lock_holds_within_one_process_and_ends_with_its_block(tmp_path: Path) -> None:
    with lock_home(tmp_path), pytest.raises(HomeLockedError, match=f"process {os.getpid()} "), lock_home(tmp_path):
        pass
    with lock_home(tmp_path):
        pass


def test_a_lock_file_without_a_pid_still_names_the_home(tmp_path: Path) -> None:
    with lock_home(tmp_path):
        HomeLayout(tmp_path).lock.write_text("")
        with pytest.raises(HomeLockedError, match=rf"another process uses the home {tmp_path} \["), lock_home(tmp_path):
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
