"""The consumer's driver for one provider: the exchange stream, and beside it the bulk lane where both sides have one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from p2pkv.errors import IntegrityError, P2pkvError, PeerUnreachableError
from p2pkv.exchange.connection import BULK, ConsumerConnection
from p2pkv.exchange.messages import Block, BulkOffered, Hello, Message
from p2pkv.formats.cid import Cid, Codec
from p2pkv.limits import HELLO_TIMEOUT_S
from p2pkv.ports import BlockStore, BulkOffer, BulkReceiver, Channel, PeerId
from p2pkv.swarm.context import Context
from p2pkv.swarm.groups import first_error
from p2pkv.units import KIB

# A lane that is not up by then is given up, and blocks come over the stream.
_LANE_PATIENCE_S = 1.0
# Larger blocks wait for a lane that is being opened: over the stream, where they cost three times the work, the first of them
# would hold up the opening of all other lanes as well.
_WAITS_FOR_LANE_BYTES = 64 * KIB
# The loop hears of a lane's blocks at most this often, unless the peer is about to run out of wants: each time it takes the
# interpreter away from the lanes.
_REPORT_INTERVAL_S = 0.05


class BlockEvents(Protocol):
    """What becomes of the blocks that providers send. All calls come from the event loop."""

    def provider_delivered(self, provider: Provider, blocks: Sequence[tuple[Cid, int]]) -> None:
        """Blocks are verified and stored; each comes with its size."""

    def provider_lied(self, provider: Provider, cid: Cid) -> None:
        """A block had another hash than its CID says."""

    def store_failed(self, error: P2pkvError) -> None:
        """Our own disk refused a block."""


class ProviderEvents(BlockEvents, Protocol):
    """What the pool wants to know of one provider."""

    def provider_said(self, provider: Provider, message: Message) -> None:
        """A message other than blocks."""


class Provider:
    """One connected provider. :meth:`run` lives as long as the stream does."""

    def __init__(self, context: Context, channel: Channel, events: ProviderEvents) -> None:
        self._context = context
        self._channel = channel
        self._events = events
        self._lane_hoped_for = context.bulk is not None and channel.remote_host is not None
        self._lane_wanted = False
        self._lane_requested = trio.Event()
        features = frozenset({BULK}) if context.bulk is not None else frozenset()
        self._connection = ConsumerConnection(context.agent, features)
        self._wake = trio.Event()
        self._ready = trio.Event()
        self._lane: BulkReceiver | None = None
        self._waiting: dict[Cid, None] = {}  # asked for as soon as the lane is there, or will not come
        self._sink = _LaneSink(self, context.store)
        self._asked: dict[Cid, int | None] = {}  # every CID ever asked of this peer, with its exact size where known
        self._outstanding: set[Cid] = set()
        self._cancel_scope = trio.CancelScope()
        self._closed = False

    @property
    def peer_id(self) -> PeerId:
        return self._channel.peer_id

    @property
    def closed(self) -> bool:
        """Whether :meth:`run` has ended or is about to."""
        return self._closed

    @property
    def bulk(self) -> bool:
        """Whether blocks come over a bulk lane."""
        return self._lane is not None

    def want(self, cids: Sequence[Cid], sizes: Callable[[Cid], int | None]) -> None:
        """Ask for ``cids``; ``sizes`` gives the exact size of a block, the largest of a node."""
        for cid in cids:
            self._asked[cid] = sizes(cid)
        self._outstanding.update(cids)
        waiting = [cid for cid in cids if self._lane_hoped_for and self._is_large(cid)]
        if waiting:
            self.request_lane()
        self._waiting.update(dict.fromkeys(waiting))
        self._ask([cid for cid in cids if cid not in self._waiting])

    def cancel(self, cids: Sequence[Cid]) -> None:
        self._outstanding.difference_update(cids)
        asked = [cid for cid in cids if cid not in self._waiting]
        for cid in cids:
            self._waiting.pop(cid, None)
        if asked:
            self._connection.cancel(asked)
            self._wake.set()

    def query(self, keys: Sequence[bytes]) -> None:
        self._connection.query(keys)
        self._wake.set()

    def request_lane(self) -> None:
        """Have a bulk lane opened as soon as hello is exchanged, where both sides have one. Safe to call twice."""
        if not self._lane_wanted:
            self._lane_wanted = True
            if self._ready.is_set():
                self._request_lane()

    def close(self) -> None:
        """End :meth:`run` soon."""
        self._closed = True
        self._cancel_scope.cancel()

    async def wait_ready(self) -> None:
        """Wait until the hello is exchanged. Manifest and nodes travel on the stream, while the bulk lane is opened."""
        await self._ready.wait()

    async def run(self) -> None:
        """Drive the stream until it ends or :meth:`close`. Raises PeerUnreachableError, ProtocolError."""
        try:
            with self._cancel_scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    nursery.start_soon(self._give_up_lane)
                    nursery.start_soon(self._hear_lane)
                    await self._receive(nursery)
                    nursery.cancel_scope.cancel()
        except* P2pkvError as group:
            raise first_error(group) from None
        finally:
            self._closed = True
            self._ready.set()
            if self._lane is not None:
                self._lane.close()
            await self._channel.aclose()

    async def _send(self) -> None:
        while True:
            data = self._connection.data_to_send()
            if data:
                await self._channel.send(data)
            else:
                await self._wake.wait()
                self._wake = trio.Event()

    async def _receive(self, nursery: trio.Nursery) -> None:
        with trio.move_on_after(HELLO_TIMEOUT_S) as patience:
            while data := await self._channel.receive():
                messages = self._connection.receive_data(data)
                blocks = [message for message in messages if isinstance(message, Block)]
                for message in messages:
                    self._handle(message, nursery)
                    patience.deadline = math.inf
                if blocks:
                    await self._take(blocks)
        if patience.cancelled_caught:
            raise PeerUnreachableError(f"{self.peer_id} did not say hello within {HELLO_TIMEOUT_S:.0f} s")

    def _handle(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case Hello(_, features):
                if BULK not in features:
                    self._settle_lane()
                elif self._lane_wanted:
                    self._request_lane()
                self._ready.set()
            case BulkOffered(port, token, fingerprint) if port:
                nursery.start_soon(self._open_lane, BulkOffer(port, token, fingerprint))
            case BulkOffered():
                self._settle_lane()
            case Block():
                pass
            case _:
                self._events.provider_said(self, message)

    async def _take(self, blocks: list[Block]) -> None:
        """Verify and store what came over the stream, off the event loop; a lie is told apart from our own disk."""
        good: list[Block] = []

        def verify_and_store() -> P2pkvError | None:
            for block in blocks:
                if not _verified(block.cid, block.data):
                    return IntegrityError(str(block.cid))
                try:
                    self._context.store.write(block.cid, block.data)
                except P2pkvError as error:
                    return error
                good.append(block)
            return None

        error = await self._context.offload(verify_and_store)
        if good:
            self._context.tally.stream_bytes += sum(len(block.data) for block in good)
            self._delivered([(block.cid, len(block.data)) for block in good])
        if isinstance(error, IntegrityError):
            self._events.provider_lied(self, blocks[len(good)].cid)
        elif error is not None:
            self._events.store_failed(error)

    def _delivered(self, blocks: Sequence[tuple[Cid, int]]) -> None:
        self._outstanding.difference_update(cid for cid, _ in blocks)
        self._events.provider_delivered(self, blocks)

    # --- bulk lane -----------------------------------------------------------------------------------------------------

    async def _open_lane(self, offer: BulkOffer) -> None:
        host, bulk = self._channel.remote_host, self._context.bulk
        if bulk is not None and host is not None and self._lane is None:
            with trio.move_on_after(_LANE_PATIENCE_S):
                try:
                    self._lane = await bulk.connect(host, offer, self._sink)
                except PeerUnreachableError:
                    self._lane = None  # blocks come over the stream
        if self._lane is None:
            self._connection.close_bulk()  # the provider may believe that it is open
        self._settle_lane()

    def _request_lane(self) -> None:
        if self._lane_hoped_for:
            self._connection.request_bulk()
            self._wake.set()
            self._lane_requested.set()

    async def _give_up_lane(self) -> None:
        """Stop hoping for a lane for which no offer comes."""
        await self._lane_requested.wait()
        await trio.sleep(_LANE_PATIENCE_S)
        self._settle_lane()

    def _settle_lane(self) -> None:
        """The lane is there, or will not come: ask for what has waited for it."""
        self._lane_hoped_for = False
        waiting, self._waiting = list(self._waiting), {}
        self._ask(waiting)

    def _is_large(self, cid: Cid) -> bool:
        size = self._asked[cid]
        return cid.codec is Codec.RAW and size is not None and size > _WAITS_FOR_LANE_BYTES

    def _ask(self, cids: Sequence[Cid]) -> None:
        if cids:
            self._connection.want(cids)
            self._wake.set()

    async def _hear_lane(self) -> None:
        """Work what the receiving thread reports into the fetch, many blocks at a time."""
        sink = self._sink
        while True:
            await sink.reported.wait()
            sink.reported = trio.Event()
            self._work_in(sink)
            with trio.move_on_after(_REPORT_INTERVAL_S):
                await sink.urgent.wait()
            sink.urgent = trio.Event()

    def _work_in(self, sink: _LaneSink) -> None:
        blocks = sink.take_arrived()
        if blocks:
            self._context.tally.lane_bytes += sum(size for _, size in blocks)
            for cid, _ in blocks:
                self._connection.take_bulk_block(cid)
            self._delivered(blocks)
        lie, sink.lie = sink.lie, None
        if lie is not None and not self._closed:  # one that is out already, for a lie on the stream, is told of once
            self._events.provider_lied(self, lie)
        failure, sink.failure = sink.failure, None
        if failure is not None:
            self._events.store_failed(failure)

    def lane_closed(self) -> None:
        """What was on its way over the lane is asked for again, over the stream."""
        self._work_in(self._sink)
        self._lane = None
        self._connection.close_bulk()
        self._wake.set()
        self._ask(list(self._outstanding))

    def asked_size(self, cid: Cid) -> int | None:
        """Return the exact size of a block that was ever asked of this peer. Safe from any thread."""
        return self._asked.get(cid)

    @property
    def outstanding(self) -> int:
        """How many blocks this peer is asked for now, as far as the loop has heard. Safe from any thread."""
        return len(self._outstanding)


class _LaneSink:
    """Takes blocks in the thread that receives, verifies and stores them there, and reports to the event loop.

    ``reported`` is set on the loop when there is something to hear, ``urgent`` when it should be heard at once. After a lie or
    a failure of our own disk nothing more is taken.
    """

    def __init__(self, provider: Provider, store: BlockStore) -> None:
        self._provider = provider
        self._store = store
        self._token = trio.lowlevel.current_trio_token()
        self._arrived: deque[tuple[Cid, int]] = deque()
        self._over = False
        self.lie: Cid | None = None
        self.failure: P2pkvError | None = None
        self.reported = trio.Event()
        self.urgent = trio.Event()

    def take_arrived(self) -> list[tuple[Cid, int]]:
        """Return the blocks that arrived since the last call, each with its size."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def expected_size(self, cid: Cid) -> int | None:
        return self._provider.asked_size(cid)

    def receive_block(self, cid: Cid, data: memoryview) -> None:
        if self._over:
            return
        if not _verified(cid, data):
            self._over, self.lie = True, cid
            self._wake(self._hurry)
            return
        try:
            self._store.write(cid, data)
        except P2pkvError as error:
            self._over, self.failure = True, error
            self._wake(self._hurry)
            return
        self._arrived.append((cid, len(data)))
        waiting = len(self._arrived)
        # A window is refilled when half of it is free.
        if 2 * waiting >= self._provider.outstanding:
            self._wake(self._hurry)
        elif waiting == 1:
            self._wake(self._report)

    def lane_closed(self) -> None:
        self._provider.lane_closed()

    def _wake(self, call: Callable[[], None]) -> None:
        try:
            self._token.run_sync_soon(call, idempotent=True)
        except trio.RunFinishedError:
            return  # the loop is gone, and the session with it

    def _report(self) -> None:
        self.reported.set()

    def _hurry(self) -> None:
        self.reported.set()
        self.urgent.set()


def _verified(cid: Cid, data: bytes | memoryview) -> bool:
    """Hash twice before calling a peer a liar, so that a fault of our own memory has to strike twice."""
    return cid.matches(data) or cid.matches(data)
