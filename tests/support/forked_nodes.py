"""Real p2pkv-node processes without the seconds that importing takes: each is forked from one that has imported everything.

The command runs as ever, in a process of its own with its own children; only the interpreter's start is spared, so that a home
can be opened and killed every second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

READY_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0

_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["p2pkv_node.main", "httpx", "bench.artifacts"])


class ForkedNode:
    """A node that was told to start. ``process`` is its own; what it logs goes to ``node.log`` in ``home``."""

    def __init__(self, home: Path, process: ForkServerProcess, said: Connection) -> None:
        self.home = home
        self.process = process
        self.peer_id = ""
        self.address = ""
        self.web: str | None = None
        self._said = said
        self._started = time.perf_counter()

    def wait_ready(self) -> float:
        """Wait for the ready line, and return the seconds since the start. Raises RuntimeError with the end of the log."""
        line, more = b"", b""
        deadline = self._started + READY_TIMEOUT_S
        while not line.endswith(b"\n"):
            if self._said in wait([self._said, self.process.sentinel], max(deadline - time.perf_counter(), 0)):
                more = os.read(self._said.fileno(), 1 << 16)
            if not more:
                raise RuntimeError(f"the node on {self.home} did not start:\n{self._log_end()}")
            line, more = line + more, b""
        seconds = time.perf_counter() - self._started
        ready = json.loads(line)
        self.peer_id, self.address, self.web = ready["peer_id"], ready["addresses"][0], ready["web"]
        return seconds

    def _log_end(self) -> str:
        log = self.home / "node.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else "it has no log"

    def kill(self) -> None:
        """End it with SIGKILL and wait until it is gone."""
        self.process.kill()
        self._join()

    def stop(self, *, signals: int = 1, pause_s: float = 0.0) -> float:
        """Send so many SIGTERM, ``pause_s`` apart, and return the seconds until it is gone. Raises RuntimeError."""
        started = time.perf_counter()
        for number in range(signals):
            if number:
                time.sleep(pause_s)
            self.process.terminate()
        self._join()
        return time.perf_counter() - started

    def _join(self) -> None:
        self.process.join(STOP_TIMEOUT_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise RuntimeError(f"the node on {self.home} did not end within {STOP_TIMEOUT_S:.0f} s")
        self._said.close()


def start_node(home: Path, *, bootstrap: Sequence[str] = (), options: Sequence[str] = ()) -> ForkedNode:
    """Tell a node on loopback to start, and return at once."""
    home.mkdir(parents=True, exist_ok=True)
    arguments = ["--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", "--json", *options]
    for address in bootstrap:
        arguments += ["--bootstrap", address]
    said, stdout = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(arguments, str(home / "node.log"), stdout))
    process.start()
    stdout.close()
    return ForkedNode(home, process, said)


@contextmanager
def forked_node(home: Path, *, bootstrap: Sequence[str] = (), options: Sequence[str] = ()) -> Iterator[ForkedNode]:
    """Run a node until the end of the block; it is ready."""
    node = start_node(home, bootstrap=bootstrap, options=options)
    try:
        node.wait_ready()
        yield node
    finally:
        if node.process.exitcode is None:
            node.stop()


def _run(arguments: Sequence[str], log: str, stdout: Connection) -> None:
    from p2pkv_node.main import app  # what it loads is loaded where this is forked from

    os.dup2(stdout.fileno(), 1)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    app(arguments, prog_name="p2pkv-node")
