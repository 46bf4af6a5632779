"""The provider's driver: answers queries and serves wants on each channel that a peer opens."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import trio

from p2pkv.errors import IntegrityError, NotFoundError, P2pkvError, PeerUnreachableError, ProtocolError
from p2pkv.exchange.connection import BULK, ProviderConnection
from p2pkv.exchange.messages import BulkOffered, BulkRequest, ErrorMessage, Query, block_header
from p2pkv.formats.cid import Cid, Codec
from p2pkv.limits import HELLO_TIMEOUT_S, MAX_QUERY_MATCHES, MAX_STREAMS_PER_PEER
from p2pkv.ports import BulkSender, Channel, PeerId
from p2pkv.swarm.context import Context

logger = logging.getLogger(__name__)

# Blocks read in one go: enough to spare thread switches, few enough to hold in memory for each peer that is served.
_READ_BATCH = 8


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """What this node has served since it started."""

    channels: int
    blocks: int
    bytes: int
    refused: int


class Server:
    """Serves every channel until it ends. One instance per node."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sessions: set[_Session] = set()
        self._streams: dict[PeerId, int] = {}
        self.blocks = 0
        self.bytes = 0
        self.refused = 0

    async def serve(self, channel: Channel) -> None:
        """Serve one channel until the peer closes it or breaks the rules. Raises nothing for what a peer does."""
        peer = channel.peer_id
        if self._streams.get(peer, 0) >= MAX_STREAMS_PER_PEER:
            self.refused += 1
            await channel.aclose()
            return
        self._streams[peer] = self._streams.get(peer, 0) + 1
        session = _Session(self, self._context, channel)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def gained(self, cids: Iterable[Cid]) -> None:
        """Push haves to the peers that asked for ``cids`` in vain."""
        news = tuple(cids)
        for session in self._sessions:
            session.gained(news)

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(len(self._sessions), self.blocks, self.bytes, self.refused)


class _Session:
    """One channel being served."""

    def __init__(self, server: Server, context: Context, channel: Channel) -> None:
        self._server = server
        self._context = context
        self._channel = channel
        features = frozenset({BULK}) if context.bulk is not None else frozenset()
        self._connection = ProviderConnection(context.agent, features)
        self._lane: BulkSender | None = None
        self._over = False
        self._wake = trio.Event()

    def gained(self, cids: tuple[Cid, ...]) -> None:
        self._connection.gained(cids)
        self._wake.set()

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                await self._receive()
                nursery.cancel_scope.cancel()
        except* PeerUnreachableError:
            pass  # the peer left; nothing to tell anybody
        except* ProtocolError as group:
            await self._refuse(group)
        finally:
            self._over = True
            if self._lane is not None:
                self._lane.close()
            await self._channel.aclose()

    async def _refuse(self, group: BaseExceptionGroup[ProtocolError]) -> None:
        """Tell the peer what rule it broke, briefly, and log it."""
        error = next(e for e in group.exceptions if isinstance(e, P2pkvError))
        self._server.refused += 1
        logger.info("refused %s: %s [%s]", self._channel.peer_id, error.message, error.code)
        self._connection.fail(error)
        with trio.move_on_after(1):
            try:
                await self._channel.send(self._connection.data_to_send())
            except PeerUnreachableError:
                return

    async def _receive(self) -> None:
        with trio.move_on_after(HELLO_TIMEOUT_S) as patience:
            while data := await self._channel.receive():
                for message in self._connection.receive_data(data):
                    patience.deadline = math.inf
                    match message:
                        case Query(request, keys):
                            matches = await self._context.offload(partial(self._context.catalog.match, keys))
                            self._connection.answer(request, matches[:MAX_QUERY_MATCHES])
                        case BulkRequest():
                            self._offer_lane()
                        case ErrorMessage(code, text):
                            logger.info("%s gave up: %s [%s]", self._channel.peer_id, text, code)
                            return
                        case _:
                            pass  # wants and cancels are in the queue already
                self._wake.set()
        if patience.cancelled_caught:
            raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:.0f} s")

    def _offer_lane(self) -> None:
        bulk = self._context.bulk
        offer = None if bulk is None or self._lane else bulk.offer(self._channel.peer_id, want_sender=self._attach)
        self._connection.offer_bulk(BulkOffered(offer.port, offer.token, offer.fingerprint) if offer else None)

    def _attach(self, lane: BulkSender) -> None:
        if self._over:
            lane.close()  # the consumer redeemed its token after it had left
        else:
            self._lane = lane

    async def _send(self) -> None:
        while True:
            data = self._connection.data_to_send()
            if data:
                await self._channel.send(data)
            elif self._connection.wants:
                await self._serve_wants()
            else:
                await self._wake.wait()
                self._wake = trio.Event()

    async def _serve_wants(self) -> None:
        cids = self._connection.take_wants(_READ_BATCH)
        blocks = await self._context.offload(lambda: [self._read(cid) for cid in cids])
        missing = [cid for cid, data in zip(cids, blocks, strict=True) if data is None]
        for cid, data in zip(cids, blocks, strict=True):
            if data is not None:
                await self._send_block(cid, data)
        if missing:
            self._connection.dont_have(missing)

    def _read(self, cid: Cid) -> bytes | None:
        try:
            return self._context.store.read(cid)
        except (NotFoundError, IntegrityError):
            return None  # a damaged block is as good as none, and is never served

    async def _send_block(self, cid: Cid, data: bytes) -> None:
        """Send over the lane where there is one; nodes are small and stay on the stream, whose frames bound their size."""
        if self._lane is not None and cid.codec is Codec.RAW:
            try:
                await self._lane.send_block(cid, data)
            except PeerUnreachableError:
                self._lane = None  # the consumer asks again for what the lane lost
        if self._lane is None or cid.codec is not Codec.RAW:
            await self._channel.send(block_header(cid, len(data)))
            await self._channel.send(data)
        self._server.blocks += 1
        self._server.bytes += len(data)
