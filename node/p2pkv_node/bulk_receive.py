"""The consumer's end of bulk lanes: processes that receive (``bulk_process``), and a thread for what each of them brings.

A lane is a task on the event loop; it returns when process and thread have let go of it. Cancelling the task, ``close()`` and
the peer's leaving all end the lane in the same way: the process says so, as the last it says of that lane. A process that dies
takes its lanes along, whose peers send over the stream from then on; the next lane starts another.
"""

from __future__ import annotations

import enum
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from p2pkv.errors import CidError, PeerUnreachableError, ProtocolError
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.ports import BulkOffer, BulkSink
from p2pkv_node.bulk_lane import BulkCounters, in_named_thread
from p2pkv_node.bulk_wire import EVENT_BYTES, MEMORY_BYTES, SLOT_BYTES, Command, Ending, Event, Kind, Order, frame_length

logger = logging.getLogger(__name__)

# More would only contend with the programs that want what is received.
_MAX_PROCESSES: Final = 4
# Events that are read at once; each brings a block at most.
_EVENTS_AT_ONCE: Final = 64
# A process ends as soon as it sees that its socket is closed.
_EXIT_TIMEOUT_S: Final = 2.0

_REASONS: Final = {
    Ending.GONE: "it cannot be reached, or has left",
    Ending.CERTIFICATE: "somebody else answers there: the certificate is not the one of the offer",
    Ending.GREETING: "it speaks another protocol",
    Ending.FRAME: "it sent a frame that is too large",
}


def process_count() -> int:
    """Return how many processes receive at most: half of the processors, and one for each lane is enough."""
    return min(_MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2))


class _Stage(enum.Enum):
    CONNECTING = enum.auto()
    OPEN = enum.auto()
    GIVEN_UP = enum.auto()


class LaneReceiver:
    """One lane (``BulkReceiver``)."""

    def __init__(self, process: LaneProcess, number: int, sink: BulkSink, counters: BulkCounters) -> None:
        self._process = process
        self._number = number
        self._sink = sink
        self._counters = counters
        self._lock = threading.Lock()
        self._stage = _Stage.CONNECTING
        self._closed = False
        self._ending: Ending | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._known = trio.Event()  # whether it is open, or not
        self._over = trio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the provider has taken the greeting, also when the lane has ended since."""
        return self._stage is _Stage.OPEN

    async def wait_open(self) -> None:
        """Return when the provider has taken the greeting; whoever is cancelled has given up for good, unless :attr:`is_open`.

        Raises PeerUnreachableError.
        """
        try:
            await self._known.wait()
        finally:
            self._decide(_Stage.GIVEN_UP)
        if not self.is_open:
            raise PeerUnreachableError(f"no bulk lane: {_REASONS[self._ending or Ending.GONE]}")

    def close(self) -> None:
        """End the lane at once. Safe from any thread, the sink's calls included."""
        if not self._closed:
            self._closed = True
            self._process.command(Command(Order.CLOSE, self._number))

    async def run(self) -> None:
        """Wait until either side has ended the lane, and tell the sink."""
        try:
            await self._over.wait()
        finally:
            self.close()
            with trio.CancelScope(shield=True):
                await self._over.wait()
            if self.is_open:
                self._sink.lane_closed()

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        self._decide(_Stage.OPEN)
        if self.is_open:
            self._call(self._known.set)

    def begun(self, header: bytes) -> None:
        """End the lane where its peer begins to send what was not asked for."""
        self._check(header)

    def take(self, header: bytes, memory: memoryview) -> None:
        """Hand over the block at the front of ``memory``."""
        cid = self._check(header)
        if cid is not None:
            data = memory[: frame_length(header)]
            self._counters.add(blocks_received=1, bytes_received=len(data))
            self._sink.receive_block(cid, data)

    def _check(self, header: bytes) -> Cid | None:
        """Return the CID of a frame; ``None`` where the lane is closed, or is now, for a frame that breaks the rules."""
        if self._closed:
            return None
        length = frame_length(header)
        try:
            cid = Cid.from_bytes(header[:CID_BYTES])
            expected = self._sink.expected_size(cid)
            if length != expected:
                asked = "was not asked for" if expected is None else f"has {expected} bytes"
                raise ProtocolError(f"a frame of {length} bytes brings block {cid}, which {asked}")
        except (ProtocolError, CidError) as error:
            self._fault(str(error))
            self.close()
            return None
        return cid

    def ended(self, ending: Ending) -> None:
        """The process has let go of the lane."""
        self._ending = ending
        if ending is Ending.CERTIFICATE:
            self._counters.add(refused_certificates=1)
        elif ending is Ending.FRAME:
            self._fault(_REASONS[ending])
        self._closed = True
        self._call(self._known.set)
        self._call(self._over.set)

    def _fault(self, reason: str) -> None:
        self._counters.add(protocol_faults=1)
        logger.info("closed a bulk lane: %s", reason)

    def _decide(self, stage: _Stage) -> None:
        """Move on from connecting; what is decided once stays."""
        with self._lock:
            if self._stage is _Stage.CONNECTING:
                self._stage = stage

    def _call(self, call: Callable[[], object]) -> None:
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            return  # nobody waits any more


class LaneProcess:
    """One process that receives, and the thread that takes what it brings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[int, LaneReceiver] = {}  # guarded by the lock, like all below
        self._next = 0
        self._ended = False
        self._control, theirs = socket.socketpair()
        descriptor = _shared_memory()
        try:
            os.ftruncate(descriptor, MEMORY_BYTES)
            self._memory = mmap.mmap(descriptor, MEMORY_BYTES)
            self._view = memoryview(self._memory)
            inherited = (theirs.fileno(), descriptor)
            program = [sys.executable, "-m", "p2pkv_node.bulk_process", *map(str, inherited)]
            # Our own interpreter and module, and two numbers.
            self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=inherited)  # noqa: S603
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(descriptor)

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def ended(self) -> bool:
        return self._ended

    def open_lane(self, host: str, offer: BulkOffer, greeting: bytes, sink: BulkSink, counters: BulkCounters) -> LaneReceiver:
        """Begin to connect to the lane that is offered at ``host``; whoever calls this runs what it returns."""
        with self._lock:
            number = self._next = self._next + 1
            lane = self._lanes[number] = LaneReceiver(self, number, sink, counters)
            ended = self._ended
        if ended:
            self._abandon()
        self.command(Command(Order.OPEN, number, 0, offer.port, host, offer.fingerprint, greeting))
        return lane

    def command(self, command: Command) -> None:
        """Tell the process, unless it is gone. Safe from any thread."""
        with self._lock, suppress(OSError):
            self._control.sendall(command.encode())

    async def run(self, limiter: trio.CapacityLimiter) -> None:
        """Take what the process brings, until it ends or the task is cancelled; nothing of it is left then."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._shut_at_the_end)
                await trio.to_thread.run_sync(self._take_events, limiter=limiter)
                nursery.cancel_scope.cancel()
        finally:
            self._abandon()
            self._control.close()
            with suppress(BufferError):  # a sink kept what is good during its call only
                self._view.release()
                self._memory.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._reap)

    async def _shut_at_the_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with suppress(OSError):  # the process was faster
                self._control.shutdown(socket.SHUT_RDWR)

    @in_named_thread
    def _take_events(self) -> None:
        buffer = memoryview(bytearray(EVENT_BYTES * _EVENTS_AT_ONCE))
        filled = 0
        try:
            while count := self._control.recv_into(buffer[filled:]):
                filled += count
                whole = filled - filled % EVENT_BYTES
                for start in range(0, whole, EVENT_BYTES):
                    self._take(Event.decode(buffer[start : start + EVENT_BYTES]))
                buffer[: filled - whole] = bytes(buffer[whole:filled])
                filled -= whole
        except ConnectionError:
            pass  # it was killed
        except ProtocolError as error:
            logger.warning("ended a process that receives on bulk lanes: %s", error.message)

    def _take(self, event: Event) -> None:
        """Work one event in. Raises ProtocolError."""
        lane = self._lanes.get(event.lane)
        if lane is None:
            raise ProtocolError(f"lane {event.lane} is none of its lanes")
        match event.kind:
            case Kind.OPENED:
                lane.opened()
            case Kind.BEGUN:
                lane.begun(event.header)
            case Kind.BLOCK:
                start = event.slot * SLOT_BYTES
                lane.take(event.header, self._view[start : start + SLOT_BYTES])
                self.command(Command(Order.FREE, slot=event.slot))
            case Kind.ENDED:
                with self._lock:
                    del self._lanes[event.lane]
                lane.ended(event.ending)

    def _abandon(self) -> None:
        """End all lanes, since nobody brings anything for them any more."""
        with self._lock:
            self._ended = True
            lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.ended(Ending.GONE)

    def _reap(self) -> None:
        try:
            status = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status:
            logger.warning("a process that receives on bulk lanes ended with status %d", status)


class LaneProcesses:
    """The processes of a node, each started when it is needed. ``start`` runs one's task beside the caller."""

    def __init__(self, start: Callable[[LaneProcess], None]) -> None:
        self._start = start
        self._processes: list[LaneProcess] = []

    def prepare(self) -> None:
        """Start the first one ahead of its first lane, where that can be done."""
        with suppress(PeerUnreachableError):
            self.least_busy()

    def least_busy(self) -> LaneProcess:
        """Return a process for the next lane. Raises PeerUnreachableError where none can be started."""
        self._processes = [process for process in self._processes if not process.ended]
        best = min(self._processes, key=lambda process: process.lanes, default=None)
        if best is None or (best.lanes and len(self._processes) < process_count()):
            try:
                best = LaneProcess()
            except OSError as error:
                raise PeerUnreachableError(f"no process can be started to receive: {error}") from error
            self._processes.append(best)
            self._start(best)
        return best


def _shared_memory() -> int:
    """Return the descriptor of an empty file in memory; where there are none, of one without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("p2pkv bulk")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
