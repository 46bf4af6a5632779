"""``python -m sims list`` and ``python -m sims run all|NAME [--seed N] [--json FILE]``; see ``docs/simulations.md``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sims.content import make_content
from sims.run import Result, run
from sims.scenarios import BASE, SCENARIOS, Scenario

_COLUMNS = ("time_s", "time_ratio", "cost_s", "wire_ratio", "publisher_copies", "wrongly_punished", "trace_hash")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sims", description="Fetches in a simulated network, in virtual time.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the scenarios")
    running = commands.add_parser("run", help="run scenarios and print what was measured")
    running.add_argument("name", choices=["all", *(scenario.name for scenario in SCENARIOS)])
    running.add_argument("--seed", type=int, default=1, help="equal seeds give equal traces (default: 1)")
    running.add_argument("--json", type=Path, help="write one map per scenario to this file")
    given = parser.parse_args(arguments)
    if given.command == "list":
        for scenario in SCENARIOS:
            print(f"{scenario.name:<14} {scenario.about}")
        return 0
    chosen = [scenario for scenario in SCENARIOS if given.name in ("all", scenario.name)]
    results = run_all(chosen, given.seed)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({name: result.as_map() for name, result in results.items()}, indent=2) + "\n")
    return 0 if not any(result.incomplete for result in results.values()) else 1


def run_all(scenarios: Sequence[Scenario], seed: int) -> dict[str, Result]:
    """Run ``scenarios``, print each as it is done, and return their results by name.

    One consumer's time is compared with that of the base scenario, which runs first; a crowd's with its ideal.
    """
    base = next(scenario for scenario in SCENARIOS if scenario.name == BASE)
    results: dict[str, Result] = {}
    print(f"{'scenario':<14}", *(f"{column:>16}" for column in _COLUMNS))
    base_s: float | None = None
    for scenario in (base, *(scenario for scenario in scenarios if scenario is not base)):
        content = make_content(scenario.blocks, seed)
        result = run(scenario, content, seed, base_s=None if scenario.consumers > 1 else base_s)
        if scenario is base:
            base_s = result.time_s
            result = run(scenario, content, seed, base_s=base_s) if base in scenarios else result
        if scenario in scenarios:
            results[scenario.name] = result
            row = result.as_map()
            print(f"{scenario.name:<14}", *(f"{str(row[column])[:16]:>16}" for column in _COLUMNS), flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
