"""Twins of the libp2p network: nodes of one :class:`World` in one process, over memory channels.

Each node has a link to the world: a latency, and a rate in each direction that all its channels share fairly, piece by piece.
It may die (:meth:`World.kill`): its channels break, and nobody can dial it any more; or freeze: its channels stay, and nothing
goes out. All waiting is trio's, so a mock clock runs it in virtual time. Bytes are counted as channels carry them: what
encryption and packets add is left out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from p2pkv.errors import P2pkvError, PeerUnreachableError
from p2pkv.ports import Buffer, Channel, PeerAddress, PeerId
from p2pkv.swarm.background import open_background
from p2pkv.units import KIB, MIB

logger = logging.getLogger(__name__)

# What travels in one go: small enough that channels take turns often.
_PIECE_BYTES: Final = 128 * KIB
# What may be under way in one direction of a channel, as a transport's window: then the sender waits for the reader.
_WINDOW_BYTES: Final = MIB


@dataclass(frozen=True, slots=True)
class Link:
    """How a node is connected. ``latency_s`` is one way, from or to the middle of the world; rates are bytes per second."""

    up: float | None = None
    down: float | None = None
    latency_s: float = 0.0


class World:
    """All nodes that can reach one another; :func:`open_world` makes it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.nodes: dict[PeerId, MemoryNetwork] = {}

    def add_node(self, peer_id: PeerId, link: Link | None = None) -> MemoryNetwork:
        node = MemoryNetwork(self, peer_id, link or Link())
        self.nodes[peer_id] = node
        return node

    def kill(self, peer_id: PeerId) -> None:
        """End a node at once, as if its machine lost power."""
        self.nodes.pop(peer_id).die()


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """Yield an empty world; leaving ends all its nodes."""
    async with open_background() as nursery:
        yield World(nursery)


class _Pipe:
    """One direction of a node's link; its ``rate`` in bytes per second may change.

    Whoever reserves next is served next, so channels that send piece by piece share it.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.rate = bytes_per_second
        self._free_at = 0.0

    def reserve(self, size: int, start: float) -> float:
        """Return when ``size`` bytes that come at ``start`` are through."""
        if self.rate is None:
            return start
        self._free_at = max(self._free_at, start) + size / self.rate
        return self._free_at


class MemoryNetwork:
    """A node of the world: the port :class:`p2pkv.ports.Network`."""

    def __init__(self, world: World, peer_id: PeerId, link: Link) -> None:
        self.link = link
        self.up, self.down = _Pipe(link.up), _Pipe(link.down)
        self.sent_bytes = 0
        self.received_bytes = 0
        self.channels: dict[MemoryChannel, None] = {}  # in the order opened, so that equal seeds give equal traces
        self._world = world
        self._peer_id = peer_id
        self._handler: Callable[[Channel], Awaitable[None]] | None = None
        self._serving: dict[trio.CancelScope, None] = {}
        self._thaw: trio.Event | None = None

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._peer_id}",)

    @property
    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(dict.fromkeys(channel.peer_id for channel in self.channels))

    def set_channel_handler(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        self._handler = handler

    async def open_channel(self, peer: PeerAddress) -> Channel:
        other = self._world.nodes.get(peer.peer_id)
        await trio.sleep(2 * _latency(self, other or self))
        if other is None or other is self or other._handler is None or not (self.alive and other.alive):
            raise PeerUnreachableError(f"{peer.peer_id} cannot be dialled.")
        mine, theirs = _channel_pair(self, other)
        self._world.nursery.start_soon(other._serve, theirs, other._handler)
        return mine

    @property
    def alive(self) -> bool:
        return self._world.nodes.get(self._peer_id) is self

    def freeze(self) -> None:
        """Send nothing any more, as a machine that hangs: its connections stay open."""
        if self._thaw is None:
            self._thaw = trio.Event()

    def thaw(self) -> None:
        """Go on after :meth:`freeze`."""
        if self._thaw is not None:
            self._thaw.set()
            self._thaw = None

    async def thawed(self) -> None:
        while self._thaw is not None:
            await self._thaw.wait()

    def die(self) -> None:
        for channel in tuple(self.channels):
            channel.break_off()
        for scope in tuple(self._serving):
            scope.cancel()

    async def _serve(self, channel: MemoryChannel, handler: Callable[[Channel], Awaitable[None]]) -> None:
        with trio.CancelScope() as scope:
            self._serving[scope] = None
            try:
                await handler(channel)
            except P2pkvError as error:
                logger.info("the channel of %s ends: %s", channel.peer_id, error)
            except Exception:
                logger.exception("the handler of a channel of %s failed", channel.peer_id)
            finally:
                self._serving.pop(scope, None)
                channel.close()


class _Way:
    """One direction of a channel: pieces under way, and when each reaches the receiver's link."""

    def __init__(self, sender: MemoryNetwork, receiver: MemoryNetwork) -> None:
        self.sender = sender
        self.receiver = receiver
        self.closed = False
        self._latency_s = _latency(sender, receiver)
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = trio.Event()

    def change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def put(self, piece: bytes) -> bool:
        """Send one piece; ``False`` when the channel is closed."""
        await self.sender.thawed()
        while self._bytes and self._bytes + len(piece) > _WINDOW_BYTES and not self.closed:
            await self._changed.wait()
        await trio.sleep_until(self.sender.up.reserve(len(piece), trio.current_time()))
        await self.sender.thawed()
        if self.closed:
            return False
        self.sender.sent_bytes += len(piece)
        # The receiver's link is reserved in the order sent, which is the order of arrival where latencies are alike.
        arrives_at = self.receiver.down.reserve(len(piece), trio.current_time() + self._latency_s)
        self._pieces.append((arrives_at, piece))
        self._bytes += len(piece)
        self.change()
        return True

    async def get(self) -> bytes:
        """Return the next piece, or nothing where the channel is closed. One that is cancelled takes nothing."""
        while not self._pieces:
            if self.closed:
                return b""
            await self._changed.wait()
        arrives_at, piece = self._pieces[0]
        if arrives_at > trio.current_time():
            await trio.sleep_until(arrives_at)
        if not self._pieces:  # closed by ourselves meanwhile
            return b""
        self._pieces.popleft()
        self._bytes -= len(piece)
        self.receiver.received_bytes += len(piece)
        self.change()
        return piece

    def close(self, *, discard: bool) -> None:
        """End it; what is under way still arrives unless it is to be discarded."""
        self.closed = True
        if discard:
            self._pieces.clear()
            self._bytes = 0
        self.change()


class MemoryChannel:
    """One end of a channel between two nodes: the port :class:`p2pkv.ports.Channel`."""

    def __init__(self, node: MemoryNetwork, peer: MemoryNetwork, out: _Way, back: _Way) -> None:
        self.other_end: MemoryChannel | None = None
        self._node = node
        self._peer_id = peer.peer_id
        self._out = out
        self._back = back
        self._lost = False
        node.channels[self] = None

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def remote_host(self) -> str | None:
        return "127.0.0.1"

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        await trio.lowlevel.checkpoint()
        for start in range(0, len(view), _PIECE_BYTES):
            if not await self._out.put(bytes(view[start : start + _PIECE_BYTES])):
                raise PeerUnreachableError(f"The channel to {self._peer_id} is closed.")

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        data = await self._back.get()
        if not data and self._lost:
            raise PeerUnreachableError(f"The connection to {self._peer_id} was lost.")
        return data

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._out.close(discard=False)
        self._back.close(discard=True)
        self._node.channels.pop(self, None)

    def break_off(self) -> None:
        """Lose the connection: nothing more goes through, in either direction, and both ends know."""
        for end in (self, self.other_end):
            if end is not None and end in end._node.channels:
                end._lost = True
                end.close()


def _latency(one: MemoryNetwork, other: MemoryNetwork) -> float:
    return one.link.latency_s + other.link.latency_s


def _channel_pair(one: MemoryNetwork, other: MemoryNetwork) -> tuple[MemoryChannel, MemoryChannel]:
    there, back = _Way(one, other), _Way(other, one)
    mine, theirs = MemoryChannel(one, other, there, back), MemoryChannel(other, one, back, there)
    mine.other_end, theirs.other_end = theirs, mine
    return mine, theirs
