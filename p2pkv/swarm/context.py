"""What the drivers need from the shell that runs them: the ports, chance, wall time, and a way to run blocking work."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import trio

from p2pkv import __version__
from p2pkv.artifact.match import Match
from p2pkv.artifact.read import Artifact
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import BAN_SECONDS, MAX_SOURCES
from p2pkv.ports import BlockStore, BulkLane, Network, PeerId, Routing
from p2pkv.swarm.tally import Tally
from p2pkv.trust.policy import Decision

T = TypeVar("T")


class Catalog(Protocol):
    """Which artifacts are here. Synchronous and safe to call from any thread."""

    def match(self, chain_keys: Sequence[bytes]) -> Sequence[Match]:
        """Return the manifests that hold any of ``chain_keys``, longest match first."""

    def add_artifact(self, artifact: Artifact, held: frozenset[int]) -> None:
        """Commit an artifact whose segments ``held`` (by index) are in the store with all their blocks."""

    def lease(self, manifest: Cid, seconds: float) -> int:
        """Keep what belongs to a manifest from being collected for so long; return the lease."""

    def renew(self, lease: int, seconds: float) -> None:
        """Let a lease last for ``seconds`` from now. Raises NotFoundError for one that has expired."""


class Offload(Protocol):
    """Runs blocking work off the event loop; a simulation runs it in place."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a worker thread: what a daemon uses as its Offload."""
    return await trio.to_thread.run_sync(work)


@dataclass(slots=True)
class BanList:
    """Peers that lied lately. Bans expire; nothing but a proven lie bans."""

    _until: dict[PeerId, float] = field(default_factory=dict)

    def ban(self, peer: PeerId, now: float) -> None:
        self._until[peer] = now + BAN_SECONDS

    def banned(self, peer: PeerId, now: float) -> bool:
        if self._until.get(peer, now) <= now:
            self._until.pop(peer, None)
            return False
        return True

    def active(self, now: float) -> list[PeerId]:
        return [peer for peer in list(self._until) if self.banned(peer, now)]

    def until(self, now: float) -> dict[PeerId, float]:
        """Return when the bans that hold at ``now`` end."""
        return {peer: self._until[peer] for peer in self.active(now)}


@dataclass(slots=True)
class Context:
    """Shared by all drivers of one node.

    ``judge`` decides whether an artifact, whose manifest is verified, may be used; it may read files and raise StoreError.
    ``statements`` gives what a publisher, by its 32-byte key, says of itself beyond the statements that a peer knows already;
    blocking. The manifests in ``withheld`` were taken back: they are neither matched nor served. ``met`` is told of the
    publisher of an artifact that is about to be used; ``holder`` names whoever has a publisher's key by now; it may read files
    and raise StoreError. ``wall_clock`` gives seconds since the epoch; ``gained`` is told of every block that a fetch stores,
    so that the server can tell the peers that wait for it; ``share`` is told of an artifact whose fetch takes long, so that a
    mirror announces it while it is still fetching. All in ``asked`` hear of every want that the server gets: whoever asks for
    what a fetch is after has other parts of it. All in ``reconsider`` hear that something new is known of publishers.
    ``sources`` are the peers that blocks came from, the latest last; ``tally`` counts what came.
    """

    network: Network
    routing: Routing
    store: BlockStore
    catalog: Catalog
    judge: Callable[[Manifest, Cid], Decision]
    wall_clock: Callable[[], float]
    rng: random.Random
    offload: Offload
    bulk: BulkLane | None = None
    statements: Callable[[bytes, Sequence[Cid]], Sequence[bytes]] = lambda publisher, known: ()
    withheld: frozenset[Cid] = frozenset()
    met: Callable[[str], None] = lambda publisher: None
    holder: Callable[[str], str] = lambda publisher: publisher
    agent: str = f"p2pkv/{__version__}"
    bans: BanList = field(default_factory=BanList)
    gained: Callable[[Iterable[Cid]], None] = lambda cids: None
    share: Callable[[Artifact], None] = lambda artifact: None
    asked: dict[Callable[[PeerId, Sequence[Cid]], None], None] = field(default_factory=dict)
    reconsider: dict[Callable[[], None], None] = field(default_factory=dict)
    sources: dict[PeerId, None] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def note_source(self, peer: PeerId) -> None:
        """Remember that blocks came from ``peer`` just now."""
        self.sources.pop(peer, None)
        self.sources[peer] = None
        while len(self.sources) > MAX_SOURCES:
            del self.sources[next(iter(self.sources))]
