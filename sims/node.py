"""One simulated node: the real engines and drivers over the twins of network, routing and store, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import trio

from p2pkv.artifact.match import Match, bitmap
from p2pkv.artifact.read import Artifact
from p2pkv.download.engine import Download
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.statement import SignedStatement
from p2pkv.ports import PeerAddress, PeerId
from p2pkv.routing.boundaries import announce_keys
from p2pkv.swarm.announce import AnnounceTask
from p2pkv.swarm.context import Context
from p2pkv.swarm.fetch import Fetch
from p2pkv.swarm.report import FetchEvent, FetchReport
from p2pkv.swarm.serve import Server
from p2pkv.swarm.statements import StatementTask, statements_of
from p2pkv.swarm.target import Target
from p2pkv.trust.policy import Decision, judge
from p2pkv.trust.record import Record, holder, succeeded
from p2pkv.trust.rules import Action, Rule
from sims.network import Link, World
from sims.routing import MemoryRouting, ProviderRecords
from sims.store import MemoryBlockStore

T = TypeVar("T")


async def in_place(work: Callable[[], T]) -> T:
    """Offload of a simulation: no thread, since virtual time would run ahead of it."""
    return work()


class MemoryCatalog:
    """Twin of the store's index."""

    def __init__(self) -> None:
        self._held: dict[Cid, tuple[Artifact, frozenset[int]]] = {}

    def match(self, chain_keys: Sequence[bytes]) -> Sequence[Match]:
        asked = set(chain_keys)
        found: list[Match] = []
        for cid, (artifact, held) in self._held.items():
            matched = max((i + 1 for i, key in enumerate(artifact.chain_keys) if key in asked), default=0)
            if matched:
                segments = len(artifact.chain_keys)
                found.append(Match(cid, matched, segments, bitmap(held, segments)))
        return sorted(found, key=lambda match: -match.matched)

    def add_artifact(self, artifact: Artifact, held: frozenset[int]) -> None:
        _, before = self._held.get(artifact.cid, (artifact, frozenset[int]()))
        self._held[artifact.cid] = (artifact, before | held)

    def lease(self, manifest: Cid, seconds: float) -> int:
        return 0  # nothing is ever collected here

    def renew(self, lease: int, seconds: float) -> None:
        pass


class MemoryRecords:
    """Twin of the records in a home."""

    def __init__(self) -> None:
        self.known: dict[str, Record] = {}
        self.answers: dict[str, float] = {}

    def get(self, publisher: str, /) -> Record | None:
        return self.known.get(publisher)

    def publishers(self) -> Sequence[str]:
        return tuple(self.known)

    def hear(self, signed: SignedStatement) -> bool:
        before = self.known.get(signed.publisher, Record(signed.publisher))
        self.known[signed.publisher] = before.heard(signed)
        return self.known[signed.publisher] is not before

    def note_answers(self, answers: Mapping[str, float]) -> None:
        self.answers.update(answers)


class SimNode:
    """A node of ``world`` that serves what it holds and can fetch; a ``mirror`` announces what it is fetching.

    ``download`` makes the download engine of each fetch, for whoever wants to watch it.
    """

    def __init__(
        self,
        world: World,
        records: ProviderRecords,
        peer_id: PeerId,
        *,
        seed: int = 0,
        trusted: Iterable[str] = (),
        store: MemoryBlockStore | None = None,
        link: Link | None = None,
        mirror: bool = False,
        download: Callable[[random.Random], Download] = Download,
        wall_clock: Callable[[], float] = lambda: 1_800_000_000.0,
    ) -> None:
        link = link or Link()
        self.network = world.add_node(peer_id, link)
        self.store = store if store is not None else MemoryBlockStore()
        self.catalog = MemoryCatalog()
        self.trusted = set(trusted)
        self.records = MemoryRecords()
        own = PeerAddress(peer_id, self.network.addresses)
        self.routing = MemoryRouting(records, own, latency_s=4 * link.latency_s, rng=random.Random(seed + 1))
        self.context = Context(
            network=self.network,
            routing=self.routing,
            store=self.store,
            catalog=self.catalog,
            judge=self._judge,
            wall_clock=wall_clock,
            rng=random.Random(seed),
            offload=in_place,
        )
        self.server = Server(self.context)
        self.context.statements = partial(statements_of, self.records)
        self.announcer = AnnounceTask(self.context)
        self.statements = StatementTask(
            self.context, self.records, self.announcer, followed=self._followed, heard=trio.lowlevel.checkpoint
        )
        self.context.met = self.statements.hasten
        self.context.holder = partial(holder, records=self.records.known)
        self.context.gained = self.server.gained
        self.network.set_channel_handler(self.server.serve)
        self._download = download
        if mirror:
            self.context.share = lambda artifact: world.nursery.start_soon(self.routing.announce, artifact.cid.multihash)

    def hold(self, artifact: Artifact, blocks: Mapping[Cid, bytes], *, segments: int | None = None) -> None:
        """Store ``blocks``, and say from now on that the first ``segments`` of ``artifact`` (default: all) are here."""
        for cid, data in blocks.items():
            self.store.write(cid, data)
        self.catalog.add_artifact(artifact, frozenset(range(len(artifact.chain_keys) if segments is None else segments)))

    def _judge(self, manifest: Manifest, cid: Cid) -> Decision:
        rules = [Rule(Action.ACCEPT, publisher) for publisher in sorted(self.trusted)]
        return judge(manifest, cid, rules, self.records.known, self.context.wall_clock())

    def _followed(self) -> list[str]:
        return [did for publisher in sorted(self.trusted) for did in succeeded(publisher, self.records.known)]

    async def announce(self, artifact: Artifact) -> None:
        """Announce an artifact at its boundaries and by manifest CID."""
        for key in announce_keys(artifact.cid, artifact.manifest.tokens.count, artifact.chain_keys):
            await self.routing.announce(key)

    async def fetch(
        self, target: Target, *, patience_s: float = 60.0, emit: Callable[[FetchEvent], None] = lambda event: None
    ) -> FetchReport:
        return await Fetch(self.context, target, emit, download=self._download).run(patience_s)
