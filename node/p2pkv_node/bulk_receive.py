"""The consumer's end of bulk lanes: one thread receives on many lanes, each a small state machine.

A thread per lane would have them all wait for one another: Python's TLS gives one record of 16 KiB a call, and each call takes
the interpreter anew. One thread moves more than two do on two cores, and :func:`reader_count` says how many others get.

A lane is a task on the event loop; it returns when the thread has let go of its socket, so that neither outlives it.
Cancelling the task, ``close()`` and the peer's leaving all end the lane in the same way: the socket is shut down, which the
thread sees. The thread ends with its last lane.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

import trio

from p2pkv.errors import CidError, ProtocolError
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import BulkSink
from p2pkv_node.bulk_lane import HEADER_BYTES, BulkCounters, in_named_thread
from p2pkv_node.bulk_tls import TlsConnection

logger = logging.getLogger(__name__)

# More would only contend for the interpreter.
_MAX_READERS: Final = 4


def reader_count() -> int:
    """Return how many threads receive: half of the processors, for there are programs that want what is received."""
    return min(_MAX_READERS, max(1, (os.cpu_count() or 1) // 2))


class LaneReceiver:
    """One lane (``BulkReceiver``). All but :meth:`close` and :meth:`run` is for the thread that receives."""

    def __init__(self, connection: TlsConnection, sink: BulkSink, counters: BulkCounters) -> None:
        self._connection = connection
        self._sink = sink
        self._counters = counters
        # One buffer for the life of the lane: fresh memory for each block would cost a page fault every 4 KiB.
        self._buffer = memoryview(bytearray(MAX_CODED_BLOCK_BYTES))
        self._missing = self._buffer[:HEADER_BYTES]  # of the header, or of the block
        self._block: tuple[Cid, memoryview] | None = None  # the block that is being received, behind its header
        self._over = trio.Event()
        self._token = trio.lowlevel.current_trio_token()

    def close(self) -> None:
        """End the lane at once. Safe from any thread, the sink's calls included."""
        self._connection.shut()

    async def run(self, readers: LaneReaders) -> None:
        """Receive until either side ends the lane. The socket is closed afterwards, and the sink told."""
        readers.add(self)
        try:
            await self._over.wait()
        finally:
            self._connection.shut()
            with trio.CancelScope(shield=True):
                await self._over.wait()  # the thread lets go at once
            self._connection.close()
            self._sink.lane_closed()

    def fileno(self) -> int:
        return self._connection.fileno()

    def receive(self) -> bool:
        """Take what has arrived, up to the end of one block; return whether more may be here. Raises OSError at the end.

        Raises ProtocolError and CidError for what breaks the rules.
        """
        while not self._connection.is_shut:
            count = self._connection.receive_some(self._missing)
            if count is None:
                return False
            self._missing = self._missing[count:]
            if self._missing:
                continue
            if self._block is not None:
                self._hand_over(*self._block)
                return True
            self._begin_block()
        raise ConnectionAbortedError("the lane was closed")

    def let_go(self) -> None:
        """The thread is done with the lane."""
        try:
            self._token.run_sync_soon(self._over.set)
        except trio.RunFinishedError:
            return  # nobody waits any more

    def fail(self, error: OSError | ProtocolError | CidError) -> None:
        """Note why the lane ends."""
        if isinstance(error, OSError):
            logger.debug("a bulk lane ended while receiving: %s", error)
        else:
            self._counters.add(protocol_faults=1)
            logger.info("closed a bulk lane: %s", error)

    def _begin_block(self) -> None:
        header = self._buffer[:HEADER_BYTES]
        cid = Cid.from_bytes(header[:CID_BYTES])
        length = int.from_bytes(header[CID_BYTES:], "big")
        expected = self._sink.expected_size(cid)
        if length != expected or not 0 < length <= MAX_CODED_BLOCK_BYTES:
            asked = "was not asked for" if expected is None else f"has {expected} bytes"
            raise ProtocolError(f"a frame of {length} bytes brings block {cid}, which {asked}")
        self._missing = self._buffer[:length]
        self._block = cid, self._missing

    def _hand_over(self, cid: Cid, data: memoryview) -> None:
        self._block, self._missing = None, self._buffer[:HEADER_BYTES]
        self._counters.add(blocks_received=1, bytes_received=len(data))
        self._sink.receive_block(cid, data)


class LaneReaders:
    """The threads that receive, each started with its first lane. ``start`` runs a task beside the caller."""

    def __init__(self, start: Callable[[LaneReader], None]) -> None:
        self._start = start
        self._readers = [LaneReader() for _ in range(reader_count())]

    def add(self, lane: LaneReceiver) -> None:
        """Have ``lane`` received, by the thread with the fewest lanes."""
        reader = min(self._readers, key=lambda reader: reader.lanes)
        if reader.add(lane):
            self._start(reader)


class LaneReader:
    """One thread that receives on any number of lanes, in turns of at most one block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[LaneReceiver] = []  # guarded by the lock, like all below
        self._running = False
        self._waker: socket.socket | None = None
        self.lanes = 0

    def add(self, lane: LaneReceiver) -> bool:
        """Take a lane on; return whether :meth:`run` has to be started for it."""
        with self._lock:
            self._new.append(lane)
            self.lanes += 1
            if self._running:
                if self._waker is not None:
                    self._waker.send(b"\0")
                return False
            self._running = True
            return True

    async def run(self, limiter: trio.CapacityLimiter) -> None:
        """Receive until the last lane has ended: whoever wants this to end ends the lanes."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._receive, limiter=limiter)

    @in_named_thread
    def _receive(self) -> None:
        woken, waker = socket.socketpair()
        with woken, waker, selectors.DefaultSelector() as selector:
            woken.setblocking(False)
            selector.register(woken, selectors.EVENT_READ)
            with self._lock:
                self._waker = waker
            ready: dict[LaneReceiver, None] = {}
            try:
                while self._take_new(selector, ready):
                    for key, _ in selector.select(0 if ready else None):
                        if key.fileobj is woken:
                            woken.recv(4096)
                        else:
                            ready[key.data] = None
                    for lane in tuple(ready):
                        self._turn(lane, selector, ready)
            except BaseException:  # a defect in a sink: whoever waits for a lane would wait for ever
                self._abandon([key.data for key in selector.get_map().values() if key.fileobj is not woken])
                raise

    def _abandon(self, lanes: list[LaneReceiver]) -> None:
        with self._lock:
            lanes += self._new
            self._new, self.lanes, self._running, self._waker = [], 0, False, None
        for lane in lanes:
            lane.let_go()

    def _turn(self, lane: LaneReceiver, selector: selectors.BaseSelector, ready: dict[LaneReceiver, None]) -> None:
        try:
            if not lane.receive():
                del ready[lane]
        except (OSError, ProtocolError, CidError) as error:
            lane.fail(error)
            del ready[lane]
            selector.unregister(lane)
            with self._lock:
                self.lanes -= 1
            lane.let_go()

    def _take_new(self, selector: selectors.BaseSelector, ready: dict[LaneReceiver, None]) -> bool:
        """Begin with the lanes that were added; return whether there are any at all."""
        with self._lock:
            new, self._new = self._new, []
            if not self.lanes:
                self._running, self._waker = False, None
                return False
        for lane in new:
            selector.register(lane, selectors.EVENT_READ, lane)
            ready[lane] = None  # TLS may hold bytes already that the socket will not tell of
        return True
