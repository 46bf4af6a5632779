"""``python -m tests.soak [--minutes N] [--seed N] [--json FILE]``: load two nodes in every way; do they stay as they are?

Memory, open files, threads, tasks, index and packs of both are looked at every few seconds. Each has to be flat: its median
in the last quarter of the time is not above that of the second quarter but for an allowance (``figures``). Exits with 1
otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.processes import NodeProcess, end_of_log, node_process
from bench.results import machine, write_result
from tests.soak.figures import Figures, Verdict, look_at, metric, verdicts
from tests.soak.load import MixedLoad
from tests.support.homes import trust_publisher

_MINUTES: Final = 60.0
_SAMPLES: Final = 240  # of the whole time, but not more often than each second
_OPTIONS: Final = ("--web", "127.0.0.1:0", "--log-level", "warning")
_QUOTAS: Final = {"publisher": "40MiB", "consumer": "24MiB"}

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--json", type=Path, default=None, help="where verdicts and samples go")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    console.print(f"seed {seed}")
    before = machine()
    with tempfile.TemporaryDirectory(prefix="p2pkv-soak-") as folder, ExitStack() as stack:
        nodes: dict[str, NodeProcess] = {}
        for name, quota in _QUOTAS.items():
            home = Path(folder) / name
            trust_publisher(home)
            bootstrap = [node.address for node in nodes.values()]
            nodes[name] = stack.enter_context(node_process(home, bootstrap=bootstrap, options=[*_OPTIONS, "--quota", quota]))
        load = MixedLoad(nodes["publisher"], nodes["consumer"], Path(folder), seed)
        load.start()
        try:
            try:
                samples = _watch(nodes, load, 60 * options.minutes)
            finally:
                load.stop()
        except BaseException:
            for node in nodes.values():
                console.print(f"the end of the log of {node.home.name}:", end_of_log(node.home), sep="\n", markup=False)
            raise
        refused = sum(metric(node, "p2pkv_refused_blocks_total") for node in nodes.values())
    found = [verdict for name in nodes for verdict in verdicts(name, samples[name])]
    console.print(", ".join(f"{count} {work}" for work, count in sorted(load.done.items())))
    console.print(_table(found))
    if options.json is not None:
        write_result(
            options.json,
            {
                "soak": options.minutes,
                "seed": seed,
                "machine": before,
                "done": dict(load.done),
                "damaged": load.damaged,
                "refused_blocks": refused,
                "verdicts": [verdict.to_dict() for verdict in found],
                "samples": {name: [asdict(sample) for sample in some] for name, some in samples.items()},
            },
        )
    grown = [verdict for verdict in found if not verdict.flat]
    operations = sum(load.done.values())
    console.print(
        f"{options.minutes:g} minutes, {operations} operations: {len(grown)} of {len(found)} figures grew, "
        f"{load.damaged + refused:.0f} blocks were damaged"
    )
    return 1 if grown or load.damaged or refused else 0


def _watch(nodes: dict[str, NodeProcess], load: MixedLoad, seconds: float) -> dict[str, list[Figures]]:
    """Look at the nodes until the time is over."""
    samples: dict[str, list[Figures]] = {name: [] for name in nodes}
    every = max(seconds / _SAMPLES, 1.0)
    started = time.monotonic()
    for number in range(1, int(seconds / every) + 1):
        time.sleep(max(started + number * every - time.monotonic(), 0))
        load.check()
        for name, node in nodes.items():
            samples[name].append(look_at(node, time.monotonic() - started))
    return samples


def _table(found: Sequence[Verdict]) -> Table:
    table = Table("node", "figure", "second quarter", "last quarter", "at most", "")
    for verdict in found:
        row = (f"{value:,.1f}" for value in (verdict.second_quarter, verdict.last_quarter, verdict.bound))
        table.add_row(verdict.node, verdict.figure, *row, "flat" if verdict.flat else "grew")
    return table


if __name__ == "__main__":
    sys.exit(main())
