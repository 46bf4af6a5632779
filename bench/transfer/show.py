"""What a run shows people: a line for each transfer while it goes on, and one table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.results import medians
from p2pkv.units import format_seconds


def show_row(console: Console, row: Mapping[str, Any]) -> None:
    """Say how one transfer went."""
    console.print(f"[dim]{row['repetition']}[/] {row['case']}: {row['mib_s']:,.0f} MiB/s")


def show_table(
    console: Console, rows: Iterable[Mapping[str, Any]], skipped: Mapping[str, str], failed: Mapping[str, str]
) -> None:
    """Show the medians, and at the bottom what was not measured and why."""
    table = Table(title="medians", title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for heading in ("MiB/s", "first byte", "receiver CPU", "senders' CPU", "memory growth", "wire / data"):
        table.add_column(heading, justify="right", max_width=10)
    for case, values in medians(rows).items():
        wire = f"{values['wire_ratio']:.4f}" if "wire_ratio" in values else "-"
        table.add_row(
            case,
            f"{values['mib_s']:,.0f}",
            format_seconds(values["first_byte_s"]),
            format_seconds(values["receiver_cpu_s"]),
            format_seconds(values["senders_cpu_s"]),
            f"{values['rss_growth_mib']:,.1f} MiB",
            wire,
        )
    console.print(table)
    for case, reason in skipped.items():
        console.print(f"[yellow]{case} skipped[/]: {escape(reason)}")
    for case, reason in failed.items():
        console.print(f"[red]{case} failed[/]: {escape(reason)}")
