"""The cases of other systems: their peer programs as processes, driven over pipes (``peers.talk``)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench.settle import settle
from bench.transfer.measure import Measurement, Meter
from bench.transfer.peers.talk import file_digest

_ANSWER_TIMEOUT_S: Final = 120.0
_STOP_TIMEOUT_S: Final = 5.0
_PEERS: Final = "bench.transfer.peers"


class PeerProcess:
    """A running peer program; ``ready`` is the first thing it said. Raises RuntimeError when it fails or falls silent."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        self._name = f"{module} {arguments[0]}"
        command = [sys.executable, "-m", f"{_PEERS}.{module}", *arguments]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
            )
        assert self._process.stdin is not None, "it was started with pipes"
        assert self._process.stdout is not None, "it was started with pipes"
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            self.ready = self._answer()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, word: str) -> dict[str, Any]:
        """Say ``word`` and return the answer."""
        self._input.write(word + "\n")
        self._input.flush()
        return self._answer()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._input.close()

    def _answer(self) -> dict[str, Any]:
        silent = threading.Timer(_ANSWER_TIMEOUT_S, self._process.kill)
        silent.start()
        try:
            line = self._output.readline()
        finally:
            silent.cancel()
        if not line:
            raise RuntimeError(f"{self._name} gave no answer:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def peer_process(module: str, arguments: Sequence[str], log: Path) -> Iterator[PeerProcess]:
    """Run ``bench.transfer.peers.<module>`` until the end of the block."""
    process = PeerProcess(module, arguments, log)
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def open_peers(folder: Path, seeders: int, data: Path, *, module: str, isolated: bool) -> Iterator[Callable[[], Measurement]]:
    """Run the seeders of the file ``data`` and yield what measures one transfer to a fresh receiver."""
    size, expected = data.stat().st_size, file_digest(data)
    folder.mkdir()
    with ExitStack() as stack:
        seeding = [
            stack.enter_context(peer_process(module, ["seed", str(data)], folder / f"seeder-{index}.log"))
            for index in range(seeders)
        ]

        def measure() -> Measurement:
            output = folder / "output"
            output.mkdir()
            arguments = ["receive", json.dumps([seeder.ready for seeder in seeding]), str(size), str(output)]
            try:
                with peer_process(module, arguments, folder / "receiver.log") as receiver:
                    senders = [seeder.pid for seeder in seeding]
                    settle([receiver.pid, *senders], size)
                    meter = Meter(receiver.pid, senders, isolated=isolated)
                    result = receiver.ask("go")
                    usage = meter.stop()
                    if result.get("failure"):
                        raise RuntimeError(f"{module} failed: {result['failure']}")
                    if receiver.ask("verify")["digest"] != expected:
                        raise RuntimeError(f"{module} delivered other bytes than were sent")
            finally:
                shutil.rmtree(output)
            return Measurement(
                data_bytes=size,
                seconds=result["seconds"],
                first_byte_s=result["first_byte_s"],
                receiver_cpu_s=usage.receiver_cpu_s,
                senders_cpu_s=usage.senders_cpu_s,
                rss_growth_bytes=usage.peak_growth_bytes - receiver.ready["held_bytes"],
                wire_bytes=usage.wire_bytes,
            )

        yield measure


def missing(package: str) -> str | None:
    """Return why ``package`` cannot be measured, ``None`` where it is installed."""
    return None if importlib.util.find_spec(package) else f"{package} is not installed: pip install 'p2pkv[bench]'"
