"""``python -m tests.crash [--kills N] [--seed N]``: kill a process at random moments of whatever it does to a home, and look.

After each kill the home has to open, what was pinned has to be listed, what is listed as whole has to be whole, and no byte
may be served that is not what its CID says. Ends with ``N kills, 0 lost, 0 damaged served``, and exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from threading import Thread

from p2pkv.errors import IntegrityError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import Store, open_store
from tests.crash.worker import SAMPLES

_LONGEST_S = 0.15  # from the first touch of the home to the kill
_BY_CID = {cid: data for sample in SAMPLES for cid, data in sample.blocks.items()}


class Crashes:
    """One home, and what became of it."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home = home
        self._rng = random.Random(seed)
        self._pinned: set[int] = set()
        self.kills = 0
        self.lost: list[str] = []
        self.damaged_served: list[str] = []

    def run_once(self) -> None:
        if self._rng.random() < 0.1:
            self._make_older()
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

    def _make_older(self) -> None:
        """Give the index the schema of the first version, so that the next worker migrates it; it knows no pins."""
        path = HomeLayout(self._home).index
        if path.exists():
            with closing(sqlite3.connect(path)) as connection:
                connection.executescript("DROP TABLE pins; DROP TABLE leases; DROP TABLE downloads; PRAGMA user_version = 1;")
            self._pinned.clear()

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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="p2pkv-crash-") as folder:
        crashes = Crashes(Path(folder) / "home", seed)
        for _ in range(options.kills):
            crashes.run_once()
    for fault in (*crashes.lost, *crashes.damaged_served):
        print(fault)
    print(f"{crashes.kills} kills, {len(crashes.lost)} lost, {len(crashes.damaged_served)} damaged served")
    return 1 if crashes.lost or crashes.damaged_served else 0


if __name__ == "__main__":
    sys.exit(main())
