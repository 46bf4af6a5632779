"""The provider's end of one open bulk lane: a thread that reads and sends queued blocks.

A task on the event loop owns the thread; it returns when the thread has, so neither threads nor sockets outlive it. Cancelling
the task, ``close()`` and the peer's leaving all end the lane in the same way: the socket is shut down, and the thread wakes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final

import trio

from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_BULK_LANE_BYTES, MAX_CODED_BLOCK_BYTES, MAX_UPLOAD_BYTES_PER_PEER
from p2pkv.ports import BulkSource
from p2pkv_node.bulk_lane import BulkCounters, in_named_thread
from p2pkv_node.bulk_tls import TlsConnection
from p2pkv_node.bulk_wire import HEADER_BYTES, LENGTH_BYTES

logger = logging.getLogger(__name__)

# A sender reports so often: each report costs a turn of the event loop, and makes room for as much to be granted.
_REPORT_BYTES: Final = MAX_UPLOAD_BYTES_PER_PEER // 2


class LaneSender:
    """The provider's end (``BulkSender``): a block is read when the one before has been taken, into one buffer."""

    def __init__(self, connection: TlsConnection, source: BulkSource, counters: BulkCounters) -> None:
        self._connection = connection
        self._source = source
        self._counters = counters
        self._queue: SimpleQueue[Sequence[Cid] | None] = SimpleQueue()
        self._sizes: deque[int] = deque()  # of the blocks sent that the source has not been told of
        self._token = trio.lowlevel.current_trio_token()

    def send_blocks(self, cids: Sequence[Cid]) -> None:
        """Queue blocks; a lane that has ended drops them."""
        self._queue.put(cids)

    def close(self) -> None:
        """End the lane at once; what is queued is not sent."""
        self._connection.shut()

    async def run(self, limiter: trio.CapacityLimiter) -> None:
        """Send what is queued until either side ends the lane. The socket is closed afterwards, and the source told."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                await trio.to_thread.run_sync(self._send_queued, limiter=limiter)
                nursery.cancel_scope.cancel()
        finally:
            self._connection.close()
            self._report()
            self._source.lane_closed()

    async def _watch(self) -> None:
        """End the thread when the peer leaves or the task is cancelled; a consumer has nothing to say but good-bye."""
        try:
            await self._connection.wait_readable()
        finally:
            self._connection.shut()
            self._queue.put(None)

    @in_named_thread
    def _send_queued(self) -> None:
        # One buffer for the life of the lane: fresh memory for each block would cost a page fault every 4 KiB.
        buffer = memoryview(bytearray(HEADER_BYTES + MAX_CODED_BLOCK_BYTES))
        total = unreported = 0
        try:
            while total < MAX_BULK_LANE_BYTES:
                if self._sizes and self._queue.empty():
                    self._wake_loop()
                batch = self._queue.get()
                if batch is None:
                    return
                for cid in batch:
                    size = self._send_block(cid, buffer)
                    self._sizes.append(size)
                    total += size
                    unreported += size
                    if unreported >= _REPORT_BYTES:
                        self._wake_loop()
                        unreported = 0
        except OSError as error:
            logger.debug("a bulk lane ended while sending: %s", error)

    def _send_block(self, cid: Cid, buffer: memoryview) -> int:
        """Read a block behind its header and send both at once; return its bytes, 0 where it is not here."""
        size = self._source.read_block(cid, buffer[HEADER_BYTES:])
        if size:
            buffer[:HEADER_BYTES] = cid.binary + size.to_bytes(LENGTH_BYTES, "big")
            self._connection.send_all(buffer[: HEADER_BYTES + size])
            self._counters.add(blocks_sent=1, bytes_sent=size)
        return size

    def _wake_loop(self) -> None:
        self._token.run_sync_soon(self._report, idempotent=True)

    def _report(self) -> None:
        sizes = [self._sizes.popleft() for _ in range(len(self._sizes))]
        if sizes:
            self._source.blocks_sent(sizes)
