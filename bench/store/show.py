"""What a run shows people: a line for each measurement while it goes on, and one table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.store.figures import promises
from p2pkv.units import format_seconds


def show_row(console: Console, row: Mapping[str, Any]) -> None:
    """Say how one measurement went."""
    console.print(f"[dim]{row['repetition']}[/] {row['case']}: {_value(row)}")


def show_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show the median of each case between the slowest and the fastest, and what is promised of it."""
    table = Table(title="medians", title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for heading in ("median", "slowest", "fastest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("promised")
    promised = promises(rows)
    for case in dict.fromkeys(row["case"] for row in rows):
        by_time = sorted((row for row in rows if row["case"] == case), key=lambda row: row["seconds"])
        told = ""
        if case in promised:
            told = f"{promised[case].text}: " + ("[green]kept[/]" if promised[case].kept else "[red]missed[/]")
        table.add_row(case, _value(_middle(by_time)), _value(by_time[-1]), _value(by_time[0]), told)
    console.print(table)


def _middle(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in ("seconds", "mib_s") if name in rows[0]}


def _value(row: Mapping[str, Any]) -> str:
    return f"{row['mib_s']:,.0f} MiB/s" if "mib_s" in row else format_seconds(row["seconds"])
