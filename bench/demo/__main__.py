"""``python -m bench.demo``: one publisher, three mirrors and one consumer, as separate processes on loopback.

Writes ``build/demo.json``; exits with 1 when an answer differs from the locally computed one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.demo.show import show
from bench.processes import NODE, NodeProcess, environment, node_process, wait_announced
from bench.smollm2 import ensure_model

DOCUMENT = Path(__file__).parent / "constitution.txt"
OUTPUT = Path(__file__).parent.parent.parent / "build" / "demo.json"
DTYPES = ("bfloat16", "float32")
MIRRORS = 3
_LIAR = ("-m", "bench.demo.liar")

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chaos", action="store_true", help="kill one mirror in the middle, let another send bad blocks")
    parser.add_argument("--json", type=Path, default=OUTPUT, help="where the figures go")
    options = parser.parse_args()
    console.print("[bold]p2pkv demo[/]: a language model skips its prefill, and says what it would have said\n")
    with console.status("converting the model (once)"):
        model = ensure_model()
    with tempfile.TemporaryDirectory(prefix="p2pkv-demo-") as folder, ExitStack() as stack:
        rows = _run(Path(folder), stack, model, chaos=options.chaos)
    figures = _figures(rows, chaos=options.chaos)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"figures": figures, "rows": rows}, indent=2) + "\n")
    show(console, rows, figures)
    console.print(f"\nfigures in {options.json}")
    same = all(row["logits_equal"] and row["identical_tokens"] >= 64 for row in rows)
    return 0 if same and all(row["hit_tokens"] for row in rows) else 1


def _run(folder: Path, stack: ExitStack, model: Path, *, chaos: bool) -> list[dict[str, Any]]:
    with console.status("starting a publisher"):
        publisher = stack.enter_context(node_process(folder / "publisher"))
    did = _command(publisher, "keygen")["did"]
    manifests: list[str] = []
    for dtype in DTYPES:
        with console.status(f"publisher: prefilling the document in {dtype}, signing"):
            manifests.append(_command(publisher, "publish", str(model), str(DOCUMENT), "--dtype", dtype)["manifest"])
        console.print(f"published {manifests[-1]}  ({dtype})")
    mirrors: list[NodeProcess] = []
    for index in range(MIRRORS):
        with console.status(f"mirror {index + 1}: fetching both artifacts"):
            liar = chaos and index == MIRRORS - 1
            node = node_process(folder / f"mirror{index + 1}", bootstrap=[publisher.address], module=_LIAR if liar else NODE)
            mirrors.append(stack.enter_context(node))
            _command(mirrors[-1], "trust", "add", did)
            for manifest in manifests:
                _command(mirrors[-1], "fetch", manifest)
        console.print(f"mirror {index + 1} holds both artifacts{', and will lie about every block' if liar else ''}")
    with console.status("waiting until everything is announced"):
        for announcing in (publisher, *mirrors):
            wait_announced(announcing)
    names = {publisher.peer_id: "publisher"} | {node.peer_id: f"mirror {i + 1}" for i, node in enumerate(mirrors)}
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        victim = mirrors[0] if chaos and not rows else None
        with ExitStack() as consumer_stack, console.status(f"consumer: {dtype}, local prefill and then from peers"):
            consumer = consumer_stack.enter_context(node_process(folder / f"consumer-{dtype}", bootstrap=[publisher.address]))
            _command(consumer, "trust", "add", did)
            command = [sys.executable, "-m", "bench.demo.consumer", str(model), str(DOCUMENT), "--dtype", dtype]
            command += ["--home", str(consumer.home), *(["--kill", str(victim.process.pid)] if victim else [])]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append({**json.loads(output.splitlines()[-1]), "names": names})
    return rows


def _command(node: NodeProcess, *arguments: str) -> dict[str, Any]:
    """Run the CLI against a node and return its JSON."""
    command = [sys.executable, "-m", "p2pkv.cli.app", *arguments, "--json"]
    done = subprocess.run(command, env=environment(node.home), stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _figures(rows: list[dict[str, Any]], *, chaos: bool) -> dict[str, float]:
    bf16, fp32 = rows
    figures = {
        "ttft_local_s": bf16["ttft_local_s"],
        "ttft_p2p_s": bf16["ttft_p2p_s"],
        "speedup": bf16["ttft_local_s"] / bf16["ttft_p2p_s"],
        "ttft_local_fp32_s": fp32["ttft_local_s"],
        "ttft_p2p_fp32_s": fp32["ttft_p2p_s"],
        "speedup_fp32": fp32["ttft_local_s"] / fp32["ttft_p2p_s"],
        "identical_tokens": min(row["identical_tokens"] for row in rows),
        "logits_equal": min(row["logits_equal"] for row in rows),
        "hit_tokens": min(row["hit_tokens"] for row in rows),
        "prompt_tokens": bf16["prompt_tokens"],
        "peers_used": min(len(row["bytes_by_peer"]) for row in rows),
        "first_block_s": max(row["times"].get("fetch_first_block_s", 0.0) for row in rows),
        "bytes_fetched": sum(bf16["bytes_by_peer"].values()),
    }
    if chaos:
        figures["blocks_refused"] = sum(row["blocks_refused"] for row in rows)
        figures["peers_lost"] = sum(row["peers_lost"] for row in rows)
    return figures


if __name__ == "__main__":
    sys.exit(main())
