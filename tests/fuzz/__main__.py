"""``python -m tests.fuzz [--target NAME] [--runs N] [--seed N] [--json FILE]``: fuzz all decoders, guided by coverage.

N inputs are shared out evenly among the targets. Prints for each how many were accepted and refused, and how fast, and ends
with ``N runs, M targets, A accepted, R refused, K escaped, T minutes``. Exits with 1 where a decoder did what it promises
never to do, with the input in hex.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.registry import ROOT, TARGETS
from tests.fuzz.target import ACCEPTED, ESCAPED

_RUNS: Final = 200_000


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one target: how many inputs ended how, the inputs that escaped by what was raised, and the seconds."""

    target: str
    outcomes: dict[str, int]
    escapes: dict[str, str]
    seconds: float

    @property
    def runs(self) -> int:
        return sum(self.outcomes.values())

    @property
    def accepted(self) -> int:
        return self.outcomes.get(ACCEPTED, 0)

    @property
    def escaped(self) -> int:
        return self.outcomes.get(ESCAPED, 0)

    @property
    def refused(self) -> int:
        return self.runs - self.accepted - self.escaped

    def __str__(self) -> str:
        return (
            f"{self.target:18} {self.runs:>10,} runs {self.runs / self.seconds:>9,.0f}/s "
            f"{self.accepted:>10,} accepted {self.refused:>10,} refused {self.escaped:>6,} escaped"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=["all", *TARGETS], default="all")
    parser.add_argument("--runs", type=int, default=_RUNS, help="inputs of all targets together (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--json", type=Path, default=None, help="where the counts go")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is missing: `make fuzz` installs it where it has a wheel")
    seed = random.randrange(1, 1 << 30) if options.seed is None else options.seed
    names = list(TARGETS) if options.target == "all" else [options.target]
    print(f"seed {seed}", flush=True)
    results: list[Result] = []
    for result in _fuzz(names, max(1, -(-options.runs // len(names))), seed):
        print(result, flush=True)
        results.append(result)
    for result in results:
        for error, data in result.escapes.items():
            print(f"{result.target}: {error}\n    {data}")
    total = sum(result.runs for result in results)
    accepted = sum(result.accepted for result in results)
    escaped = sum(result.escaped for result in results)
    minutes = sum(result.seconds for result in results) / 60
    refused = sum(result.refused for result in results)
    print(
        f"{total:,} runs, {len(results)} targets, {accepted:,} accepted, {refused:,} refused, {escaped} escaped, "
        f"{minutes:.1f} minutes"
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"seed": seed, "runs": total, "escaped": escaped, "targets": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if escaped or len(results) < len(names) else 0


def _fuzz(names: Sequence[str], runs: int, seed: int) -> Iterator[Result]:
    """Yield what comes of each target; where one ends its process, what libFuzzer said of it is shown, and it is the last."""
    command = [sys.executable, "-m", "tests.fuzz.worker", str(runs), str(seed), *names]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=said) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                yield Result(**json.loads(line))
        if worker.returncode:
            said.seek(0)
            print(said.read()[-4000:], file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
