"""What a node can tell of itself at one moment, for metrics and status page alike."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from p2pkv.errors import MachineError
from p2pkv.limits import FULL_DISK_BYTES
from p2pkv.ports import PeerId
from p2pkv.routing.announcer import AnnouncerStatistics
from p2pkv.store.files import os_errors
from p2pkv.store.store import StoreStatistics
from p2pkv.swarm.context import in_thread
from p2pkv.swarm.serve import ServerStatistics
from p2pkv.units import format_bytes
from p2pkv_node.node import Node
from p2pkv_node.transfers import Outcome


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sizes in bytes, times in seconds; what is not of now counts from the start. ``unready`` says why, if so."""

    started: float  # seconds since the epoch
    uptime_s: float
    unready: str | None
    store: StoreStatistics
    disk_free_bytes: int
    lane_bytes: int
    stream_bytes: int
    blocks_refused: int
    fetches: int
    outcomes: Mapping[Outcome, int]
    prompt_tokens: int
    hit_tokens: int
    served: ServerStatistics
    announcing: AnnouncerStatistics
    connected_peers: frozenset[PeerId]
    dht_peers: frozenset[PeerId]
    banned_peers: frozenset[PeerId]


async def take_snapshot(node: Node, unready: str | None) -> Snapshot:
    """Return the figures of now. Raises StoreError, DiskFullError."""
    store = await in_thread(node.store.statistics)
    free = await in_thread(lambda: free_bytes(node.config.home))
    tally, transfers = node.context.tally, node.transfers
    return Snapshot(
        started=node.started,
        uptime_s=time.time() - node.started,
        unready=unready,
        store=store,
        disk_free_bytes=free,
        lane_bytes=tally.lane_bytes,
        stream_bytes=tally.stream_bytes,
        blocks_refused=tally.blocks_refused,
        fetches=len(transfers.running),
        outcomes={outcome: transfers.outcomes[outcome] for outcome in Outcome},
        prompt_tokens=transfers.prompt_tokens,
        hit_tokens=transfers.hit_tokens,
        served=node.server.statistics(),
        announcing=node.announcer.statistics(),
        connected_peers=frozenset(node.network.connected_peers),
        dht_peers=frozenset(node.routing.peers),
        banned_peers=frozenset(node.context.bans.active(trio.current_time())),
    )


async def unready_reason(node: Node, stop: trio.Event) -> str | None:
    """Return why the node cannot do its work now, in a sentence; ``None`` where it can."""
    if stop.is_set():
        return "The node is stopping."
    if not node.network.listening:
        return "The network does not listen."
    try:
        await in_thread(node.store.index.counts)
        free = await in_thread(lambda: free_bytes(node.config.home))
    except MachineError as error:
        return f"{error.message}. {error.advice}"
    if free < FULL_DISK_BYTES:
        return f"The disk is full: {format_bytes(free)} are free. Free some space; transfers go on by themselves."
    return None


def free_bytes(home: Path) -> int:
    """Return what this process may still write to the disk under ``home``. Raises StoreError. Blocking."""
    with os_errors(f"read the free space of {os.fspath(home)}"):
        return shutil.disk_usage(home).free
