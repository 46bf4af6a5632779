"""``python -m bench.trust``: measure what trust costs and what spot checks catch (``docs/verification.md``)."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.results import machine, write_result
from bench.trust.costs import measure_costs, measure_fetch
from bench.trust.figures import figures, kept
from bench.trust.show import show_row, show_tables
from p2pkv.formats.tensors import Dtype

OUTPUT: Final = Path(__file__).parents[2] / "build" / "trust.json"
# Tokens of each text, draws of each manipulation, repetitions of what is timed.
_TOKENS, _DRAWS, _REPETITIONS = 1536, 200, 7
_QUICK_TOKENS, _QUICK_DRAWS, _QUICK_REPETITIONS = 512, 50, 1

console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trust", description=__doc__)
    parser.add_argument("--json", type=Path, default=OUTPUT, help="where figures and rows go")
    parser.add_argument("--quick", action="store_true", help="one short text in fp32: shows that it works, not how well")
    parser.add_argument("--calibrate", action="store_true", help="print the table of tolerances anew, and do nothing else")
    parser.add_argument("--dtype", type=Dtype, action="append", choices=list(Dtype), help="default: bf16 and fp32")
    options = parser.parse_args()
    if options.calibrate:
        from bench.trust.calibrate import calibrate

        calibrate(_QUICK_TOKENS, options.dtype or list(Dtype))
        return
    dtypes = options.dtype or ([Dtype.FP32] if options.quick else [Dtype.BF16, Dtype.FP32])
    before = machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="p2pkv-bench-") as folder:
        for row in measure_all(Path(folder), dtypes, quick=options.quick):
            show_row(console, row)
            rows.append(row)
    found = figures(rows)
    result = {"bench": "trust", "machine": before, "figures": found, "rows": rows}
    write_result(options.json, result)
    show_tables(console, found)
    for promise, holds in kept(found).items():
        console.print(f"{promise}: {'[green]kept[/]' if holds else '[red]missed[/]'}")
    console.print(f"figures in {options.json}")


def measure_all(folder: Path, dtypes: Sequence[Dtype], *, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure costs, then each dtype, and yield the rows."""
    from bench.trust.detection import measure_cost, measure_detection
    from bench.trust.quorum import measure_quorum
    from bench.trust.subject import load, subject, texts

    yield measure_costs()
    yield from measure_fetch(folder, _QUICK_REPETITIONS if quick else _REPETITIONS)
    yield from measure_quorum(folder, _QUICK_REPETITIONS if quick else _REPETITIONS)
    tokens, draws = (_QUICK_TOKENS, _QUICK_DRAWS) if quick else (_TOKENS, _DRAWS)
    for dtype in dtypes:
        model = load(dtype)
        found = {name: subject(model, ids) for name, ids in texts(tokens).items() if not quick or name == "document"}
        yield measure_cost(dtype, found["document"], _QUICK_REPETITIONS if quick else _REPETITIONS)
        yield from measure_detection(dtype, found, draws)


if __name__ == "__main__":
    main()
