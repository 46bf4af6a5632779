"""``doctor`` against a scripted control API, and against real daemons."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.processes import environment, node_process
from p2pkv.store.home import HomeLayout
from tests.cli.conftest import Cli
from tests.cli.daemon import STATUS, FakeDaemon
from tests.support.artifacts import PUBLISHER

FINDINGS = [
    *("home", "keys", "trust", "revocations", "lock", "index", "packs", "disk", "file system", "clock", "open files"),
    *("daemon", "version", "ports", "reachability", "DHT", "announcements"),
]


def findings(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    assert [finding["name"] for finding in document["findings"]] == FINDINGS
    return {finding["name"]: finding for finding in document["findings"]}


def test_without_a_problem_it_exits_with_0_and_says_what_to_do_about_the_rest(cli: Cli, home: Path) -> None:
    cli("keygen")
    ran = cli("doctor")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert "ok         keys: a publisher's key, readable by you alone" in lines
    trust = next(number for number, line in enumerate(lines) if line.startswith("warning    trust: nobody"))
    assert lines[trust + 1].startswith("           -> Run `p2pkv trust add did:key:")
    assert "not known  version, ports, reachability, DHT, announcements: only a running node can tell" in lines
    assert lines[-1].startswith("0 problems, ")
    document = cli("doctor", "--json").document
    assert (document["ok"], document["home"]) == (True, str(home))
    assert findings(document)["daemon"]["state"] == "warning"


def test_a_problem_decides_the_exit_status(cli: Cli, home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    ran = cli("doctor")
    assert (ran.status, ran.err) == (4, "")
    assert f"problem    home: other users of this machine may change {home}" in ran.out.splitlines()
    assert ran.out.splitlines()[-1].startswith("1 problem, ")
    told = cli("doctor", "--json")
    assert (told.status, told.document["ok"]) == (4, False)


def test_what_the_node_tells_is_judged(cli: Cli, daemon: FakeDaemon) -> None:
    found = findings(cli("doctor", "--json").document)
    assert {name: found[name]["state"] for name in ("daemon", "version", "ports", "DHT", "announcements")} == {
        "daemon": "ok",
        "version": "ok",
        "ports": "warning",
        "DHT": "ok",
        "announcements": "ok",
    }
    assert "the node may have 65,536 open" in found["open files"]["found"]
    daemon.answers["GET", "/v1/status"] = 200, STATUS | {"announcing": {"keys": 9, "announced": 1, "late_s": 900.0}}
    assert findings(cli("doctor", "--json").document)["announcements"]["state"] == "warning"


def test_a_node_of_another_version_tells_less_and_breaks_nothing(cli: Cli, daemon: FakeDaemon) -> None:
    old = {name: value for name, value in STATUS.items() if name != "condition"} | {"version": "0.0.1", "dht_peers": 7}
    daemon.answers["GET", "/v1/status"] = 200, old
    ran = cli("doctor", "--json")
    found = findings(ran.document)
    assert ran.status == 0
    assert found["version"]["state"] == "warning"
    assert {found[name]["state"] for name in ("ports", "reachability", "DHT")} == {"not known"}
    assert "another version" in found["ports"]["found"]
    daemon.answers["GET", "/v1/status"] = 200, STATUS | {"dht_peers": 7}
    assert findings(cli("doctor", "--json").document)["DHT"]["state"] == "not known"


# httpcore leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_socket_of_a_dead_daemon_is_no_problem(cli: Cli, home: Path) -> None:
    home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(HomeLayout(home).secure_control_socket()))
    ran = cli("doctor", "--json")
    assert (ran.status, findings(ran.document)["daemon"]["state"]) == (0, "warning")
    gc.collect()


# Runs once as root, so that all code is loaded, which may lie where only root reads; and then as nobody.
STRANGER = """
import contextlib, io, os, sys
from p2pkv.cli.app import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["doctor", "--json", "--home", sys.argv[1]])
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
main(["doctor", "--json", "--home", sys.argv[1]])
"""


def test_a_stranger_sees_nothing_and_is_told_nothing_that_is_wrong() -> None:
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home = Path(folder) / "home"
        HomeLayout(home).create()
        command = [sys.executable, "-c", STRANGER, str(home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (4, "")
    found = findings(json.loads(done.stdout))
    names = ("home", "keys", "trust", "lock", "index", "packs", "daemon")
    assert {name: found[name]["state"] for name in names} == dict.fromkeys(names, "problem")
    assert found["home"]["advice"].startswith("Run p2pkv as its owner")


# --- real daemons ------------------------------------------------------------------------------------------------------


def doctor(home: Path) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, "-m", "p2pkv.cli.app", "doctor", "--json"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, findings(json.loads(done.stdout))


@pytest.mark.slow
def test_a_node_that_is_well_one_that_is_stopped_and_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    with node_process(tmp_path / "other") as other, node_process(tmp_path / "home", bootstrap=[other.address]) as node:
        trust = [sys.executable, "-m", "p2pkv.cli.app", "trust", "add", PUBLISHER]
        subprocess.run(trust, env=environment(node.home), capture_output=True, check=True, timeout=60)
        status, found = doctor(node.home)
        assert status == 0
        assert found["lock"]["found"] == f"held by process {node.process.pid}"
        for name in ("home", "keys", "trust", "lock", "index", "packs", "daemon", "version", "DHT", "announcements"):
            assert found[name]["state"] == "ok", found[name]
        assert "1 of 1 bootstrap peer" in found["DHT"]["found"]
        assert node.address.partition("/p2p/")[0] in found["ports"]["found"]
        assert {found[name]["state"] for name in ("ports", "reachability")} == {"warning"}, "it listens on loopback alone"

        node.process.send_signal(signal.SIGSTOP)
        try:
            status, found = doctor(node.home)
        finally:
            node.process.send_signal(signal.SIGCONT)
        assert status == 4
        assert found["daemon"]["state"] == "problem"
        assert f"kill {node.process.pid}" in found["daemon"]["advice"]

        node.kill()
        node.process.wait(20)
        status, found = doctor(node.home)
        assert status == 0
        assert found["lock"]["found"] == "free: no node has this home"
        assert found["daemon"]["state"] == "warning"
        assert found["index"]["state"] == "ok"


@pytest.mark.slow
def test_a_node_whose_bootstrap_peer_is_away_has_a_problem(tmp_path: Path) -> None:
    with node_process(tmp_path / "other") as other:
        pass
    with node_process(tmp_path / "home", bootstrap=[other.address]) as node:
        status, found = doctor(node.home)
        assert (status, found["DHT"]["state"]) == (4, "problem")
        assert "0 of 1 bootstrap peer" in found["DHT"]["found"]


@pytest.mark.slow
def test_killed_and_started_at_once_again_and_again(tmp_path: Path) -> None:
    """Nobody waits for the end of the killed one."""
    home = tmp_path / "home"
    pids: set[int] = set()
    for _ in range(3):
        with node_process(home) as node:
            assert HomeLayout(home).lock.read_text() == f"{node.process.pid}\n"
            pids.add(node.process.pid)
            os.kill(node.process.pid, signal.SIGKILL)
    assert len(pids) == 3
