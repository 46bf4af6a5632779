"""The two ends of one open bulk lane: a thread that sends queued blocks, a thread that receives blocks.

A lane carries frames in one direction, provider to consumer: the binary CID (36 bytes), the length (u32, big endian), the
block. Each end is one task on the event loop that owns one worker thread; the task returns when the thread has, so neither
threads nor sockets outlive it. Cancelling the task, ``close()`` and the peer's leaving all end the lane in the same way:
the socket is shut down, and the thread wakes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Final, TypeVar

import trio

from p2pkv.errors import CidError, PeerUnreachableError, ProtocolError, UsageError
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.limits import MAX_BULK_LANE_BYTES, MAX_CODED_BLOCK_BYTES
from p2pkv.ports import Buffer, BulkSink
from p2pkv_node.bulk_tls import TLS_RECORD_BYTES, TlsConnection

logger = logging.getLogger(__name__)

_Self = TypeVar("_Self")

THREAD_NAME: Final = "p2pkv bulk"
_LENGTH_BYTES: Final = 4
_HEADER_BYTES: Final = CID_BYTES + _LENGTH_BYTES


@dataclass(frozen=True, slots=True)
class BulkStatistics:
    """What the bulk lane has done since it was made, and the lanes that are open now."""

    sending_lanes: int = 0
    receiving_lanes: int = 0
    blocks_sent: int = 0
    bytes_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    refused_tokens: int = 0  # wrong, late, or used before
    dropped_strangers: int = 0  # no TLS 1.3, no greeting in time, or too many at once
    refused_certificates: int = 0  # as consumer: not the certificate of the offer
    protocol_faults: int = 0  # as consumer: a provider sent what nobody asked for, or of another size


class BulkCounters:
    """The counting part of :class:`BulkStatistics`; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = BulkStatistics()

    def add(self, **amounts: int) -> None:
        """Add to the fields named."""
        with self._lock:
            self._totals = replace(
                self._totals, **{name: getattr(self._totals, name) + amount for name, amount in amounts.items()}
            )

    def snapshot(self, *, sending_lanes: int, receiving_lanes: int) -> BulkStatistics:
        return replace(self._totals, sending_lanes=sending_lanes, receiving_lanes=receiving_lanes)


def _in_named_thread(work: Callable[[_Self], None]) -> Callable[[_Self], None]:
    """Name the worker thread while it serves a lane, so that thread dumps tell lanes from idle workers."""

    @functools.wraps(work)
    def named(self: _Self) -> None:
        thread = threading.current_thread()
        idle_name, thread.name = thread.name, THREAD_NAME
        try:
            work(self)
        finally:
            thread.name = idle_name

    return named


class LaneSender:
    """The provider's end (``BulkSender``)."""

    def __init__(self, connection: TlsConnection, counters: BulkCounters, *, queue_bytes: int) -> None:
        self._connection = connection
        self._counters = counters
        self._queue: SimpleQueue[tuple[Cid, memoryview] | None] = SimpleQueue()
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()  # guards the two fields below, which both the loop and the thread change
        self._queued_bytes = 0
        self._someone_waits = False
        self._room = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()

    @property
    def queued_bytes(self) -> int:
        """Bytes of blocks that wait for the peer, the one being sent included."""
        return self._queued_bytes

    async def send_block(self, cid: Cid, data: Buffer) -> None:
        """Queue one block; ``data`` must not change any more. Waits while the queue is full.

        That it returns does not mean that the block arrived: the peer asks again for what a closed lane swallowed.
        Raises PeerUnreachableError when the lane is closed, UsageError for a block of no or too many bytes.
        """
        view = memoryview(data).cast("B")
        if not 0 < len(view) <= MAX_CODED_BLOCK_BYTES:
            raise UsageError(f"a block of {len(view)} bytes does not fit the bulk lane")
        await trio.lowlevel.checkpoint()
        while not self._connection.is_shut and not self._reserve(len(view)):
            await self._room.park()
        if self._connection.is_shut:
            raise PeerUnreachableError("the bulk lane is closed")
        self._queue.put((cid, view))

    def close(self) -> None:
        """End the lane at once; what is queued is not sent."""
        self._connection.shut()

    async def run(self, limiter: trio.CapacityLimiter) -> None:
        """Send what is queued until either side ends the lane. The socket is closed afterwards."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                await trio.to_thread.run_sync(self._send_queued, limiter=limiter)
                nursery.cancel_scope.cancel()
        finally:
            self._connection.close()
            self._room.unpark_all()

    async def _watch(self) -> None:
        """End the thread when the peer leaves or the task is cancelled; a consumer has nothing to say but good-bye."""
        try:
            await self._connection.wait_readable()
        finally:
            self._connection.shut()
            self._queue.put(None)

    @_in_named_thread
    def _send_queued(self) -> None:
        sent = 0
        try:
            while sent < MAX_BULK_LANE_BYTES and (item := self._queue.get()) is not None:
                cid, view = item
                # The header rides in the first TLS record: a record of its own would wake the receiver once more, and
                # joining it with the whole block would copy the block.
                header = cid.binary + len(view).to_bytes(_LENGTH_BYTES, "big")
                first = TLS_RECORD_BYTES - len(header)
                self._connection.send_all(header + view[:first])
                if len(view) > first:
                    self._connection.send_all(view[first:])
                self._counters.add(blocks_sent=1, bytes_sent=len(view))
                sent += len(view)
                self._release(len(view))
        except OSError as error:
            logger.debug("a bulk lane ended while sending: %s", error)

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self._queued_bytes and self._queued_bytes + size > self._queue_bytes:
                self._someone_waits = True
                return False
            self._queued_bytes += size
            return True

    def _release(self, size: int) -> None:
        with self._lock:
            self._queued_bytes -= size
            # At half, not at every block, so that the loop wakes seldom and then queues several blocks in one go.
            wake = self._someone_waits and self._queued_bytes <= self._queue_bytes // 2
            if wake:
                self._someone_waits = False
        if wake:
            self._token.run_sync_soon(self._room.unpark_all)


class LaneReceiver:
    """The consumer's end (``BulkReceiver``)."""

    def __init__(self, connection: TlsConnection, sink: BulkSink, counters: BulkCounters) -> None:
        self._connection = connection
        self._sink = sink
        self._counters = counters
        # One buffer for the life of the lane: fresh memory for each block would cost a page fault every 4 KiB.
        self._buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))

    def close(self) -> None:
        """End the lane at once. Safe from any thread, the sink's calls included."""
        self._connection.shut()

    async def run(self, limiter: trio.CapacityLimiter) -> None:
        """Receive until either side ends the lane. The socket is closed afterwards, and the sink told."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._shut_when_cancelled)
                await trio.to_thread.run_sync(self._receive_all, limiter=limiter)
                nursery.cancel_scope.cancel()
        finally:
            self._connection.close()
            self._sink.lane_closed()

    async def _shut_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._connection.shut()

    @_in_named_thread
    def _receive_all(self) -> None:
        try:
            while not self._connection.is_shut:
                self._receive_block()
        except OSError as error:
            logger.debug("a bulk lane ended while receiving: %s", error)
        except (ProtocolError, CidError) as error:
            self._counters.add(protocol_faults=1)
            logger.info("closed a bulk lane: %s", error)

    def _receive_block(self) -> None:
        header = self._buffer[:_HEADER_BYTES]
        self._connection.receive_into(header)
        cid = Cid.from_bytes(header[:CID_BYTES])
        length = int.from_bytes(header[CID_BYTES:], "big")
        expected = self._sink.expected_size(cid)
        if length != expected or not 0 < length <= MAX_CODED_BLOCK_BYTES:
            asked = "was not asked for" if expected is None else f"has {expected} bytes"
            raise ProtocolError(f"a frame of {length} bytes brings block {cid}, which {asked}")
        data = self._buffer[:length]
        self._connection.receive_into(data)
        self._counters.add(blocks_received=1, bytes_received=length)
        self._sink.receive_block(cid, data)
