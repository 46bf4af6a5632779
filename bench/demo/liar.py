"""A node that serves every block with one bit flipped: ``p2pkv-node`` over a store that lies. For ``make demo CHAOS=1``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import trio

from p2pkv.formats.cid import Cid, Codec
from p2pkv_node.config import load_config
from p2pkv_node.daemon import run_daemon, stop_on_signals
from p2pkv_node.node import Node
from sims.store import TamperedStore


def lie(cid: Cid, data: bytes) -> bytes:
    """Tell the truth about nodes and lie about blocks, so that nothing but the block's own hash can give it away."""
    if cid.codec is not Codec.RAW:
        return data
    flipped = bytearray(data)
    flipped[len(flipped) // 2] ^= 0x01
    return bytes(flipped)


async def _run(home: Path, listen: list[str], bootstrap: list[str]) -> None:
    def ready(node: Node) -> None:
        print(json.dumps({"peer_id": node.network.peer_id, "addresses": node.network.addresses}), flush=True)

    stop = trio.Event()
    with stop_on_signals(stop):
        config = load_config({"home": home, "listen": listen, "bootstrap": bootstrap})
        await run_daemon(config, ready=ready, stop=stop, serve_from=lambda store: TamperedStore(store, lie))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--listen", action="append", required=True)
    parser.add_argument("--bootstrap", action="append", default=[])
    parser.add_argument("--json", action="store_true", help="as p2pkv-node has it; this node prints nothing else")
    options = parser.parse_args()
    trio.run(_run, options.home, options.listen, options.bootstrap)


if __name__ == "__main__":
    main()
