"""Real p2pkv-node processes for demos, benches and tests: started, awaited until ready, and ended by their own id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from p2pkv.client.sync import Client

# Start-up imports libp2p, which takes seconds on a busy machine.
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
ANNOUNCE_TIMEOUT_S = 120.0
NODE = ("-m", "p2pkv_node")
_LOG = "node.log"


@dataclass(frozen=True)
class NodeProcess:
    """A running node. ``address`` is what others bootstrap from, ``web`` the URL of its status page, where it has one."""

    home: Path
    process: subprocess.Popen[str]
    peer_id: str
    address: str
    web: str | None = None

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        self.process.kill()


@contextmanager
def node_process(
    home: Path, *, bootstrap: Sequence[str] = (), module: Sequence[str] = NODE, options: Sequence[str] = ()
) -> Iterator[NodeProcess]:
    """Run a node on loopback until the end of the block; its log goes to ``node.log`` in ``home``.

    Raises RuntimeError with the end of the log when it does not come up.
    """
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *module, "--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", "--json", *options]
    for address in bootstrap:
        command += ["--bootstrap", address]
    with (home / _LOG).open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = _first_line(process)
        if not line:
            raise RuntimeError(f"the node on {home} did not start:\n{end_of_log(home)}")
        ready = json.loads(line)
        yield NodeProcess(home, process, ready["peer_id"], ready["addresses"][0], ready.get("web"))
    finally:
        _stop(process)


@contextmanager
def node_processes(
    homes: Sequence[Path], *, bootstrap: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[list[NodeProcess]]:
    """Run several nodes, each as :func:`node_process` does."""
    with ExitStack() as stack:
        yield [stack.enter_context(node_process(home, bootstrap=bootstrap, options=options)) for home in homes]


def end_of_log(home: Path) -> str:
    """Return the last lines of what the node on ``home`` has logged."""
    return (home / _LOG).read_text()[-4000:]


def _first_line(process: subprocess.Popen[str]) -> str:
    """Return the ready line; empty when the process ends or stays silent for READY_TIMEOUT_S."""
    assert process.stdout is not None, "the process was started with a pipe"
    silent = threading.Timer(READY_TIMEOUT_S, process.kill)
    silent.start()
    try:
        return process.stdout.readline()
    finally:
        silent.cancel()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a command that talks to the node on ``home``."""
    return {**os.environ, "P2PKV_HOME": str(home)}


def wait_announced(node: NodeProcess) -> None:
    """Wait until the node has announced everything once: announcements are paced under the receivers' limits.

    Raises RuntimeError after ANNOUNCE_TIMEOUT_S.
    """
    deadline = time.monotonic() + ANNOUNCE_TIMEOUT_S
    with Client(node.home) as client:
        while time.monotonic() < deadline:
            announcing = client.status()["announcing"]
            if announcing["announced"] == announcing["keys"]:
                return
            time.sleep(0.2)
    raise RuntimeError(f"the node on {node.home} could not announce within {ANNOUNCE_TIMEOUT_S:.0f} s")
