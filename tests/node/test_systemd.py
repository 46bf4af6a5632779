"""The systemd units fit the command that they start: its options, its exit statuses, its home and the time it takes to end."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from p2pkv.errors import EXIT_STATUS, Fault
from p2pkv.limits import MAX_CONNECTIONS, SHUTDOWN_GRACE_S
from tests.support.node_command import node_command

FOLDER = Path(__file__).parents[2] / "contrib" / "systemd"
SYSTEM, USER = FOLDER / "p2pkv-node.service", FOLDER / "user" / "p2pkv-node.service"
UNITS = pytest.mark.parametrize("unit", [SYSTEM, USER], ids=["system", "user"])
HOME = "/var/lib/p2pkv"


def service(unit: Path) -> dict[str, str]:
    parser = RawConfigParser(delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # systemd's names have capitals
    parser.read_string(unit.read_text())
    return dict(parser["Service"])


@UNITS
def test_the_command_line_is_one_that_the_node_takes(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *options = shlex.split(service(unit)["ExecStart"])
    assert Path(program).name == "p2pkv-node"
    home = tmp_path / "home"
    monkeypatch.setenv("P2PKV_HOME", str(home))
    options = [str(home) if option == HOME else option for option in options]
    done = node_command(*options, "config", "check")
    assert done.status == 0, done.stderr
    assert str(home) in done.stdout


@UNITS
def test_it_ends_and_restarts_as_the_node_promises(unit: Path) -> None:
    settings = service(unit)
    assert settings["Type"] == "exec"  # the node sends no notification
    assert 2 * SHUTDOWN_GRACE_S <= float(settings["TimeoutStopSec"]) <= 5 * SHUTDOWN_GRACE_S
    # Every process of the group would get the signal otherwise, the receivers of a transfer too.
    assert settings["KillMode"] == "mixed"
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == str(EXIT_STATUS[Fault.LOCAL])
    assert int(settings["LimitNOFILE"]) > 16 * MAX_CONNECTIONS


def test_the_service_of_the_machine_may_write_its_home_and_nothing_else() -> None:
    settings = service(SYSTEM)
    assert settings["ProtectSystem"] == "strict"
    assert f"/var/lib/{settings['StateDirectory']}" == HOME
    assert f"--home {HOME}" in settings["ExecStart"]
    assert settings["StateDirectoryMode"] == "0700"
    assert settings["User"] == "p2pkv"


@UNITS
def test_sockets_of_every_kind_that_the_node_opens_are_allowed(unit: Path) -> None:
    # AF_NETLINK: which addresses the machine has is asked there.
    assert set(service(unit)["RestrictAddressFamilies"].split()) == {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}


@UNITS
def test_systemd_finds_no_fault(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    # It looks for the program, which is not installed where tests run; any other one does.
    stand_in = shutil.which("true")
    assert stand_in is not None
    text, changed = re.subn(r"^ExecStart=\S+", f"ExecStart={stand_in}", unit.read_text(), flags=re.MULTILINE)
    assert changed == 1
    copy = tmp_path / unit.name
    copy.write_text(text)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a user's units are looked up there as well
    scope = "--user" if unit == USER else "--system"
    command = [analyze, "verify", scope, "--man=no", "--recursive-errors=no", str(copy)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=30, check=False)
    assert (done.returncode, copy.name in done.stderr) == (0, False), done.stderr
