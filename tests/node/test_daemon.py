"""The daemon as a process: it says when it is ready, ends within two seconds, and one home has one daemon."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.processes import NodeProcess, node_process
from p2pkv.client import calls
from p2pkv.client.sync import Client
from p2pkv.errors import EXIT_STATUS, DaemonUnreachableError, Fault
from p2pkv.formats.cid import Cid
from p2pkv.limits import SHUTDOWN_GRACE_S
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import open_store
from tests.support.artifacts import make_sample
from tests.support.index import open_index

pytestmark = pytest.mark.slow

PATIENCE_S = 30


def daemon_that_fails(home: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run a daemon that cannot start; return its exit status and the error that it prints."""
    command = [sys.executable, "-m", "p2pkv_node", "--home", str(home), "--json", *options]
    done = subprocess.run(command, text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == ""
    error: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])["error"]
    return done.returncode, error


def end(node: NodeProcess, number: int = signal.SIGTERM) -> float:
    """Send a signal; return the seconds until the process is gone."""
    started = time.perf_counter()
    node.process.send_signal(number)
    node.process.wait(PATIENCE_S)
    return time.perf_counter() - started


@contextmanager
def waiting_fetch(home: Path) -> Iterator[None]:
    """A program that waits for a fetch and will not let go."""
    body = {"manifest": str(Cid.of_node(b"nobody")), "patience_s": 60}
    transport = httpx.HTTPTransport(uds=str(HomeLayout(home).control_socket))
    with (
        httpx.Client(transport=transport, base_url=calls.BASE_URL, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/fetch", json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield
        with suppress(httpx.RemoteProtocolError):  # cut off by the end of the daemon
            list(lines)


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """Also while a program is connected and idle, and while another waits for a fetch."""
    home = tmp_path / "home"
    with node_process(home) as node:
        assert node.address.endswith(f"/p2p/{node.peer_id}")
        socket = HomeLayout(home).control_socket
        assert stat.S_ISSOCK(socket.stat().st_mode)
        assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0
        with Client(home) as client:
            status = client.status()
            assert (status["peer_id"], status["addresses"]) == (node.peer_id, [node.address])
            with waiting_fetch(home):
                assert end(node) < SHUTDOWN_GRACE_S
        assert node.process.returncode == 0
        assert not socket.exists()
        with pytest.raises(DaemonUnreachableError):
            client.status()


def test_interrupts_end_it_as_well_and_a_client_may_too(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with node_process(home) as node:
        assert end(node, signal.SIGINT) < SHUTDOWN_GRACE_S
        assert node.process.returncode == 0
    with node_process(home) as node:
        with Client(home) as client:
            client.shutdown()
        node.process.wait(PATIENCE_S)
        assert node.process.returncode == 0


def test_a_second_daemon_on_the_same_home_and_a_taken_port(tmp_path: Path) -> None:
    with node_process(tmp_path / "home") as node:
        status, error = daemon_that_fails(tmp_path / "home")
        assert status == EXIT_STATUS[Fault.ENVIRONMENT] == 4
        assert error["code"] == "home.locked"
        assert f"process {node.process.pid} " in error["message"]
        with Client(tmp_path / "home") as client:
            assert client.status()["peer_id"] == node.peer_id  # the first one keeps its socket
        port = node.address.partition("/p2p/")[0]
        status, error = daemon_that_fails(tmp_path / "other", "--listen", port)
        assert status == EXIT_STATUS[Fault.ENVIRONMENT]
        assert error["code"] == "node.listen"
        assert "taken" in error["message"]
        assert "port 0" in error["advice"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--bootstrap", "/ip4/127.0.0.1/tcp/1"], "usage"),
        (["--bootstrap", "nonsense/p2p/nobody"], "usage"),
        (["--log-level", "loud"], "usage"),
        (["--listen", "nonsense"], "usage"),
    ],
    ids=str,
)
def test_settings_that_are_not_possible(tmp_path: Path, options: list[str], code: str) -> None:
    listen = [] if "--listen" in options else ["--listen", "/ip4/127.0.0.1/tcp/0"]
    status, error = daemon_that_fails(tmp_path / "home", *listen, *options)
    assert (status, error["code"]) == (EXIT_STATUS[Fault.LOCAL], code)


def test_killed_and_started_again_it_keeps_its_name_and_announces_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    sample = make_sample(range(600))
    with open_store(home) as store:
        for cid, data in sample.blocks.items():
            store.write(cid, data)
        store.index.add_artifact(sample.artifact, range(3))
    names: list[str] = []
    with node_process(tmp_path / "other") as other:
        for _ in range(2):
            with node_process(home, bootstrap=[other.address]) as node, Client(home) as client:
                names.append(node.peer_id)
                wait_announced(client)
                assert client.status()["announcing"]["keys"] == 4
                node.kill()
                node.process.wait(PATIENCE_S)
                assert HomeLayout(home).control_socket.exists()  # a kill leaves it, and the next start takes it away
    assert names[0] == names[1]
    with open_index(HomeLayout(home).index) as index:
        assert index.counts() == (1, 1)


def wait_announced(client: Client) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        announcing = client.status()["announcing"]
        if announcing["announced"] == announcing["keys"]:
            return
        time.sleep(0.02)
    pytest.fail("nothing was announced")
