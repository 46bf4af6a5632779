"""One fetch: find providers, take the best manifest that is trusted, download its segments from all of them at once.

Runs the candidate and download engines over the ports. Everything happens in one task tree; engine calls and the handling
of their events are synchronous, so there is no moment at which engine and driver disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from p2pkv.artifact.assembly import Assembly
from p2pkv.artifact.match import Match
from p2pkv.artifact.read import Artifact, check_model, open_manifest
from p2pkv.download.engine import Ask, Completed, Download, Dropped, Snubbed, Want, Withdraw
from p2pkv.errors import FetchIncompleteError, IntegrityError, NotFoundError, P2pkvError
from p2pkv.exchange.messages import DontHave, Have, Message
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.segment import BlockRef
from p2pkv.limits import MAX_SEGMENTS
from p2pkv.ports import PeerId
from p2pkv.routing.candidates import Candidates
from p2pkv.swarm.context import Context
from p2pkv.swarm.groups import first_error
from p2pkv.swarm.pool import ProviderPool
from p2pkv.swarm.provider import Provider
from p2pkv.swarm.report import FetchEvent, FetchReport, FetchState, Matched, Progress, Refusal, SegmentReady
from p2pkv.swarm.target import ManifestTarget, PromptTarget, Target
from p2pkv.trust.policy import judge
from p2pkv.units import plural

# Progress is for eyes: more often than this nobody sees it, and each costs the transfer a little.
_PROGRESS_INTERVAL_S = 0.05
# With this many providers connected, looking for more under the manifest CID is not worth its messages.
_ENOUGH_PROVIDERS = 3
# Nodes come before all blocks, in the order of their segments, since they tell which blocks there are.
_FIRST_NODE = -MAX_SEGMENTS - 1
_MANIFEST = _FIRST_NODE - 1
_LOCAL = "local"


class Fetch:
    """Call :meth:`run` once. ``emit`` hears of every state, match and complete segment, from the event loop."""

    def __init__(self, context: Context, target: Target, emit: Callable[[FetchEvent], None]) -> None:
        self._context = context
        self._target = target
        self._emit = emit
        self._candidates = Candidates(target.best_match)
        self._download = Download(context.rng)
        self._changed = trio.Event()
        self._opening: Cid | None = None  # the manifest being fetched or verified
        self._assembly: Assembly | None = None
        self._arrived_nodes: list[Cid] = []
        self._refusals: list[Refusal] = []
        self._failure: P2pkvError | None = None
        self._searched = False
        self._searched_manifest = False
        self._local_bytes = 0
        self._blocks_refused = 0
        self._started = trio.current_time()
        self._shown = 0.0
        self._times: dict[str, float] = {}

    async def run(
        self, patience_s: float, *, deliver: Callable[[FetchReport], None] = lambda report: None, linger_s: float = 0.0
    ) -> FetchReport:
        """Fetch until done, out of providers, or ``patience_s`` seconds have passed; the report says how far it came.

        ``deliver`` gets the report as soon as it is known. The streams are closed ``linger_s`` later: whoever waited for the
        report computes now, and closing costs every peer some work.

        A prompt target never raises for what peers or publishers do. A manifest target raises NotFoundError,
        FetchIncompleteError, or why the manifest was refused. Both raise DiskFullError or StoreError of our own disk.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._pool = ProviderPool(self._context, nursery, self, self._target.query_keys)
                with trio.move_on_after(patience_s):
                    await self._start()
                    while not await self._step():
                        await self._wait()
                report = await self._conclude(patience_s)
                deliver(report)
                if self._pool.providers:
                    await trio.sleep(linger_s)
                nursery.cancel_scope.cancel()
        except* P2pkvError as group:
            raise first_error(group) from None
        return report

    async def _conclude(self, patience_s: float) -> FetchReport:
        """Commit what is here, and say how far it came."""
        report = self._report()
        if self._assembly is not None:
            held = frozenset(self._assembly.held())
            await self._context.offload(lambda: self._context.catalog.add_artifact(self._artifact, held))
        elif isinstance(self._target, ManifestTarget):
            raise NotFoundError(f"{self._target.manifest} was not found within {patience_s:.0f} s")
        if isinstance(self._target, ManifestTarget) and report.hit_tokens < self._artifact.manifest.tokens.count:
            raise FetchIncompleteError(f"{report.segments} of {len(self._artifact.manifest.segments)} segments are here")
        self._show(FetchState.DONE, "")
        return report

    # --- the loop ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if isinstance(self._target, ManifestTarget):
            await self._open(self._target.manifest)
            return
        local = await self._context.offload(lambda: self._context.catalog.match(self._target.query_keys))
        for match in local:
            self._candidates.add(_LOCAL, match, self._now())

    async def _step(self) -> bool:
        """Do whatever can be done now; return whether the fetch is over."""
        self._download.handle_timer(self._now())
        self._drain()
        if self._failure is not None:
            raise self._failure
        if self._assembly is None:
            return await self._find_manifest()
        if not await self._open_nodes():
            return False  # the manifest was refused for one of its nodes
        if self._assembly.complete:
            return True
        self._search(self._target.lookup_keys)
        if not self._given_up():
            return False
        if self._searched_manifest:
            return True
        self._search_manifest()  # others may have it who were not needed so far
        return False

    async def _wait(self) -> None:
        timers = (self._download.get_timer(), self._candidates.get_timer() if self._opening is None else None)
        deadline = min((timer for timer in timers if timer is not None), default=None)
        with trio.CancelScope() if deadline is None else trio.move_on_at(deadline):
            await self._changed.wait()
        self._changed = trio.Event()

    def _drain(self) -> None:
        """Carry out what the download engine decided."""
        while (event := self._download.next_event()) is not None:
            match event:
                case Ask(peer, cids):
                    self._pool.providers[peer].want(cids, self._download.expected_size)
                    self._changed.set()  # there is a timer now
                case Withdraw(peer, cids):
                    if peer in self._pool.providers:
                        self._pool.providers[peer].cancel(cids)
                case Completed(cid, _):
                    self._complete(cid)
                case Dropped(peer):
                    self._pool.ban(peer)
                case Snubbed(peer, blocks):
                    self._show(FetchState.TRANSFERRING, f"{peer} is silent; asking others for its {blocks} blocks")

    def _complete(self, cid: Cid) -> None:
        if self._assembly is None or cid in self._assembly.missing_nodes:
            self._arrived_nodes.append(cid)
            self._changed.set()
            return
        self._mark("first_block_s")
        for index in self._assembly.add_block(cid):
            self._emit(SegmentReady(index, self._assembly.blocks(index)))
            self._changed.set()
        if self._now() - self._shown > _PROGRESS_INTERVAL_S:
            self._show(FetchState.TRANSFERRING, self._waiting_for())

    def _search(self, lookups: Sequence[bytes]) -> None:
        """Look for providers, once."""
        if not self._searched:
            self._searched = True
            self._pool.search(lookups, hopeful=self._target.hopeful)

    def _search_manifest(self) -> None:
        """Look for whoever has the chosen artifact, once."""
        if not self._searched_manifest:
            self._searched_manifest = True
            self._pool.search([self._artifact.cid.multihash], hopeful=1)

    def _given_up(self) -> bool:
        """Whether nobody is left who could send what is missing, and nobody is being looked for.

        A prompt does not wait for peers that have fallen silent: computing is there as well, and sooner.
        """
        silent = isinstance(self._target, PromptTarget) and self._download.stalled
        return self._searched and not self._pool.searching and (self._download.stuck or silent)

    # --- the manifest --------------------------------------------------------------------------------------------------

    async def _find_manifest(self) -> bool:
        """Open the best manifest on offer; return whether there is none and never will be."""
        if self._opening is not None:
            await self._open_arrived()
            return False
        searching = self._pool.searching or not self._searched
        candidate = self._candidates.choose(self._now(), searching=searching)
        if candidate is not None:
            await self._open(candidate.manifest)
            return False
        self._search(self._target.lookup_keys)
        self._show(FetchState.LOOKING_UP, f"{self._pool.found} found, {len(self._pool.providers)} reachable")
        return not self._pool.searching and not self._candidates

    async def _open(self, cid: Cid) -> None:
        """Begin with a manifest: verify it where it is here, else ask for it."""
        self._opening = cid
        if await self._intact([cid]):
            self._complete(cid)
            return
        self._show(FetchState.OPENING, str(cid))
        self._search(self._target.lookup_keys)
        self._want([Want(cid, None, _MANIFEST)])

    async def _open_arrived(self) -> None:
        """Verify and judge a manifest that has arrived; one that is refused gives way to the next candidate."""
        cid = self._opening
        assert cid is not None, "called only while a manifest is being opened"
        if not self._arrived_nodes:
            if self._given_up():
                self._refuse(cid, NotFoundError(f"none of {self._pool.found} providers found could send {cid}"))
            return
        self._arrived_nodes.clear()
        try:
            envelope = await self._read(cid)
            manifest = Envelope.decode(envelope).open()
            judge(manifest, self._context.trusted(), self._context.wall_clock())
            if isinstance(self._target, PromptTarget):
                check_model(manifest, self._target.model_id, self._target.dtype)
            token_block = await self._token_block(manifest)
            if token_block is None and manifest.tokens.cid is not None:
                return
            self._accept(open_manifest(cid, manifest, token_block))
        except P2pkvError as error:
            self._refuse(cid, error)
            return
        await self._want_nodes()
        if len(self._pool.providers) < _ENOUGH_PROVIDERS and self._searched:
            self._search_manifest()

    async def _token_block(self, manifest: Manifest) -> bytes | None:
        """Return the token ids' block where the manifest has one and it is here; otherwise it is asked for."""
        cid = manifest.tokens.cid
        if cid is None:
            return None
        if await self._intact([cid]):
            return await self._read(cid)
        self._want([Want(cid, 4 * manifest.tokens.count, _MANIFEST)])
        return None

    def _accept(self, artifact: Artifact) -> None:
        hit = artifact.manifest.tokens.count
        if isinstance(self._target, PromptTarget):
            hit = artifact.usable_prefix(self._target.token_ids, self._target.shared)
        if hit == 0:
            raise NotFoundError("the artifact shares no whole segment with the prompt")
        self._mark("manifest_s")
        self._assembly = Assembly(artifact, hit)
        self._pool.settle()
        self._emit(Matched(artifact, hit, self._assembly.segment_count))

    def _refuse(self, cid: Cid, error: P2pkvError) -> None:
        if isinstance(self._target, ManifestTarget):
            raise error
        self._refusals.append(Refusal(str(cid), error.code, error.message, error.advice))
        self._download.discard_wants()
        self._arrived_nodes.clear()
        self._assembly = None
        self._opening = None
        self._drain()
        self._changed.set()

    # --- nodes and blocks ----------------------------------------------------------------------------------------------

    async def _want_nodes(self) -> None:
        assembly = self._assembly
        assert assembly is not None, "there are no nodes to want before the manifest is open"
        nodes = list(assembly.missing_nodes)
        here = await self._intact(nodes)
        self._arrived_nodes += here
        self._changed.set()
        self._want([Want(cid, None, _FIRST_NODE + i) for i, cid in enumerate(nodes) if cid not in here])

    async def _open_nodes(self) -> bool:
        """Work the segment nodes that have arrived into wants for their blocks; ``False`` when one refutes the manifest."""
        while self._assembly is not None and self._arrived_nodes:
            cid = self._arrived_nodes.pop(0)
            try:
                refs = self._assembly.add_node(cid, await self._read(cid))
            except P2pkvError as error:
                self._refuse(self._assembly.artifact.cid, error)
                return False
            await self._want_blocks(refs)  # node by node, so that blocks travel while the next node is read
        return True

    async def _want_blocks(self, refs: Sequence[tuple[int, BlockRef]]) -> None:
        here = await self._intact([ref.cid for _, ref in refs])
        for cid, size in {ref.cid: ref.size for _, ref in refs if ref.cid in here}.items():
            self._local_bytes += size
            self._complete(cid)
        self._want([Want(ref.cid, ref.size, index) for index, ref in refs if ref.cid not in here])
        self._show(FetchState.TRANSFERRING, self._waiting_for())

    def _want(self, wants: Sequence[Want]) -> None:
        self._download.add_wants(wants, self._now())
        self._drain()

    async def _intact(self, cids: Sequence[Cid]) -> set[Cid]:
        """Return those of ``cids`` that are in the store and still have their hash."""
        store = self._context.store

        def intact(cid: Cid) -> bool:
            if not store.has(cid):
                return False
            try:
                store.read(cid)
            except (NotFoundError, IntegrityError):
                return False
            return True

        return await self._context.offload(lambda: {cid for cid in cids if intact(cid)})

    async def _read(self, cid: Cid) -> bytes:
        return await self._context.offload(lambda: self._context.store.read(cid))

    # --- what the pool reports -----------------------------------------------------------------------------------------

    def search_changed(self) -> None:
        self._changed.set()

    def provider_joined(self, provider: Provider) -> None:
        self._mark("first_provider_s")
        self._download.add_peer(provider.peer_id, self._now())
        self._drain()

    def provider_left(self, peer: PeerId) -> None:
        self._download.remove_peer(peer, self._now())
        self._drain()
        self._changed.set()

    def provider_matched(self, provider: Provider, match: Match) -> None:
        self._candidates.add(provider.peer_id, match, self._now())
        self._changed.set()

    def provider_said(self, provider: Provider, message: Message) -> None:
        match message:
            case DontHave(cids):
                self._download.receive_dont_have(provider.peer_id, cids, self._now())
                self._changed.set()
            case Have(cids):
                self._download.receive_have(provider.peer_id, cids, self._now())
            case _:
                pass
        self._drain()

    def provider_delivered(self, provider: Provider, cid: Cid, size: int) -> None:
        self._context.gained((cid,))
        self._download.receive_block(provider.peer_id, cid, size, self._now())
        self._drain()

    def provider_lied(self, provider: Provider, cid: Cid) -> None:
        self._blocks_refused += 1
        self._download.receive_lie(provider.peer_id, self._now())
        self._drain()

    def store_failed(self, error: P2pkvError) -> None:
        self._failure = error
        self._changed.set()

    # --- telling -------------------------------------------------------------------------------------------------------

    @property
    def _artifact(self) -> Artifact:
        assert self._assembly is not None, "asked for only when a manifest was accepted"
        return self._assembly.artifact

    def _now(self) -> float:
        return trio.current_time()

    def _mark(self, name: str) -> None:
        """Note when something happened for the first time."""
        self._times.setdefault(name, self._now() - self._started)

    def _waiting_for(self) -> str:
        return f"waiting for {plural(self._download.missing, 'block')} of {plural(len(self._pool.providers), 'peer')}"

    def _show(self, state: FetchState, detail: str) -> None:
        self._shown = self._now()
        done = self._assembly.done_bytes if self._assembly else 0
        total = self._assembly.total_bytes if self._assembly else 0
        self._emit(Progress(state, detail, done, total, self._download.progress()))

    def _report(self) -> FetchReport:
        self._mark("done_s")
        segments, hit_tokens = self._assembly.usable() if self._assembly else (0, 0)
        progress = self._download.progress()
        return FetchReport(
            artifact=self._assembly.artifact if self._assembly else None,
            hit_tokens=hit_tokens,
            segments=segments,
            local_bytes=self._local_bytes,
            bytes_by_peer={p.peer: p.bytes for p in progress if p.bytes},
            rate_by_peer={p.peer: p.rate for p in progress if p.bytes},
            duplicate_bytes=self._download.duplicate_bytes,
            blocks_refused=self._blocks_refused,
            peers_lost=len(self._pool.lost),
            peers_dropped=tuple(self._pool.dropped),
            refusals=tuple(self._refusals),
            times=dict(self._times),
        )
