"""How the demo's rows look on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from p2pkv.units import format_bytes, format_rate, format_seconds

# What a person wants to know of the times in a report, in the order in which things happen.
_PHASES = (
    ("identified_s", "model id confirmed"),
    ("fetch_first_provider_s", "first provider found and connected"),
    ("fetch_manifest_s", "manifest fetched, signature and trust checked"),
    ("fetch_first_block_s", "first block verified"),
    ("first_segment_s", "first segment in the model's cache"),
    ("fetch_done_s", "last block verified"),
    ("loaded_s", "cache complete"),
)


def show(console: Console, rows: list[dict[str, Any]], figures: dict[str, float]) -> None:
    for row in rows:
        console.rule(f"{row['dtype']}, {row['prompt_tokens']:,} tokens, of which {row['document_tokens']:,} are the document")
        console.print(f"[bold]local prefill[/]  {row['answer_local']}\n")
        console.print(f"[bold]from peers[/]     {row['answer_p2p']}\n")
        console.print(f"{row['identical_tokens']} greedy tokens identical, logits bitwise {_equal(row)}")
        console.print(f"{row['report']}\n")
        console.print(_times(row))
        console.print(_peers(row))
    table = Table("time to first token", "local prefill", "from peers", "speed-up", title="result")
    for name, suffix in (("bf16", ""), ("fp32", "_fp32")):
        table.add_row(
            name,
            format_seconds(figures[f"ttft_local{suffix}_s"]),
            format_seconds(figures[f"ttft_p2p{suffix}_s"]),
            f"{figures[f'speedup{suffix}']:.1f}x",
        )
    console.print(table)


def _equal(row: dict[str, Any]) -> str:
    return "[green]equal[/]" if row["logits_equal"] else "[red]different[/]"


def _times(row: dict[str, Any]) -> Table:
    table = Table("since the call", "what", title="where the time went", title_justify="left")
    for name, text in _PHASES:
        if name in row["times"]:
            table.add_row(format_seconds(row["times"][name]), text)
    table.add_row(format_seconds(row["ttft_p2p_s"]), "first new token")
    return table


def _peers(row: dict[str, Any]) -> Table:
    table = Table("peer", "bytes", "rate", "", title="from whom", title_justify="left")
    for peer, count in sorted(row["bytes_by_peer"].items(), key=lambda item: row["names"].get(item[0], "")):
        remark = "dropped: sent a block with another hash" if peer in row["peers_dropped"] else ""
        table.add_row(row["names"].get(peer, peer), format_bytes(count), format_rate(row["rate_by_peer"][peer]), remark)
    for peer in row["peers_dropped"]:
        if peer not in row["bytes_by_peer"]:
            table.add_row(row["names"].get(peer, peer), "0 B", "", "dropped: sent a block with another hash")
    if row["peers_lost"]:
        table.add_row("", "", "", f"{row['peers_lost']} lost on the way")
    return table
