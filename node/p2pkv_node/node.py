"""One node, put together: store, libp2p, routing and bulk lane under the drivers of ``p2pkv.swarm``."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from p2pkv import __version__
from p2pkv.artifact.read import Artifact, open_artifact
from p2pkv.artifact.slice import WHOLE
from p2pkv.errors import FetchIncompleteError, MachineError, NotFoundError, P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_FILE_WORK
from p2pkv.ports import BlockStore
from p2pkv.routing.boundaries import announce_keys
from p2pkv.store.car_file import CarArtifact, export_car, import_car
from p2pkv.store.collect import Collected
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.progress import Progress, ignore
from p2pkv.store.reader_leases import ReaderLeases
from p2pkv.store.secrets import load_or_create_node_seed
from p2pkv.store.store import Store, open_store
from p2pkv.swarm.announce import AnnounceTask
from p2pkv.swarm.background import open_background
from p2pkv.swarm.context import Context, in_thread
from p2pkv.swarm.fetch import Fetch
from p2pkv.swarm.report import FetchEvent, FetchReport
from p2pkv.swarm.serve import Server
from p2pkv.swarm.statements import StatementTask, statements_of
from p2pkv.swarm.target import ManifestTarget, PromptTarget, Target
from p2pkv_node.bulk import BulkSettings, TlsBulkLane
from p2pkv_node.collecting import Collections, Why
from p2pkv_node.config import NodeConfig
from p2pkv_node.identity import signer_from_seed
from p2pkv_node.kad import KadRouting, open_routing
from p2pkv_node.network import Libp2pNetwork, open_network
from p2pkv_node.room import fetch_with_room
from p2pkv_node.savings import Savings
from p2pkv_node.transfers import Transfers
from p2pkv_node.worker import in_worker

logger = logging.getLogger(__name__)

# The program that waited for the fetch computes its first token now: it gets the machine first.
_LINGER_S = 1.0
_AFTER_FETCH_S = 2.0  # and announcing comes after that
# A node that had nothing to fetch for this long makes its store ready for the next, in small steps.
_IDLE_S = 2.0
_READY_PAUSE_S = 0.02
# Nobody waits for what goes on after a restart, so it may take its time.
_RESUME_PATIENCE_S = 3600.0
# The store is looked at so often; between two looks a fast link brings some GiB.
_QUOTA_CHECK_S = 5.0


class Node:
    """A running node; :func:`open_node` makes it. All methods belong to its trio run."""

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        network: Libp2pNetwork,
        routing: KadRouting,
        context: Context,
        trust: HomeTrust,
        nursery: trio.Nursery,
    ) -> None:
        self._nursery = nursery
        self.config = config
        self.store = store
        self.network = network
        self.routing = routing
        self.trust = trust
        self.context = context
        self.server = Server(
            context,
            limit=config.upload_limit or math.inf,
            limit_per_peer=config.upload_limit_per_peer or math.inf,
        )
        self.announcer = AnnounceTask(context)
        followed = self.trust.followed
        self.statements = StatementTask(context, self.trust.records, self.announcer, followed=followed, heard=self.obey)
        self._announced: dict[Cid, frozenset[bytes]] = {}
        self._file_work = trio.CapacityLimiter(MAX_FILE_WORK)
        self.started = time.time()
        self.ending = trio.Event()  # set when the node is told to end: its downloads go on at the next start
        self.fetches = 0
        self.transfers = Transfers()
        self.leases = ReaderLeases(store)
        self.collections = Collections()
        self.savings = Savings()
        self.web_url: str | None = None  # where the status page is

    async def fetch(
        self,
        target: Target,
        emit: Callable[[FetchEvent], None],
        patience_s: float,
        deliver: Callable[[FetchReport], None] = lambda report: None,
    ) -> FetchReport:
        """Fetch ``target``; an artifact that is whole then is announced where the node is a mirror. See Fetch.run."""
        self.fetches += 1
        try:
            with self.transfers.watch(target, emit, deliver) as (hear, conclude):
                report = await self._fetch(target, hear, patience_s, conclude)
        finally:
            self.fetches -= 1
        if report.artifact is not None and report.complete and self.config.mirror:
            self.announce(report.artifact, delay_s=_AFTER_FETCH_S)
        return report

    async def _fetch(
        self, target: Target, emit: Callable[[FetchEvent], None], patience_s: float, deliver: Callable[[FetchReport], None]
    ) -> FetchReport:
        async def run(hear: Callable[[FetchEvent], None], seconds: float) -> FetchReport:
            return await Fetch(self.context, target, hear).run(seconds, deliver=deliver, linger_s=_LINGER_S)

        if isinstance(target, PromptTarget):  # computing needs no disk, and is sooner than waiting for room
            return await run(emit, patience_s)
        async with self._noted(target):
            return await fetch_with_room(run, lambda: in_thread(self.store.collector.free_bytes), emit, patience_s)

    @asynccontextmanager
    async def _noted(self, target: ManifestTarget) -> AsyncIterator[None]:
        """Remember a download of a whole artifact, so that it goes on after a restart where the node ends before it does."""
        if target.wanted != WHOLE:
            yield
            return
        noted = trio.Event()
        self._nursery.start_soon(self._note, partial(self.store.downloads.begin, target.manifest), noted)
        try:
            yield
        finally:
            if not self.ending.is_set():
                with trio.CancelScope(shield=True):
                    await noted.wait()
                    await self._note(partial(self.store.downloads.end, target.manifest))

    async def _note(self, change: Callable[[], None], done: trio.Event | None = None) -> None:
        try:
            await in_thread(change)
        except MachineError as error:  # on a full disk a download goes on without
            logger.warning("%s", error)
        finally:
            if done is not None:
                done.set()

    async def resume_downloads(self) -> None:
        """Go on with what was being fetched when the node ended, one after another."""
        queued = self.transfers.queued
        queued.extend(await in_thread(self.store.downloads.unfinished))
        while queued:
            manifest = queued.pop(0)
            logger.info("going on with the download of %s", manifest)
            try:
                await self.fetch(ManifestTarget(manifest), lambda event: None, _RESUME_PATIENCE_S)
            except P2pkvError as error:
                logger.warning("%s is not fetched any further: %s", manifest, error)

    async def publish(self, staging: str, manifest: Cid, hear: Progress = ignore) -> Artifact:
        """Take over what a publisher staged, and announce it. Raises what Store.publish raises."""
        artifact = await in_worker(partial(self.store.publish, staging, manifest), hear, self._file_work)
        self.announce(artifact)
        logger.info("published %s: %d tokens of %s", manifest, artifact.manifest.tokens.count, artifact.manifest.model_name)
        return artifact

    async def import_car(self, path: Path, hear: Progress = ignore) -> CarArtifact:
        """Take over the artifact of a CAR file, if its publisher is trusted, and announce it. Raises as import_car does."""
        imported = await in_worker(partial(self._import_car, path), hear, self._file_work)
        self.announce(imported.artifact)
        logger.info("imported %s from %s", imported.artifact.cid, path)
        return imported

    def _import_car(self, path: Path, tell: Progress) -> CarArtifact:
        def require(manifest: Manifest, cid: Cid) -> None:
            self.trust.judge(manifest, cid, time.time()).require()

        return import_car(self.store, path, judge=require, on_progress=tell)

    async def export_car(self, manifest: Cid, path: Path, hear: Progress = ignore) -> CarArtifact:
        """Write a stored artifact to a CAR file. Raises what export_car raises."""
        return await in_worker(partial(export_car, self.store, manifest, path), hear, self._file_work)

    def announce(self, artifact: Artifact, *, delay_s: float = 0.0) -> None:
        """Keep ``artifact`` announced at its boundaries and by manifest CID, unless its publisher took it back."""
        manifest = artifact.manifest
        if self.trust.taken_back(artifact.cid, manifest.publisher, manifest.model_id, manifest.sequence):
            logger.warning("%s was taken back by its publisher, and is neither announced nor served", artifact.cid)
            self.context.withheld |= {artifact.cid}
            return
        keys = announce_keys(artifact.cid, artifact.manifest.tokens.count, artifact.chain_keys)
        self._announced[artifact.cid] = frozenset(keys)
        self.announcer.add(keys, delay_s=delay_s)

    async def announce_again(self, manifest: Cid) -> int:
        """Announce a stored artifact now, and return how many keys it has.

        Raises NotFoundError, FetchIncompleteError for one that is not whole, RevokedError for one that its publisher took
        back, StoreError where that cannot be known, and what open_artifact raises.
        """
        row = await in_thread(partial(self.store.index.artifact, manifest))
        if row is None:
            raise NotFoundError(f"{manifest} is not stored here", advice="`p2pkv status` lists what is here.")
        if not row.complete:
            raise FetchIncompleteError(f"{manifest} is not whole here", advice=f"Run `p2pkv fetch {manifest}` first.")
        if (reason := self.trust.revoked(manifest, row.publisher, row.model_id, row.sequence)) is not None:
            raise reason
        self.announce(await in_thread(partial(self.read_artifact, manifest)))
        keys = self._announced.get(manifest, frozenset())
        self.announcer.repeat(sorted(keys))
        return len(keys)

    async def obey(self) -> None:
        """Neither announce nor serve what its publisher took back, as far as is known by now."""

        def taken_back() -> frozenset[Cid]:
            rows = self.store.index.artifacts()
            ask = self.trust.taken_back
            return frozenset(r.manifest_cid for r in rows if ask(r.manifest_cid, r.publisher, r.model_id, r.sequence))

        before = self.context.withheld
        found = await in_thread(taken_back)
        self.context.withheld = found | (self.context.withheld - before)  # and what `announce` has met meanwhile
        for manifest in found - before:
            logger.warning("%s was taken back by its publisher, and is neither announced nor served any more", manifest)
        self._withdraw(self.context.withheld)

    def share(self, artifact: Artifact) -> None:
        """Announce ``artifact`` by manifest CID while it is being fetched: others can have of us what is here already."""
        self.announcer.add([artifact.cid.multihash])

    def background(self, task: Callable[[], Awaitable[None]]) -> trio.CancelScope:
        """Run ``task`` beside the caller, until it is done, its scope is cancelled, or the node ends."""
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await task()

        self._nursery.start_soon(run)
        return scope

    async def keep_ready(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Make the store ready for the next fetch whenever there is none, and ``prepare`` what else it needs."""
        more = False
        while True:
            await trio.sleep(_READY_PAUSE_S if more else _IDLE_S)
            if not self.fetches:
                prepare()
            try:
                more = not self.fetches and await in_thread(self.store.blocks.make_ready)
            except MachineError as error:  # whoever stores a block is told; this is for speed only
                more = False
                logger.info("the store could not be made ready: %s", error)

    async def keep_below_quota(self) -> None:
        """Collect whenever the store is above its high mark. For ever."""
        while True:
            try:
                if await in_thread(self.store.collector.due):
                    await self.collect(why=Why.ABOVE_HIGH_MARK)
            except MachineError as error:  # of the disk, which whoever stores something is told as well
                logger.warning("the store is too large and cannot be made smaller: %s", error)
            await trio.sleep(_QUOTA_CHECK_S)

    async def collect(self, *, dry_run: bool = False, why: Why = Why.ASKED_FOR) -> Collected:
        """Collect garbage; what is gone is announced no longer. Raises DiskFullError, StoreError."""
        collected = await in_thread(partial(self.store.collector.collect, dry_run=dry_run))
        if not dry_run:
            self._withdraw(evicted.manifest_cid for evicted in collected.evicted)
            self.collections.add(collected, why, time.time())
        return collected

    async def remove(self, manifest: Cid) -> bool:
        """Take an artifact off the list and out of the DHT, and return whether it was listed; collecting takes its blocks.

        Raises UsageError for one that is pinned.
        """
        removed = await in_thread(partial(self.store.remove, manifest))
        self._withdraw([manifest])
        return removed

    def _withdraw(self, manifests: Iterable[Cid]) -> None:
        """Announce no longer what these alone had."""
        gone = {key for manifest in manifests for key in self._announced.pop(manifest, ())}
        self.announcer.discard(gone - {key for keys in self._announced.values() for key in keys})

    async def announce_stored(self) -> None:
        """Announce every whole artifact that is stored, as after a restart, but for those whose manifest cannot be read."""
        for row in await in_thread(self.store.index.artifacts):
            if row.complete:
                try:
                    self.announce(await in_thread(partial(self.read_artifact, row.manifest_cid)))
                except P2pkvError as error:  # its blocks may be gone with a power cut: then it is fetched again when wanted
                    logger.warning("%s is listed and cannot be announced: %s", row.manifest_cid, error)

    def read_artifact(self, manifest: Cid) -> Artifact:
        """Return a stored artifact, verified. Raises NotFoundError and what open_artifact raises. Blocking."""
        return open_stored(self.store, manifest)


def open_stored(store: BlockStore, manifest: Cid) -> Artifact:
    """Read and verify an artifact's manifest and token ids from ``store``. Raises NotFoundError and as open_artifact does."""
    envelope = store.read(manifest)
    token_cid = Envelope.decode(envelope).open().tokens.cid
    return open_artifact(manifest, envelope, store.read(token_cid) if token_cid is not None else None)


@asynccontextmanager
async def open_node(
    config: NodeConfig, *, serve_from: Callable[[Store], BlockStore] = lambda store: store
) -> AsyncIterator[Node]:
    """Run a node under ``config`` and yield it when it listens and has joined the DHT.

    ``serve_from`` may wrap the store that blocks are read from and written to: for tests and the demo's liar. Raises
    HomeLockedError, ListenError, UsageError, StoreError.
    """
    async with AsyncExitStack() as stack:
        # Off the event loop: an index that is made anew takes seconds, and the node may be told to end meanwhile.
        opening = open_store(config.home, quota=config.quota, go_on=trio.from_thread.check_cancelled)
        store = await in_thread(partial(stack.enter_context, opening))
        seed = await in_thread(partial(load_or_create_node_seed, config.home))
        network = await stack.enter_async_context(open_network(seed, config.listen, announce=config.announce))
        settings = BulkSettings(_first_host(config.listen) if config.bulk else None, config.bulk_port)
        lane = TlsBulkLane(settings, sign=signer_from_seed(seed))
        bulk = await stack.enter_async_context(lane.running()) if config.bulk else None
        routing = await stack.enter_async_context(open_routing(network, config.bootstrap))
        trust = HomeTrust(store.layout)
        context = Context(
            network=network,
            routing=routing,
            store=serve_from(store),
            catalog=store,
            judge=lambda manifest, cid: trust.judge(manifest, cid, time.time()),
            wall_clock=time.time,
            rng=random.SystemRandom(),
            offload=in_thread,
            bulk=bulk,
            agent=f"p2pkv-node/{__version__}",
        )
        nursery = await stack.enter_async_context(open_background())
        node = Node(config, store, network, routing, context, trust, nursery)
        context.gained = node.server.gained
        context.statements = partial(statements_of, node.trust.records)
        context.met = node.statements.hasten
        context.holder = node.trust.holder
        if config.mirror:
            context.share = node.share
        await node.obey()
        network.set_channel_handler(node.server.serve)
        nursery.start_soon(node.server.run)
        nursery.start_soon(node.announcer.run)
        nursery.start_soon(node.statements.run)
        nursery.start_soon(node.keep_below_quota)
        nursery.start_soon(node.resume_downloads)
        nursery.start_soon(node.keep_ready, *([bulk.prepare] if bulk is not None else []))
        await node.announce_stored()
        yield node


def _first_host(listen: Sequence[str]) -> str | None:
    """Return the IP address of the first listen address: the bulk lane listens where the operator asked, nowhere else."""
    parts = [address.split("/") for address in listen]
    return next((part[2] for part in parts if len(part) > 2 and part[1] in ("ip4", "ip6")), None)
