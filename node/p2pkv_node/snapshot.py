"""What a node can tell of itself at one moment, for metrics, status page and control API alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import trio

from p2pkv.errors import MachineError
from p2pkv.limits import FULL_DISK_BYTES, MAX_WEB_THREADS
from p2pkv.ports import PeerId
from p2pkv.routing.announcer import AnnouncerStatistics
from p2pkv.store.collect import Marks
from p2pkv.store.store import Store, StoreStatistics
from p2pkv.swarm.report import FetchState
from p2pkv.swarm.serve import ServerStatistics
from p2pkv.units import format_bytes
from p2pkv_node.collecting import CollectionStatistics
from p2pkv_node.node import Node
from p2pkv_node.savings import PrefillStatistics
from p2pkv_node.transfers import Outcome

T = TypeVar("T")

# The state of a fetch that has not said yet what it waits for.
STARTING: Final = "starting"


@dataclass(frozen=True, slots=True)
class Room:
    """What the store holds, keeps and may hold. ``quota`` is in bytes of blocks, 0 for the disk alone.

    ``unfinished`` downloads are those that go on at the next start if the node ends now.
    """

    store: StoreStatistics
    quota: int
    marks: Marks
    disk_free_bytes: int
    pins: int
    leases: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sizes in bytes, times in seconds; what is not of now counts from the start. ``unready`` says why, if so.

    ``fetches`` are those under way, by state; ``queued`` those of the last run that wait for their turn. ``tasks`` are of the
    event loop.
    """

    started: float  # seconds since the epoch
    uptime_s: float
    unready: str | None
    room: Room
    collections: CollectionStatistics
    lane_bytes: int
    stream_bytes: int
    blocks_refused: int
    fetches: Mapping[str, int]
    queued: int
    outcomes: Mapping[Outcome, int]
    prompt_tokens: int
    hit_tokens: int
    prefills: PrefillStatistics
    served: ServerStatistics
    announcing: AnnouncerStatistics
    connected_peers: frozenset[PeerId]
    dht_peers: frozenset[PeerId]
    banned_peers: frozenset[PeerId]
    tasks: int


def figures(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON has it: peers are told by their number."""
    found = asdict(snapshot)
    found |= {name: len(getattr(snapshot, name)) for name in ("connected_peers", "dht_peers", "banned_peers")}
    del found["served"]["outstanding_by_peer"], found["served"]["rate_by_peer"]
    found["prefills"]["saved_s"] = snapshot.prefills.saved_s
    return found


class Observer:
    """Looks at ``node``, which is no longer ready once ``stop`` is set."""

    def __init__(self, node: Node, stop: trio.Event) -> None:
        self.node = node
        self._stop = stop
        self._threads = trio.CapacityLimiter(MAX_WEB_THREADS)

    async def read(self, work: Callable[[], T]) -> T:
        """Run blocking work in one of the few threads that looking may take."""
        return await trio.to_thread.run_sync(work, limiter=self._threads)

    async def unready_reason(self) -> str | None:
        """Return why the node cannot do its work now, in a sentence; ``None`` where it can."""
        if self._stop.is_set():
            return "The node is stopping."
        if not self.node.network.listening:
            return "The network does not listen."
        store = self.node.store
        try:
            await self.read(store.index.counts)
            free = await self.read(store.collector.free_bytes)
        except MachineError as error:
            return f"{error.message}. {error.advice}"
        if free < FULL_DISK_BYTES:
            return f"The disk is full: {format_bytes(free)} are free. Free some space; transfers go on by themselves."
        return None

    async def snapshot(self) -> Snapshot:
        """Return the figures of now. Raises StoreError, DiskFullError."""
        node = self.node
        unready = await self.unready_reason()
        room = await self.read(lambda: _room(node.store, node.config.quota))
        tally, transfers = node.context.tally, node.transfers
        states = [transfer.state or STARTING for transfer in transfers.running.values()]
        return Snapshot(
            started=node.started,
            uptime_s=time.time() - node.started,
            unready=unready,
            room=room,
            collections=node.collections.statistics(),
            lane_bytes=tally.lane_bytes,
            stream_bytes=tally.stream_bytes,
            blocks_refused=tally.blocks_refused,
            fetches={state: states.count(state) for state in (STARTING, *FetchState)},
            queued=len(transfers.queued),
            outcomes={outcome: transfers.outcomes[outcome] for outcome in Outcome},
            prompt_tokens=transfers.prompt_tokens,
            hit_tokens=transfers.hit_tokens,
            prefills=node.savings.statistics(),
            served=node.server.statistics(),
            announcing=node.announcer.statistics(),
            connected_peers=frozenset(node.network.connected_peers),
            dht_peers=frozenset(node.routing.peers),
            banned_peers=frozenset(node.context.bans.active(trio.current_time())),
            tasks=trio.lowlevel.current_statistics().tasks_living,
        )


def _room(store: Store, quota: int) -> Room:
    """Blocking. Raises StoreError, DiskFullError."""
    pins, leases = store.holds.counts()
    return Room(
        store=store.statistics(),
        quota=quota,
        marks=store.collector.marks(),
        disk_free_bytes=store.collector.free_bytes(),
        pins=pins,
        leases=leases,
        unfinished=len(store.downloads.unfinished()),
    )
