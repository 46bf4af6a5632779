"""A provider over memory channels, and clients that may say anything to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from p2pkv.exchange.connection import BULK, ConsumerConnection
from p2pkv.exchange.messages import (
    Block,
    Message,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    MAX_WANTS_PER_PEER,
)
from p2pkv.ports import Channel, PeerAddress
from p2pkv.swarm.serve import Server
from p2pkv.units import KIB, MIB
from sims.network import World, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords
from sims.store import MemoryBlockStore

DEADLINE_S = 100.0  # of virtual time
CIDS = [Cid.of_block(number.to_bytes(2, "big")) for number in range(MAX_WANTS_PER_PEER + 1)]


class EndlessStore(MemoryBlockStore):
    """Holds every CID that anybody asks for, as ``block_bytes`` zeros, and counts what is read."""

    def __init__(self, block_bytes: int = MIB) -> None:
        super().__init__()
        self.block_bytes = block_bytes
        self.reads = 0

    def has(self, cid: Cid) -> bool:
        return True

    def size(self, cid: Cid) -> int:
        return self.block_bytes

    def read_into(self, cid: Cid, buffer: memoryview) -> int:
        self.reads += 1
        return self.block_bytes


class Place:
    """A provider and whoever connects to it."""

    def __init__(self, world: World, provider: SimNode) -> None:
        self.world = world
        self.provider = provider

    @property
    def server(self) -> Server:
        return self.provider.server

    async def channel(self, peer: str) -> Channel:
        """Open one more channel of ``peer``."""
        node = self.world.nodes.get(peer) or self.world.add_node(peer)
        return await node.open_channel(PeerAddress("provider"))

    async def join(self, peer: str) -> Client:
        client = Client(await self.channel(peer))
        await client.flush()
        return client

    def outstanding(self, peer: str) -> int:
        return self.server.statistics().outstanding_by_peer.get(peer, 0)


class Client:
    """An honest end of a channel, unless a test sends bytes of its own."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.connection = ConsumerConnection("client", frozenset({BULK}))
        self.messages: list[Message] = []

    async def flush(self) -> None:
        await self.channel.send(self.connection.data_to_send())

    async def want(self, cids: Sequence[Cid]) -> None:
        self.connection.want(cids)
        await self.flush()

    async def cancel(self, cids: Sequence[Cid]) -> None:
        self.connection.cancel(cids)
        await self.flush()

    async def read_until(self, condition: Callable[[list[Message]], bool]) -> None:
        """Read until ``condition`` holds of all messages so far."""
        with trio.fail_after(DEADLINE_S):
            while not condition(self.messages):
                data = await self.channel.receive()
                assert data, "the provider closed the channel"
                self.messages += self.connection.receive_data(data)

    async def fetch(self, cids: Sequence[Cid]) -> None:
        """Want blocks and read until all of them are here."""
        count = len(self.blocks) + len(cids)
        await self.want(cids)
        await self.read_until(lambda _: len(self.blocks) >= count)

    async def read_to_the_end(self) -> list[Message]:
        with trio.fail_after(DEADLINE_S):
            while data := await self.channel.receive():
                self.messages += self.connection.receive_data(data)
        return self.messages

    @property
    def blocks(self) -> list[Block]:
        return [message for message in self.messages if isinstance(message, Block)]


@asynccontextmanager
async def open_place(store: MemoryBlockStore | None = None, *, limit: float | None = None) -> AsyncIterator[Place]:
    async with open_world() as world:
        provider = SimNode(world, ProviderRecords(), "provider", store=store)
        if limit is not None:
            provider.server = Server(provider.context, limit=limit)
            provider.network.set_channel_handler(provider.server.serve)
        world.nursery.start_soon(provider.server.run)
        yield Place(world, provider)


def stored(count: int, size: int = 64 * KIB) -> tuple[MemoryBlockStore, dict[Cid, bytes]]:
    store = MemoryBlockStore()
    blocks = {Cid.of_block(data): data for data in (bytes([number]) * size for number in range(count))}
    for cid, data in blocks.items():
        store.write(cid, data)
    return store, blocks


async def serves_on(place: Place, peer: str = "honest") -> None:
    """An honest peer gets fifty blocks."""
    client = await place.join(peer)
    await client.fetch(CIDS[:50])
    await client.channel.aclose()
