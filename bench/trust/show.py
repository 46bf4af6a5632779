"""What a run shows people: a line for each measurement while it goes on, and tables at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.trust.detection import POSITIONS
from bench.trust.manipulations import MANIPULATIONS
from p2pkv.formats.tensors import Dtype
from p2pkv.units import format_seconds


def show_row(console: Console, row: Mapping[str, Any]) -> None:
    """Say how one measurement went."""
    timed = [f"{name} {format_seconds(value)}" for name, value in row.items() if name.endswith("_s")]
    seen = [f"{row[f'detect_{count}']:.0%} with {count}" for count in POSITIONS if f"detect_{count}" in row]
    text = f" [dim]{row['text']}[/]" if "text" in row else ""
    console.print(f"{row['case']}{text}: {', '.join(timed + seen)}")


def show_tables(console: Console, figures: Mapping[str, float]) -> None:
    """Show which manipulations were detected how often, by dtype and number of positions."""
    for dtype in Dtype:
        suffix = "" if dtype is Dtype.BF16 else f"_{dtype}"
        if f"detect_honest_{POSITIONS[0]}{suffix}" not in figures:
            continue
        table = Table(title=f"detected in {dtype}, by positions", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("manipulation", no_wrap=True)
        for count in POSITIONS:
            table.add_column(str(count), justify="right")
        for name in MANIPULATIONS:
            table.add_row(name, *(f"{figures[f'detect_{name}_{count}{suffix}']:.0%}" for count in POSITIONS))
        table.add_section()
        table.add_row("seconds", *(format_seconds(figures[f"sample_{count}_s{suffix}"]) for count in POSITIONS))
        console.print(table)
