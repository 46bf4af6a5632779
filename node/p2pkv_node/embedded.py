"""A node inside a program that wants no daemon: the same node with the same control socket, in a thread of its own.

::

    with embedded_node(bootstrap=["/ip4/.../p2p/..."]) as node, Client(node.home) as client:
        prefill = client.prefill(model, token_ids)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from p2pkv_node.config import load_config
from p2pkv_node.daemon import run_daemon
from p2pkv_node.node import Node

# A program that only consumes need not be reached from outside.
_LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True)
class EmbeddedNode:
    """A node that runs beside the program. ``home`` is what a client is given."""

    home: Path
    peer_id: str
    addresses: tuple[str, ...]


@contextmanager
def embedded_node(home: Path | str | None = None, **settings: Any) -> Iterator[EmbeddedNode]:
    """Run a node until the end of the block. ``settings`` are those of NodeConfig; the default listens on loopback only.

    Raises HomeLockedError where a daemon has this home already (use a plain Client then), ListenError, UsageError.
    """
    flags = {"listen": _LISTEN, **settings} if home is None else {"listen": _LISTEN, **settings, "home": home}
    config = load_config(flags)
    started = threading.Event()
    found: list[EmbeddedNode] = []
    failed: list[BaseException] = []
    control: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []

    def ready(node: Node) -> None:
        found.append(EmbeddedNode(config.home, node.network.peer_id, node.network.addresses))
        started.set()

    async def run() -> None:
        stop = trio.Event()
        control.append((trio.lowlevel.current_trio_token(), stop))
        await run_daemon(config, ready=ready, stop=stop)

    def work() -> None:
        try:
            trio.run(run)
        except BaseException as error:  # raised again below, in the program's own thread
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work, name="p2pkv-node")
    thread.start()
    started.wait()
    try:
        if found:
            yield found[0]
    finally:
        if control and thread.is_alive():
            token, stop = control[0]
            with suppress(trio.RunFinishedError):  # it may end by itself in this very moment
                token.run_sync_soon(stop.set)
        thread.join()
    if failed:
        raise failed[0]
