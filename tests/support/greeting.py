"""A consumer among peers that it is connected to already, and what it does is watched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from p2pkv.errors import PeerUnreachableError
from p2pkv.ports import (
    Buffer,
    BulkOffer,
    BulkReceiver,
    BulkSender,
    BulkSink,
    BulkSource,
    Channel,
    Network,
    PeerAddress,
    PeerId,
)
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, Progress
from p2pkv.swarm.target import ManifestTarget, Target
from sims.network import Link, World
from sims.node import SimNode
from sims.routing import ProviderRecords
from tests.support.artifacts import PUBLISHER, Sample, make_sample
from tests.support.sim_town import TOKENS, Town, WatchedRouting, prompt

SAMPLE = make_sample(TOKENS)
SLOW = Link(up=200_000)  # the whole sample takes 0.3 s
FAR = Link(latency_s=0.1)


class SlowlyClosing:
    """A channel whose end takes a while."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.peer_id, self.remote_host = channel.peer_id, channel.remote_host

    async def send(self, data: Buffer) -> None:
        await self._channel.send(data)

    async def receive(self) -> bytes:
        return await self._channel.receive()

    async def aclose(self) -> None:
        await trio.sleep(0.1)
        await self._channel.aclose()


class WatchedNetwork:
    """A node's network that names ``connected`` as its connected peers, and notes whom it opens channels to."""

    def __init__(self, network: Network, connected: Sequence[PeerId]) -> None:
        self._network = network
        self.peer_id = network.peer_id
        self.connected_peers = connected
        self.opened: list[PeerId] = []
        self.opened_at: dict[PeerId, float] = {}
        self.closing: Callable[[Channel], Channel] = lambda channel: channel

    async def open_channel(self, peer: PeerAddress) -> Channel:
        self.opened.append(peer.peer_id)
        self.opened_at.setdefault(peer.peer_id, trio.current_time())
        return self.closing(await self._network.open_channel(peer))

    def set_channel_handler(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        self._network.set_channel_handler(handler)


class Lanes:
    """A ``BulkLane`` that offers in its node's name, and notes whose offers it takes up; nobody gets a lane by it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.taken_up: dict[str, float] = {}

    def offer(self, peer_id: PeerId, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        return BulkOffer(1, self._name.encode().ljust(32), bytes(32))

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        self.taken_up[offer.token.decode().rstrip()] = trio.current_time()
        await trio.lowlevel.checkpoint()
        raise PeerUnreachableError("there is no lane")


class Place:
    """A consumer, whose network and routing are watched, among nodes that it may be connected to."""

    def __init__(self, world: World) -> None:
        self.town = Town(world)
        self.world = world
        self.events: list[tuple[float, FetchEvent]] = []

    @property
    def records(self) -> ProviderRecords:
        return self.town.records

    def holder(self, name: str, sample: Sample = SAMPLE, link: Link | None = None) -> SimNode:
        """A node that has the sample, and has announced nothing."""
        node = self.town.node(name, link=link)
        node.hold(sample.artifact, sample.blocks)
        return node

    def consumer(self, *connected: PeerId) -> SimNode:
        node = self.town.node("c", trusted=[PUBLISHER])
        self.network = node.context.network = WatchedNetwork(node.network, connected)
        self.routing = node.context.routing = WatchedRouting(node.routing)
        return node

    async def fetch(self, consumer: SimNode, target: Target | None = None) -> FetchReport:
        self.started = trio.current_time()
        return await consumer.fetch(target or prompt(), emit=lambda event: self.events.append((trio.current_time(), event)))

    @property
    def told(self) -> str:
        return "\n".join(event.detail for _, event in self.events if isinstance(event, Progress))

    @property
    def matched_at(self) -> float:
        return next(time for time, event in self.events if isinstance(event, Matched))


TARGETS = [pytest.param(prompt(), id="prompt"), pytest.param(ManifestTarget(SAMPLE.cid), id="manifest")]
