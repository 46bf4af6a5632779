"""``python -m bench.transfer``: measure all cases, interleaved, and write figures and rows as JSON (``docs/benchmarks.md``).

Exits with 1 when a transfer failed or did not deliver what was sent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.results import machine, write_result
from bench.transfer.cases import FAILURES, NAMES, Case, Setting, select
from bench.transfer.figures import figures
from bench.transfer.measure import Measurement
from bench.transfer.netns import isolate
from bench.transfer.show import show_row, show_table
from p2pkv.units import MIB

OUTPUT = Path(__file__).parent.parent.parent / "build" / "transfer.json"
# Two repetitions of a case differ by up to a fifth on a shared machine, the medians of seven by a few percent.
_MIB, _REPETITIONS = 256, 7
_QUICK_MIB, _QUICK_REPETITIONS = 64, 1

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--json", type=Path, default=OUTPUT, help="where figures and rows go")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=NAMES,
        metavar="NAME",
        help=f"one of {', '.join(NAMES)}; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_MIB} MiB, once: shows that it works, not how fast")
    parser.add_argument("--mib", type=int, help=f"MiB to transfer; default {_MIB}")
    parser.add_argument("--repetitions", type=int, help=f"default {_REPETITIONS}")
    parser.add_argument("--folder", type=Path, help="where homes and files are kept meanwhile; default: for temporary files")
    options = parser.parse_args()
    mib = options.mib or (_QUICK_MIB if options.quick else _MIB)
    repetitions = options.repetitions or (_QUICK_REPETITIONS if options.quick else _REPETITIONS)
    before = machine()
    isolated = isolate()
    if not isolated:
        console.print("[yellow]no network namespace can be made here: bytes on the wire are not counted")
    with tempfile.TemporaryDirectory(prefix="p2pkv-bench-", dir=options.folder) as folder:
        setting = Setting(Path(folder), mib * MIB, isolated)
        rows, skipped, failed = measure_all(select(options.only), setting, repetitions)
    result = {
        "bench": "transfer",
        "data_mib": mib,
        "repetitions": repetitions,
        "isolated": isolated,
        "machine": before,
        "figures": figures(rows),
        "skipped": skipped,
        "failed": failed,
        "rows": rows,
    }
    write_result(options.json, result)
    show_table(console, rows, skipped, failed)
    console.print(f"figures in {options.json}")
    return 1 if failed else 0


def measure_all(
    cases: Sequence[Case], setting: Setting, repetitions: int
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Measure every case ``repetitions`` times: rows, and what was skipped or failed and why, by case.

    Seeders run from the start to the end. Cases take turns, so that whatever disturbs the machine for a while disturbs all
    alike. A case that fails once is not tried again.
    """
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    opened: dict[str, Callable[[], Measurement]] = {}
    with ExitStack() as stack:
        for case in cases:
            if (reason := case.skipped(setting)) is not None:
                skipped[case.name] = reason
                continue
            with console.status(f"{case.name}: starting seeders"):
                try:
                    opened[case.name] = stack.enter_context(case.open(setting, setting.folder / case.name))
                except FAILURES as error:
                    failed[case.name] = f"{type(error).__name__}: {error}"
        for repetition in range(1, repetitions + 1):
            for name in [name for name in opened if name not in failed]:
                with console.status(f"{name}: {repetition} of {repetitions}"):
                    try:
                        row = {"case": name, "repetition": repetition, **opened[name]().to_row()}
                    except FAILURES as error:
                        failed[name] = f"{type(error).__name__}: {error}"
                        continue
                rows.append(row)
                show_row(console, row)
    return rows, skipped, failed


if __name__ == "__main__":
    sys.exit(main())
