"""The process that receives on bulk lanes: TLS, and nothing else.

A node has one interpreter, and its event loop needs it; so the records of 16 KiB, each of which takes an interpreter, are
received in another one. Blocks land in memory that both share, unverified: hashing and storing is the node's part.

OpenSSL is that of `cryptography`, as for senders (`bulk_tls`), and writes straight into that memory: with the copy that
pyOpenSSL makes, or with `ssl`, receiving takes half as long again.

``python -m p2pkv_node.bulk_process SOCKET MEMORY``, both descriptors. It ends when the node closes the socket, or is gone.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import mmap
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from cryptography.hazmat.bindings.openssl.binding import Binding
from OpenSSL import SSL, crypto

from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv_node.bulk_wire import (
    BLOCKS_UNDER_WAY,
    COMMAND_BYTES,
    HEADER_BYTES,
    MAGIC,
    MEMORY_BYTES,
    SLOT_BYTES,
    SLOT_COUNT,
    Command,
    Ending,
    Event,
    Kind,
    Order,
    frame_length,
)

# What a lane waits for, beside the selectors' EVENT_READ and EVENT_WRITE.
_TURN: Final = 0  # nothing: the others are next
_SLOT: Final = -1
# What a few lanes use at a time.
_TOUCHED_SLOTS: Final = BLOCKS_UNDER_WAY + 4

_OPENSSL: Final = Binding()


def client_context() -> SSL.Context:
    """Return the consumer's context: TLS 1.3, any certificate, since the caller pins the one that it was told of."""
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    return context


class _TlsReader(SSL.Connection):
    """The client's end of a connection over a socket that does not block."""

    def __init__(self, context: SSL.Context, raw: socket.socket) -> None:
        super().__init__(context, raw)
        self.set_connect_state()

    def certificate(self) -> bytes:
        """Return the peer's certificate (DER); after the handshake."""
        certificate = self.get_peer_certificate()
        return crypto.dump_certificate(crypto.FILETYPE_ASN1, certificate) if certificate is not None else b""

    def read_into(self, memory: memoryview) -> int:
        """Decrypt what is here, one record at most, to the front of ``memory``; return its bytes. Raises SSL.Error."""
        # What `recv_into` does with a buffer of its own, by the same names.
        count: int = _OPENSSL.lib.SSL_read(self._ssl, _OPENSSL.ffi.from_buffer(memory), len(memory))
        if count <= 0:
            self._raise_ssl_error(self._ssl, count)
        return count


class _EndedError(Exception):
    """The peer broke the rules."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.name)
        self.ending = ending


class _Lane:
    """One lane. ``steps`` runs it as far as it can, and yields what it waits for."""

    def __init__(self, process: _Process, command: Command) -> None:
        self.number = command.lane
        self.slot: int | None = None  # the one being filled
        self.waits_for = _TURN
        self.socket = socket.socket(socket.AF_INET6 if ":" in command.host else socket.AF_INET, socket.SOCK_STREAM)
        self.steps = self._run(command)
        self._process = process

    def _run(self, command: Command) -> Iterator[int]:
        """Raises OSError, SSL.Error, _EndedError."""
        yield from self._connect(command.host, command.port)
        tls = _TlsReader(self._process.context, self.socket)
        yield from self._drive(tls.do_handshake)
        if not hmac.compare_digest(hashlib.sha256(tls.certificate()).digest(), command.fingerprint):
            raise _EndedError(Ending.CERTIFICATE)
        yield from self._drive(partial(tls.send, command.greeting))
        answer = memoryview(bytearray(len(MAGIC)))
        yield from self._fill(tls, answer)
        if bytes(answer) != MAGIC:
            raise _EndedError(Ending.GREETING)
        self._process.tell(Event(Kind.OPENED, self.number))
        header = memoryview(bytearray(HEADER_BYTES))
        while True:
            yield from self._fill(tls, header)
            length = frame_length(header)
            if not 0 < length <= MAX_CODED_BLOCK_BYTES:
                raise _EndedError(Ending.FRAME)
            while (slot := self._process.take_slot()) is None:
                yield _SLOT
            self.slot = slot
            begun = False
            for wanted in self._fill(tls, self._process.memory[slot * SLOT_BYTES :][:length]):
                if not begun:  # the node need not wait for the bytes of a block that it does not want
                    self._process.tell(Event(Kind.BEGUN, self.number, header=bytes(header)))
                    begun = True
                yield wanted
            self.slot = None
            self._process.hand_over(Event(Kind.BLOCK, self.number, slot, header=bytes(header)))
            yield _TURN

    def _connect(self, host: str, port: int) -> Iterator[int]:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = self.socket.connect_ex((host, port))
        if error == errno.EINPROGRESS:
            yield selectors.EVENT_WRITE
            error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")

    def _drive(self, step: Callable[[], object]) -> Iterator[int]:
        while True:
            try:
                step()
            except SSL.WantReadError:
                yield selectors.EVENT_READ
            except SSL.WantWriteError:
                yield selectors.EVENT_WRITE
            else:
                return

    def _fill(self, tls: _TlsReader, buffer: memoryview) -> Iterator[int]:
        while buffer:
            try:
                buffer = buffer[tls.read_into(buffer) :]
            except SSL.WantReadError:
                yield selectors.EVENT_READ


class _Process:
    """All lanes of the process, in turns of at most one block."""

    def __init__(self, node: socket.socket, memory: memoryview) -> None:
        self.context = client_context()
        self.memory = memory
        self._free = list(reversed(range(SLOT_COUNT)))  # a stack: the slots used last are in the processor's cache
        for slot in self._free[-_TOUCHED_SLOTS:]:  # memory that is touched for the first time costs more than what it is for
            self.memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        self._under_way: set[int] = set()  # slots that the node has
        self._node = node
        self._lanes: dict[int, _Lane] = {}
        self._ready: dict[_Lane, None] = {}
        self._selector = selectors.DefaultSelector()
        self._commands = bytearray()

    def tell(self, event: Event) -> None:
        self._node.sendall(event.encode())

    def take_slot(self) -> int | None:
        """Return a slot to fill; ``None`` while the node is behind."""
        return self._free.pop() if len(self._under_way) < BLOCKS_UNDER_WAY else None

    def hand_over(self, block: Event) -> None:
        self._under_way.add(block.slot)
        self.tell(block)

    def run(self) -> None:
        """Work until the node is gone."""
        self._selector.register(self._node, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(0 if self._ready else None):
                if key.data is not None:
                    self._ready[key.data] = None
                elif not self._obey():
                    return
            for lane in tuple(self._ready):
                if self._lanes.get(lane.number) is lane:
                    self._turn(lane)
                else:
                    del self._ready[lane]  # ended by the node in this round

    def _obey(self) -> bool:
        """Carry out what the node said; return whether it is still there."""
        data = self._node.recv(64 * COMMAND_BYTES)
        self._commands += data
        whole = len(self._commands) // COMMAND_BYTES * COMMAND_BYTES
        for start in range(0, whole, COMMAND_BYTES):
            command = Command.decode(bytes(self._commands[start : start + COMMAND_BYTES]))
            if command.order is Order.OPEN:
                self._open(command)
            elif command.order is Order.FREE:
                self._give_back(command.slot)
            elif command.lane in self._lanes:
                self._end(self._lanes[command.lane], Ending.GONE)
        del self._commands[:whole]
        return bool(data)

    def _open(self, command: Command) -> None:
        try:
            lane = _Lane(self, command)
        except OSError:  # no descriptor is left: the other lanes go on
            self.tell(Event(Kind.ENDED, command.lane))
        else:
            self._lanes[command.lane] = lane
            self._ready[lane] = None

    def _give_back(self, slot: int) -> None:
        self._under_way.discard(slot)
        self._free.append(slot)
        self._ready.update((lane, None) for lane in self._lanes.values() if lane.waits_for == _SLOT)

    def _turn(self, lane: _Lane) -> None:
        try:
            self._await(lane, next(lane.steps))
        except _EndedError as error:
            self._end(lane, error.ending)
        except (OSError, SSL.Error):
            self._end(lane, Ending.GONE)

    def _await(self, lane: _Lane, wanted: int) -> None:
        if wanted != _TURN:
            del self._ready[lane]
        if wanted not in (_TURN, lane.waits_for):
            if lane.waits_for > 0:
                self._selector.unregister(lane.socket)
            if wanted > 0:
                self._selector.register(lane.socket, wanted, lane)
            lane.waits_for = wanted

    def _end(self, lane: _Lane, ending: Ending) -> None:
        del self._lanes[lane.number]
        if lane.waits_for > 0:
            self._selector.unregister(lane.socket)
        lane.socket.close()
        if lane.slot is not None:
            self._give_back(lane.slot)
        self.tell(Event(Kind.ENDED, lane.number, ending=ending))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the node decides
    control, memory = (int(argument) for argument in sys.argv[1:3])
    with socket.socket(fileno=control) as node, suppress(BrokenPipeError):  # the node may go while it is told something
        _Process(node, memoryview(mmap.mmap(memory, MEMORY_BYTES))).run()


if __name__ == "__main__":
    main()
