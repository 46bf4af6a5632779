"""The provider's driver: answers queries and serves wants on each channel that a peer opens.

What is sent next is decided by the scheduler alone (:mod:`p2pkv.upload.scheduler`); a block is read from the store when it is
granted and its lane or stream takes it, and not before.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import trio

from p2pkv.errors import IntegrityError, MachineError, NotFoundError, PeerUnreachableError, ProtocolError
from p2pkv.exchange.connection import BULK, ProviderConnection
from p2pkv.exchange.messages import (
    BLOCK_HEADER_BYTES,
    AskStatements,
    BulkClosed,
    BulkOffered,
    BulkRequest,
    Cancel,
    ErrorMessage,
    Message,
    Query,
    WantBlocks,
    block_header,
)
from p2pkv.formats.cid import Cid, Codec
from p2pkv.limits import (
    HELLO_TIMEOUT_S,
    MAX_QUERIES_AT_ONCE,
    MAX_QUERY_MATCHES,
    MAX_STREAMS_PER_PEER,
    UPLOAD_QUANTUM_BYTES,
)
from p2pkv.ports import Channel, PeerId
from p2pkv.swarm.context import Context
from p2pkv.swarm.lane import Lane
from p2pkv.units import KIB
from p2pkv.upload.rates import RateMeter
from p2pkv.upload.scheduler import Grant, Scheduler, Stream

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Small messages are worked on in pieces of this, so that a storm of them does not hold up the event loop: some milliseconds.
_PIECE_BYTES = 16 * KIB
# A peer that broke the rules is not waited for longer than this before its channel is closed.
_REFUSAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """What this node has served since it started, and what it serves now.

    Rates are in bytes per second; ``outstanding_by_peer`` are bytes that were granted and are not sent yet.
    """

    channels: int
    blocks: int
    bytes: int
    refused: int
    rate: float
    outstanding_by_peer: Mapping[PeerId, int]
    rate_by_peer: Mapping[PeerId, float]


class Server:
    """Serves every channel until it ends. One instance per node; :meth:`run` keeps its limits, in bytes per second."""

    def __init__(self, context: Context, *, limit: float = math.inf, limit_per_peer: float = math.inf) -> None:
        self._context = context
        self.scheduler = Scheduler(trio.current_time(), limit=limit, limit_per_peer=limit_per_peer)
        self._sessions: dict[Stream, _Session] = {}  # in the order opened, so that equal seeds give equal traces
        self._streams: dict[PeerId, int] = {}
        self._query_turns: dict[PeerId, trio.Lock] = {}
        self._query_slots = trio.Semaphore(MAX_QUERIES_AT_ONCE)
        self._timer_changed = trio.Event()
        self._meter = RateMeter()
        self._meters: dict[PeerId, RateMeter] = {}
        self.blocks = 0
        self.bytes = 0
        self.refused = 0

    async def run(self) -> None:
        """Grant again what a limit of the rate has held back, when it is time. For ever."""
        while True:
            timer = self.scheduler.get_timer()
            with trio.move_on_at(math.inf if timer is None else timer) as sleep:
                await self._timer_changed.wait()
            self._timer_changed = trio.Event()
            if sleep.cancelled_caught:
                self.grant()

    async def serve(self, channel: Channel) -> None:
        """Serve one channel until the peer closes it or breaks the rules. Raises nothing for what a peer does."""
        peer = channel.peer_id
        if self._streams.get(peer, 0) >= MAX_STREAMS_PER_PEER:
            self.refused += 1
            await channel.aclose()
            return
        self._streams[peer] = self._streams.get(peer, 0) + 1
        self._query_turns.setdefault(peer, trio.Lock())
        self._meters.setdefault(peer, RateMeter())
        session = _Session(self, self._context, channel)
        self._sessions[session.stream] = session
        try:
            await session.run()
        finally:
            del self._sessions[session.stream]
            self.scheduler.close(session.stream, trio.current_time())
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer], self._query_turns[peer], self._meters[peer]
            self.grant()

    def gained(self, cids: Iterable[Cid]) -> None:
        """Push haves to the peers that asked for ``cids`` in vain."""
        news = tuple(cids)
        for session in self._sessions.values():
            session.gained(news)

    def statistics(self) -> ServerStatistics:
        outstanding = self.scheduler.outstanding_by_peer()
        now = trio.current_time()
        rates = {peer: meter.rate(now) for peer, meter in self._meters.items()}
        rate = self._meter.rate(now)
        return ServerStatistics(len(self._sessions), self.blocks, self.bytes, self.refused, rate, outstanding, rates)

    # --- for sessions --------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Hand out what may be sent now; after whatever changes that."""
        before = self.scheduler.get_timer()
        granted: dict[_Session, list[Grant]] = {}
        for grant in self.scheduler.grant(trio.current_time()):
            granted.setdefault(self._sessions[grant.stream], []).append(grant)
        for session, grants in granted.items():
            session.granted(grants)
        if self.scheduler.get_timer() != before:
            self._timer_changed.set()

    def count(self, peer: PeerId, blocks: int, size: int) -> None:
        """Take note of what was sent to ``peer``, which may have left meanwhile."""
        now = trio.current_time()
        self.blocks += blocks
        self.bytes += size
        self._meter.add(size, now)
        if peer in self._meters:
            self._meters[peer].add(size, now)

    async def look_up(self, peer: PeerId, work: Callable[[], T]) -> T:
        """Do the work of answering a question: one at a time for each peer, few at a time for all."""
        async with self._query_turns[peer], self._query_slots:
            return await self._context.offload(work)


class _Session:
    """One channel being served."""

    def __init__(self, server: Server, context: Context, channel: Channel) -> None:
        self._server = server
        self._context = context
        self._channel = channel
        self.stream = server.scheduler.open(channel.peer_id, trio.current_time())
        features = frozenset({BULK}) if context.bulk is not None else frozenset()
        self._connection = ProviderConnection(context.agent, features)
        self._granted: deque[Grant] = deque()  # for the channel
        self._lanes: list[Lane] = []
        self._lanes_closed = False  # the peer reads none any more
        self._over = False
        self._wake = trio.Event()
        self._all_said = trio.Event()

    def gained(self, cids: tuple[Cid, ...]) -> None:
        self._connection.gained(cids)
        self._wake.set()

    def granted(self, grants: Sequence[Grant]) -> None:
        """Send over a lane where there is one; nodes are small and stay on the stream, whose frames bound their size."""
        over_lane: list[Grant] = []
        for grant in grants:
            (over_lane if self._lanes and grant.cid.codec is Codec.RAW else self._granted).append(grant)
        if over_lane:
            min(self._lanes, key=lambda lane: lane.outstanding).send(over_lane)
        if self._granted:
            self._wake.set()

    def sent(self, blocks: int, size: int, granted: int, missing: Sequence[Cid]) -> None:
        """Blocks of ``size`` bytes together have gone out, of ``granted`` bytes; those that are missing have not."""
        self._server.count(self._channel.peer_id, blocks, size)
        if missing:
            self._connection.dont_have(missing)
            self._wake.set()
        self._server.scheduler.sent(self.stream, granted, trio.current_time())
        self._server.grant()

    def read_block(self, cid: Cid, buffer: memoryview) -> int:
        """Read a block into ``buffer``; return 0 where it is not here. For worker threads."""
        try:
            return self._context.store.read_into(cid, buffer)
        except (NotFoundError, IntegrityError):
            return 0  # a damaged block is as good as none, and is never served
        except MachineError as error:
            logger.warning("block %s cannot be served: %s", cid, error)
            return 0

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                try:
                    await self._receive()
                except ProtocolError as error:
                    await self._refuse(error)
                nursery.cancel_scope.cancel()
        except* PeerUnreachableError:
            pass  # the peer left; nothing to tell anybody
        finally:
            self._over = self._lanes_closed = True
            for lane in tuple(self._lanes):
                lane.close()
            await self._channel.aclose()

    async def _refuse(self, error: ProtocolError) -> None:
        """Tell the peer what rule it broke, behind what is being sent, if it reads that soon; and log it."""
        self._server.refused += 1
        logger.info("refused %s: %s [%s]", self._channel.peer_id, error.message, error.code)
        self._connection.fail(error)
        self._over = True
        self._wake.set()
        with trio.move_on_after(_REFUSAL_S):
            await self._all_said.wait()

    # --- what the peer says --------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        with trio.move_on_after(HELLO_TIMEOUT_S) as patience:
            while data := await self._channel.receive():
                for start in range(0, len(data), _PIECE_BYTES):
                    for message in self._connection.receive_data(data[start : start + _PIECE_BYTES]):
                        patience.deadline = math.inf
                        if isinstance(message, ErrorMessage):
                            logger.info("%s gave up: %s [%s]", self._channel.peer_id, message.message, message.code)
                            return
                        await self._handle(message)
                    self._server.grant()
                    self._wake.set()
                    await trio.lowlevel.checkpoint()
        if patience.cancelled_caught:
            raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:.0f} s")

    async def _handle(self, message: Message) -> None:
        match message:
            case WantBlocks(cids):
                for hear in tuple(self._context.asked):
                    hear(self._channel.peer_id, cids)
                self._want(cids)
            case Cancel(cids):
                self._server.scheduler.cancel(self.stream, cids)
            case Query(request, keys):
                matches = await self._server.look_up(self._channel.peer_id, partial(self._context.catalog.match, keys))
                offered = (match for match in matches if match.manifest not in self._context.withheld)
                self._connection.answer(request, [*islice(offered, MAX_QUERY_MATCHES)])
            case AskStatements(request, publisher, known):
                work = partial(self._context.statements, publisher, known)
                self._connection.tell_statements(request, await self._server.look_up(self._channel.peer_id, work))
            case BulkRequest():
                self._offer_lane()
            case BulkClosed():
                self._close_lanes()
            case _:
                pass

    def _want(self, cids: Sequence[Cid]) -> None:
        sizes = [(cid, self._size(cid)) for cid in cids]
        self._server.scheduler.want(self.stream, [(cid, size) for cid, size in sizes if size is not None], trio.current_time())
        self._connection.dont_have([cid for cid, size in sizes if size is None])

    def _size(self, cid: Cid) -> int | None:
        """Return the bytes of a block, ``None`` for one that is not here."""
        store = self._context.store
        try:
            return store.size(cid) if cid not in self._context.withheld and store.has(cid) else None
        except NotFoundError:
            return None  # another thread found it damaged between the two look-ups

    def _offer_lane(self) -> None:
        lane = Lane(self)
        bulk = None if self._lanes_closed else self._context.bulk
        offer = None if bulk is None else bulk.offer(self._channel.peer_id, lane, want_sender=lane.attach)
        self._connection.offer_bulk(BulkOffered(offer.port, offer.token, offer.fingerprint) if offer else None)

    # --- over the stream -----------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            data = self._connection.data_to_send()
            if data:
                await self._channel.send(data)
            elif self._over:
                self._all_said.set()
                return
            elif self._granted:
                await self._send_blocks()
            else:
                await self._wake.wait()
                self._wake = trio.Event()

    async def _send_blocks(self) -> None:
        """Send one block, or several small ones that are read in one go."""
        batch = [self._granted.popleft()]
        total = batch[0].size
        while self._granted and total + self._granted[0].size <= UPLOAD_QUANTUM_BYTES:
            batch.append(self._granted.popleft())
            total += batch[-1].size
        frames = await self._context.offload(lambda: [self._read_frame(grant) for grant in batch])
        for grant, frame in zip(batch, frames, strict=True):
            if frame is None:
                self.sent(0, 0, grant.size, [grant.cid])
            else:
                await self._channel.send(frame)
                self.sent(1, len(frame) - BLOCK_HEADER_BYTES, grant.size, ())

    def _read_frame(self, grant: Grant) -> memoryview | None:
        """Read a block behind its header, so that both are sent at once; ``None`` where it is not here."""
        frame = memoryview(bytearray(BLOCK_HEADER_BYTES + grant.size))
        size = self.read_block(grant.cid, frame[BLOCK_HEADER_BYTES:])
        frame[:BLOCK_HEADER_BYTES] = block_header(grant.cid, size)
        return frame[: BLOCK_HEADER_BYTES + size] if size else None

    # --- over lanes ----------------------------------------------------------------------------------------------------

    def _close_lanes(self) -> None:
        """End all lanes, those to come too."""
        self._lanes_closed = True
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
            lane.lane_closed()  # now: what is granted from here on goes over the stream

    def lane_opened(self, lane: Lane) -> None:
        if self._lanes_closed:
            lane.close()  # the consumer redeemed its token after it had left
        else:
            self._lanes.append(lane)

    def lane_closed(self, lane: Lane) -> None:
        if lane in self._lanes:
            self._lanes.remove(lane)
