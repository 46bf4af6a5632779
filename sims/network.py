"""Twins of the libp2p network: nodes of one :class:`World` in one process, over memory channels.

A node may be slow (``latency_s``, ``bytes_per_second`` of what it sends) and may die (:meth:`World.kill`): its channels break,
and nobody can dial it any more. All waiting is trio's, so a mock clock runs it in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from p2pkv.errors import P2pkvError, PeerUnreachableError
from p2pkv.ports import Buffer, Channel, PeerAddress, PeerId
from p2pkv.swarm.background import open_background
from p2pkv.units import KIB

logger = logging.getLogger(__name__)

# What is under way in one direction, as in a yamux stream: so many pieces of this size, then the sender waits.
_PIECE_BYTES: Final = 64 * KIB
_PIECES_UNDER_WAY: Final = 4


class World:
    """All nodes that can reach one another; :func:`open_world` makes it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.nodes: dict[PeerId, MemoryNetwork] = {}

    def add_node(self, peer_id: PeerId, *, latency_s: float = 0.0, bytes_per_second: float | None = None) -> MemoryNetwork:
        """Add a node. ``latency_s`` delays what it dials and receives; ``bytes_per_second`` bounds all that it sends."""
        node = MemoryNetwork(self, peer_id, latency_s=latency_s, bytes_per_second=bytes_per_second)
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


class MemoryNetwork:
    """A node of the world: the port :class:`p2pkv.ports.Network`."""

    def __init__(self, world: World, peer_id: PeerId, *, latency_s: float, bytes_per_second: float | None) -> None:
        self.latency_s = latency_s
        self.bytes_per_second = bytes_per_second
        self.uplink = trio.Lock()
        self.channels: set[MemoryChannel] = set()
        self._world = world
        self._peer_id = peer_id
        self._handler: Callable[[Channel], Awaitable[None]] | None = None
        self._serving: set[trio.CancelScope] = set()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._peer_id}",)

    def set_channel_handler(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        self._handler = handler

    async def open_channel(self, peer: PeerAddress) -> Channel:
        await trio.sleep(self.latency_s)
        other = self._world.nodes.get(peer.peer_id)
        if other is None or other is self or other._handler is None or self._world.nodes.get(self._peer_id) is not self:
            raise PeerUnreachableError(f"{peer.peer_id} cannot be dialled.")
        mine, theirs = _channel_pair(self, other)
        self._world.nursery.start_soon(other._serve, theirs, other._handler)
        return mine

    def die(self) -> None:
        for channel in tuple(self.channels):
            channel.break_off()
        for scope in tuple(self._serving):
            scope.cancel()

    async def _serve(self, channel: MemoryChannel, handler: Callable[[Channel], Awaitable[None]]) -> None:
        with trio.CancelScope() as scope:
            self._serving.add(scope)
            try:
                await handler(channel)
            except P2pkvError as error:
                logger.info("the channel of %s ends: %s", channel.peer_id, error)
            except Exception:
                logger.exception("the handler of a channel of %s failed", channel.peer_id)
            finally:
                self._serving.discard(scope)
                channel.close()


class MemoryChannel:
    """One end of a channel between two nodes: the port :class:`p2pkv.ports.Channel`."""

    def __init__(
        self,
        node: MemoryNetwork,
        peer: MemoryNetwork,
        out: trio.MemorySendChannel[bytes],
        arrived: trio.MemoryReceiveChannel[bytes],
    ) -> None:
        self.other_end: MemoryChannel | None = None
        self._node = node
        self._peer_id = peer.peer_id
        self._out = out
        self._arrived = arrived
        self._lost = False
        node.channels.add(self)

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
            piece = bytes(view[start : start + _PIECE_BYTES])
            if self._node.bytes_per_second is not None:
                async with self._node.uplink:
                    await trio.sleep(len(piece) / self._node.bytes_per_second)
            try:
                await self._out.send(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise PeerUnreachableError(f"The channel to {self._peer_id} is closed.") from None

    async def receive(self) -> bytes:
        try:
            data = await self._arrived.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if self._lost:
                raise PeerUnreachableError(f"The connection to {self._peer_id} was lost.") from None
            return b""
        await trio.sleep(self._node.latency_s)
        return data

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._out.close()
        self._arrived.close()
        self._node.channels.discard(self)

    def break_off(self) -> None:
        """Lose the connection: nothing more goes through, in either direction, and both ends know."""
        for end in (self, self.other_end):
            if end is not None and end in end._node.channels:
                end._lost = True
                end.close()


def _channel_pair(one: MemoryNetwork, other: MemoryNetwork) -> tuple[MemoryChannel, MemoryChannel]:
    there_send, there = trio.open_memory_channel[bytes](_PIECES_UNDER_WAY)
    back_send, back = trio.open_memory_channel[bytes](_PIECES_UNDER_WAY)
    mine, theirs = MemoryChannel(one, other, there_send, back), MemoryChannel(other, one, back_send, there)
    mine.other_end, theirs.other_end = theirs, mine
    return mine, theirs
