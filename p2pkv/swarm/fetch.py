"""One fetch: find providers, take the best manifest that is trusted, download its segments from all of them at once.

Runs the candidate and download engines over the ports. Everything happens in one task tree; engine calls and the handling
of their events are synchronous, so there is no moment at which engine and driver disagree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import trio

from p2pkv.artifact.assembly import Assembly
from p2pkv.artifact.match import Match
from p2pkv.artifact.read import Artifact
from p2pkv.download.engine import Ask, Completed, Download, Dropped, Snubbed, Want, Withdraw
from p2pkv.errors import FetchIncompleteError, NotFoundError, P2pkvError
from p2pkv.exchange.messages import DontHave, Have, Message
from p2pkv.formats.cid import Cid
from p2pkv.formats.segment import BlockRef
from p2pkv.limits import RARITY_DEADLINES
from p2pkv.ports import PeerAddress, PeerId
from p2pkv.swarm.company import ENOUGH_PROVIDERS, seek_company
from p2pkv.swarm.context import Context
from p2pkv.swarm.groups import first_error
from p2pkv.swarm.local import Arrivals, Leases, commit, intact
from p2pkv.swarm.manifests import Manifests
from p2pkv.swarm.pool import ProviderPool
from p2pkv.swarm.provider import Provider
from p2pkv.swarm.report import FetchEvent, FetchReport, FetchState, Matched, Refusal, SegmentReady
from p2pkv.swarm.target import MANIFEST_DEADLINE, NODE_DEADLINE, ManifestTarget, Target
from p2pkv.swarm.teller import Teller
from p2pkv.units import plural

# Reading a node takes milliseconds of this process. Those behind the first wait so long for the first block, which on a LAN
# comes sooner for it; elsewhere there is enough to ask for.
_FIRST_BLOCK_S = 0.02


class Fetch:
    """Call :meth:`run` once. ``emit`` hears of every state, match and complete segment, from the event loop."""

    def __init__(
        self,
        context: Context,
        target: Target,
        emit: Callable[[FetchEvent], None],
        *,
        download: Callable[[random.Random], Download] = Download,
    ) -> None:
        self._context = context
        self._target = target
        self._emit = emit
        self._arrivals = Arrivals(context)
        self._manifests = Manifests(context, target, self._arrivals)
        self._download = download(context.rng)
        self._changed = trio.Event()
        self._begun = trio.Event()  # the first block is here, or was waited for
        self._armed = -inf  # until when the loop sleeps
        self._opening: Cid | None = None  # the manifest being fetched or verified
        self._assembly: Assembly | None = None
        self._arrived_nodes: list[Cid] = []
        self._failure: P2pkvError | None = None
        self._doubtful = False  # the artifact may have been taken back meanwhile
        self._company = trio.CancelScope()
        self._searched = self._searched_manifest = False
        self._teller = Teller(emit, self._download)
        self._held: dict[PeerId, dict[Cid, Match]] = {}  # what providers said they have, by manifest

    async def run(
        self, patience_s: float, *, deliver: Callable[[FetchReport], None] = lambda report: None, linger_s: float = 0.0
    ) -> FetchReport:
        """Fetch until done, out of providers, or ``patience_s`` seconds have passed; the report says how far it came.

        ``deliver`` gets the report as soon as it is known. The streams are closed ``linger_s`` later: whoever waited for the
        report computes now, and closing costs every peer some work.

        A prompt target never raises for what peers or publishers do. A manifest target raises NotFoundError,
        FetchIncompleteError, UsageError for a slice that the artifact has not, or why the manifest was refused. Both raise
        DiskFullError or StoreError of our own disk.
        """
        self._leases = Leases(self._context, patience_s)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._context.asked[self._peer_asked] = None
                self._context.reconsider[self._reconsider] = None
                self._pool = ProviderPool(self._context, nursery, self, self._target.query_keys)
                with trio.move_on_after(patience_s):
                    await self._start()
                    while not await self._step():
                        await self._wait()
                self._company.cancel()
                report = await self._conclude(patience_s)
                deliver(report)
                if self._pool.providers:
                    await trio.sleep(linger_s)
                nursery.cancel_scope.cancel()
        except* P2pkvError as group:
            raise first_error(group) from None
        finally:
            self._context.asked.pop(self._peer_asked, None)
            self._context.reconsider.pop(self._reconsider, None)
            await self._leases.shorten()
        return report

    async def _conclude(self, patience_s: float) -> FetchReport:
        """Commit what is here, and say how far it came."""
        self._teller.refusals += (Refusal.of(cid, error) for cid, error in self._manifests.superseded())
        report = self._teller.report(self._pool)
        if (assembly := self._assembly) is not None:
            held = await commit(self._context, assembly)
            if isinstance(self._target, ManifestTarget) and report.segments < assembly.segment_count:
                raise FetchIncompleteError(f"{report.segments} of {assembly.segment_count} segments are here")
            report = replace(report, complete=len(held) == len(self._artifact.manifest.segments))
        elif isinstance(self._target, ManifestTarget):
            raise NotFoundError(f"{self._target.manifest} was not found within {patience_s:.0f} s")
        self._teller.show(FetchState.DONE, "")
        return report

    # --- the loop ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if isinstance(self._target, ManifestTarget):
            await self._open(self._target.manifest)
            return
        for match in await self._context.offload(lambda: self._context.catalog.match(self._target.query_keys)):
            self._manifests.offer("ourselves", match)

    async def _step(self) -> bool:
        """Do whatever can be done now; return whether the fetch is over."""
        self._download.handle_timer(trio.current_time())
        self._drain()
        if self._failure is not None:
            raise self._failure
        if self._doubtful:
            self._judge_again()
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
        timers = (self._download.get_timer(), self._manifests.get_timer(self._opening))
        self._armed = min((timer for timer in timers if timer is not None), default=inf)
        with trio.move_on_at(self._armed):
            await self._changed.wait()
        self._armed = -inf
        self._changed = trio.Event()

    def _drain(self) -> None:
        """Carry out what the download engine decided."""
        while (event := self._download.next_event()) is not None:
            match event:
                case Ask(peer, cids):
                    self._pool.providers[peer].want(cids, self._download.expected_size)
                case Withdraw(peer, cids):
                    if peer in self._pool.providers:
                        self._pool.providers[peer].cancel(cids)
                case Completed(cid, _):
                    self._complete(cid)
                case Dropped(peer):
                    self._pool.ban(peer)
                case Snubbed(peer, blocks):
                    detail = f"{peer} is silent; asking others for its {plural(blocks, 'block')}"
                    self._teller.show(FetchState.TRANSFERRING, detail)
        timer = self._download.get_timer()
        if timer is not None and timer < self._armed:
            self._changed.set()

    def _complete(self, cid: Cid) -> None:
        if self._assembly is None or cid in self._assembly.missing_nodes:
            self._arrived_nodes.append(cid)
            self._changed.set()
            return
        first = self._teller.mark("first_block_s")
        self._begun.set()
        for index in self._assembly.add_block(cid):
            self._emit(SegmentReady(index, self._assembly.blocks(index)))
            self._changed.set()
        self._teller.show_transfer(len(self._pool.providers), often=not first)

    def _search(self, lookups: Sequence[bytes]) -> None:
        """Look for providers, once."""
        if not self._searched:
            self._searched = True
            self._pool.greet()
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
        silent = self._target.impatient and self._download.stalled
        return self._searched and not self._pool.searching and (self._download.stuck or silent)

    # --- the manifest --------------------------------------------------------------------------------------------------

    async def _find_manifest(self) -> bool:
        """Open the best manifest on offer; return whether there is none and never will be."""
        if self._opening is not None:
            await self._open_arrived()
            return False
        cid = self._manifests.next(searching=self._pool.searching or not self._searched)
        if cid is not None:
            await self._open(cid)
            return False
        self._search(self._target.lookup_keys)
        self._teller.show(FetchState.LOOKING_UP, f"{self._pool.found} found, {len(self._pool.providers)} reachable")
        return not self._pool.searching and not self._manifests.on_offer

    async def _open(self, cid: Cid) -> None:
        """Begin with a manifest: verify it where it is here, else ask for it."""
        self._opening = cid
        self._nursery.start_soon(self._leases.take, cid)
        if await intact(self._context, [cid]):
            self._complete(cid)
            return
        self._teller.show(FetchState.OPENING, str(cid))
        self._search(self._target.lookup_keys)
        self._want([Want(cid, None, MANIFEST_DEADLINE)])

    async def _open_arrived(self) -> None:
        """Verify and judge a manifest that has arrived; one that is refused gives way to the next candidate."""
        cid = self._opening
        assert cid is not None, "called only while a manifest is being opened"
        if not self._arrived_nodes:
            if self._manifests.give_up_rival(cid):
                self._download.discard_wants()
                self._opening = None
                self._changed.set()
            elif self._given_up():
                self._refuse(cid, NotFoundError(f"none of {self._pool.found} providers found could send {cid}"))
            return
        self._arrived_nodes.clear()
        try:
            found = await self._manifests.read(cid)
            if isinstance(found, Artifact):
                self._accept(found)
        except P2pkvError as error:
            self._refuse(cid, error)
            return
        match found:
            case Artifact():
                await self._want_nodes()
            case Want():
                self._want([found])
            case Cid():
                await self._open(found)

    def _accept(self, artifact: Artifact) -> None:
        assembly = self._target.assemble(artifact)
        self._teller.mark("manifest_s")
        self._assembly = self._teller.assembly = assembly
        self._pool.settle()
        self._company = trio.CancelScope()
        # Whoever has some layers has no whole segment, and does not say that it has.
        seek = partial(seek_company, share=assembly.all_layers)
        self._nursery.start_soon(seek, self._context, self._pool, artifact, self._company)
        self._emit(Matched(artifact, assembly.hit_tokens, assembly.segment_count))

    def _refuse(self, cid: Cid, error: P2pkvError) -> None:
        if isinstance(self._target, ManifestTarget):
            raise error
        self._teller.refusals.append(Refusal.of(cid, error))
        self._manifests.refuse(cid)
        self._download.discard_wants()
        self._arrived_nodes.clear()
        self._company.cancel()
        self._assembly = self._teller.assembly = None
        self._opening = None
        self._pool.resume()
        self._drain()
        self._changed.set()

    def _reconsider(self) -> None:
        """Something new is known of some publisher."""
        self._doubtful = True
        self._changed.set()

    def _judge_again(self) -> None:
        """Refuse the artifact that is being fetched, where its publisher has taken it back meanwhile."""
        self._doubtful = False
        if self._assembly is None:
            return  # it is judged when it is opened
        artifact = self._artifact
        try:
            self._context.judge(artifact.manifest, artifact.cid).require()
        except P2pkvError as error:
            self._refuse(artifact.cid, error)

    # --- nodes and blocks ----------------------------------------------------------------------------------------------

    async def _want_nodes(self) -> None:
        assembly = self._assembly
        assert assembly is not None, "there are no nodes to want before the manifest is open"
        nodes = list(assembly.missing_nodes)
        here = await intact(self._context, nodes)
        self._arrived_nodes += (cid for cid in nodes if cid in here)
        self._changed.set()
        # In an order of chance: consumers who start together begin with the blocks of different segments.
        turns = ((cid, NODE_DEADLINE + i // RARITY_DEADLINES) for i, cid in enumerate(nodes))
        self._want([Want(cid, None, turn) for cid, turn in turns if cid not in here])

    async def _open_nodes(self) -> bool:
        """Work the segment nodes that have arrived into wants for their blocks; ``False`` when one refutes the manifest."""
        while self._assembly is not None and self._arrived_nodes:
            cid = self._arrived_nodes.pop(0)
            try:
                node = await self._arrivals.read(cid)
                if node is None:
                    self._want([Want(cid, None, NODE_DEADLINE)])
                    continue
                refs = self._assembly.add_node(cid, node)
            except P2pkvError as error:
                self._refuse(self._assembly.artifact.cid, error)
                return False
            await self._want_blocks(refs)  # node by node, so that blocks travel while the next node is read
            with trio.move_on_after(_FIRST_BLOCK_S):
                await self._begun.wait()
            self._begun.set()
        return True

    async def _want_blocks(self, refs: Sequence[tuple[int, BlockRef]]) -> None:
        here = await intact(self._context, [ref.cid for _, ref in refs])
        for cid, size in {ref.cid: ref.size for _, ref in refs if ref.cid in here}.items():
            self._teller.local_bytes += size
            self._complete(cid)
        missing = [(index, ref) for index, ref in refs if ref.cid not in here]
        for peer in self._held:
            self._note_lacks(peer, [(index, ref.cid) for index, ref in missing])
        self._want([Want(ref.cid, ref.size, self._target.deadline(index)) for index, ref in missing])
        self._teller.show_transfer(len(self._pool.providers))

    def _note_lacks(self, peer: PeerId, blocks: Sequence[tuple[int, Cid]]) -> None:
        """Ask ``peer`` for none of the ``blocks`` in segments that it said it does not hold."""
        match = self._held[peer].get(self._artifact.cid)
        if match is not None and match.segments == len(self._artifact.manifest.segments):
            self._download.receive_lacks(peer, [cid for index, cid in blocks if not match.holds(index)])

    def _want(self, wants: Sequence[Want]) -> None:
        self._download.add_wants(wants, trio.current_time())
        self._drain()

    # --- what the pool reports -----------------------------------------------------------------------------------------

    def missing_bytes(self) -> int:
        return self._assembly.total_bytes - self._assembly.done_bytes if self._assembly is not None else 0

    def search_changed(self) -> None:
        self._changed.set()

    def provider_joined(self, provider: Provider) -> None:
        self._teller.mark("first_provider_s")
        self._download.add_peer(provider.peer_id, trio.current_time())
        self._drain()

    def provider_left(self, peer: PeerId) -> None:
        self._held.pop(peer, None)
        self._download.remove_peer(peer, trio.current_time())
        self._drain()
        if self._assembly is not None and self._download.missing:
            self._teller.show_transfer(len(self._pool.providers))
        self._changed.set()

    def provider_matched(self, provider: Provider, match: Match) -> None:
        self._manifests.offer(provider.peer_id, match)
        self._held.setdefault(provider.peer_id, {})[match.manifest] = match
        if self._assembly is not None:
            blocks = [(i, cid) for i in self._assembly.opened for cid in self._assembly.blocks(i)]
            self._note_lacks(provider.peer_id, blocks)
        self._changed.set()

    def provider_said(self, provider: Provider, message: Message) -> None:
        if isinstance(message, DontHave):
            self._download.receive_dont_have(provider.peer_id, message.cids, trio.current_time())
            self._changed.set()
        elif isinstance(message, Have):
            self._download.receive_have(provider.peer_id, message.cids, trio.current_time())
        self._drain()

    def provider_delivered(self, provider: Provider, blocks: Sequence[tuple[Cid, int]]) -> None:
        self._context.gained(cid for cid, _ in blocks)
        self._download.receive_blocks(provider.peer_id, blocks, trio.current_time())
        self._drain()

    def provider_lied(self, provider: Provider, cid: Cid) -> None:
        self._teller.blocks_refused += 1
        self._context.tally.blocks_refused += 1
        self._download.receive_lie(provider.peer_id, trio.current_time())
        self._drain()

    def store_failed(self, error: P2pkvError) -> None:
        self._failure = error
        self._changed.set()

    def _peer_asked(self, peer: PeerId, cids: Sequence[Cid]) -> None:
        """A peer asks us for what we are fetching: it has other parts of it, or will have them."""
        ours = bool(cids) and self._assembly is not None and self._assembly.names(cids[0])
        if ours and len(self._pool.providers) < ENOUGH_PROVIDERS:
            self._pool.meet(PeerAddress(peer))

    @property
    def _artifact(self) -> Artifact:
        assert self._assembly is not None, "asked for only when a manifest was accepted"
        return self._assembly.artifact
