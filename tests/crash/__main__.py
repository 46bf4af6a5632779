"""``python -m tests.crash [--kills N] [--seed N]``: kill processes at random moments of whatever they do to a home, and look.

A third are real daemons under load (``daemons``), the others a worker that does to a home what they do (``imitated``). After
each kill the home has to open, what was pinned has to be listed, what is listed as whole has to be whole, and no byte may be
served that is not what its CID says. Ends with ``N kills, 0 lost, 0 damaged served``, and exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.crash.daemons import DaemonCrashes
from tests.crash.imitated import WorkerCrashes

_DAEMON_SHARE = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    of_daemons = options.kills // _DAEMON_SHARE
    with tempfile.TemporaryDirectory(prefix="p2pkv-crash-") as folder:
        worker = WorkerCrashes(Path(folder) / "home", seed)
        for _ in range(options.kills - of_daemons):
            worker.run_once()
        with DaemonCrashes(Path(folder) / "nodes", seed) as daemon:
            for _ in range(of_daemons):
                daemon.run_once()
    print(daemon.summary())
    kills = worker.kills + daemon.kills
    lost = [*worker.lost, *daemon.lost]
    damaged_served = [*worker.damaged_served, *daemon.damaged_served]
    slow = [f"a daemon took {seconds:.2f} s to end after a signal" for seconds in daemon.slow_stops]
    for fault in (*lost, *damaged_served, *slow):
        print(fault)
    print(f"{kills} kills, {len(lost)} lost, {len(damaged_served)} damaged served")
    return 1 if lost or damaged_served or slow else 0


if __name__ == "__main__":
    sys.exit(main())
