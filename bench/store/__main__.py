"""``python -m bench.store``: measure publishing, reading and opening; figures go to a JSON file (``docs/benchmarks.md``)."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.artifacts import random_segments
from bench.results import machine, write_result
from bench.store.disk import SHAPE, measure_disk
from bench.store.figures import figures
from bench.store.opening import filled_homes, measure_opening
from bench.store.show import show_row, show_table
from p2pkv.units import MIB

OUTPUT = Path(__file__).parent.parent.parent / "build" / "store.json"
# Two repetitions may differ by a factor of five, on a disk that others use too; an odd number has a middle one.
_MIB, _REPETITIONS, _BLOCKS = 256, 7, 100_000
_QUICK_MIB, _QUICK_REPETITIONS, _QUICK_BLOCKS = 32, 1, 10_000

console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument("--json", type=Path, default=OUTPUT, help="where figures and rows go")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{_QUICK_MIB} MiB and {_QUICK_BLOCKS:,} blocks, once: shows that it works, not how fast",
    )
    parser.add_argument("--mib", type=int, help=f"MiB to publish; default {_MIB}")
    parser.add_argument("--repetitions", type=int, help=f"an odd number; default {_REPETITIONS}")
    parser.add_argument("--folder", type=Path, help="on which disk homes and files lie; default: that of temporary files")
    options = parser.parse_args()
    mib = options.mib or (_QUICK_MIB if options.quick else _MIB)
    repetitions = options.repetitions or (_QUICK_REPETITIONS if options.quick else _REPETITIONS)
    blocks = _QUICK_BLOCKS if options.quick else _BLOCKS
    before = machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="p2pkv-bench-", dir=options.folder) as folder:
        for row in measure_all(Path(folder), mib * MIB, blocks, repetitions):
            show_row(console, row)
            rows.append(row)
    result = {
        "bench": "store",
        "data_mib": rows[0]["data_mib"],
        "blocks": blocks,
        "repetitions": repetitions,
        "machine": before,
        "figures": figures(rows, blocks),
        "rows": rows,
    }
    write_result(options.json, result)
    show_table(console, rows)
    console.print(f"figures in {options.json}")


def measure_all(folder: Path, data_bytes: int, blocks: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Measure every case ``repetitions`` times, in turn, and yield a row of each."""
    segments = random_segments(SHAPE, SHAPE.segments(data_bytes))
    for repetition in range(1, repetitions + 1):
        yield from measure_disk(folder, segments, repetition)
    with filled_homes(folder, blocks) as homes:
        for repetition in range(1, repetitions + 1):
            yield from measure_opening(homes, folder, blocks, repetition)


if __name__ == "__main__":
    main()
