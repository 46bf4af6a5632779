"""Kills of a worker that does to a home what daemon and publisher do, without network and API: fast, and near the files."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

from p2pkv.errors import IntegrityError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.store.store import Store, open_store
from tests.crash.worker import SAMPLES
from tests.support.homes import make_older

_LONGEST_S = 0.15  # from the first touch of the home to the kill
_BY_CID = {cid: data for sample in SAMPLES for cid, data in sample.blocks.items()}


class WorkerCrashes:
    """One home, and what became of it."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home = home
        self._rng = random.Random(seed)
        self._pinned: set[int] = set()
        self.kills = 0
        self.lost: list[str] = []
        self.damaged_served: list[str] = []

    def run_once(self) -> None:
        if self._rng.random() < 0.1 and make_older(self._home):
            self._pinned.clear()
        said = self._kill_one()
        for line in said:
            match line.split():
                case ["pinned", number]:
                    self._pinned.add(int(number))
                case ["unpinning", number]:
                    self._pinned.discard(int(number))
        self.kills += 1
        with open_store(self._home) as store:
            self._look(store)

    def _kill_one(self) -> list[str]:
        """Run a worker for a random while; return what it said before it was killed."""
        command = [sys.executable, "-m", "tests.crash.worker", str(self._home), str(self._rng.randrange(1 << 30))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            if worker.stdout.readline() != "imported\n":
                raise RuntimeError("the worker did not start")
            said: list[str] = []
            reader = Thread(target=lambda: said.extend(worker.stdout or ()))
            reader.start()
            time.sleep(self._rng.uniform(0, _LONGEST_S))
            if worker.poll() is not None:
                raise RuntimeError(f"the worker ended by itself with {worker.returncode}")
            worker.send_signal(signal.SIGKILL)
            reader.join()
        return [line for line in said if line.endswith("\n")]

    def _look(self, store: Store) -> None:
        listed = {row.manifest_cid: row.complete for row in store.index.artifacts()}
        pinned = {pin.manifest_cid for pin in store.holds.pins()}
        for number in self._pinned:
            cid = SAMPLES[number].cid
            if cid not in pinned or cid not in listed:
                self.lost.append(f"kill {self.kills}: pinned sample {number}")
        for number, sample in enumerate(SAMPLES):
            if listed.get(sample.cid):
                missing = [cid for cid, data in sample.blocks.items() if not self._is_here(store, cid, data)]
                if missing:
                    self.lost.append(f"kill {self.kills}: {len(missing)} blocks of sample {number}, which is listed as whole")
        for cid, data in _BY_CID.items():
            self._is_here(store, cid, data)

    def _is_here(self, store: Store, cid: Cid, data: bytes) -> bool:
        buffer = bytearray(len(data))
        try:
            store.read_into(cid, buffer)
        except (NotFoundError, IntegrityError):
            return False
        if buffer != data:
            self.damaged_served.append(f"kill {self.kills}: {cid}")
        return True
