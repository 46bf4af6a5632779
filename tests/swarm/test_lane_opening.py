"""When a consumer has a bulk lane opened, and what waits for it: large blocks, for a second at most."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import pytest
import trio
from trio.testing import MockClock

from p2pkv.errors import P2pkvError, PeerUnreachableError
from p2pkv.exchange.connection import BULK, ProviderConnection
from p2pkv.exchange.messages import BulkClosed, BulkOffered, BulkRequest, Cancel, Message, WantBlocks
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender, BulkSink, BulkSource, Channel, PeerAddress, PeerId
from p2pkv.swarm.provider import Provider
from p2pkv.units import KIB
from sims.network import MemoryChannel, open_world
from sims.node import SimNode
from sims.routing import ProviderRecords

LARGE = [Cid.of_block(b"large %d" % number) for number in range(3)]
SMALL = Cid.of_block(b"small")
NODE = Cid.of_node(b"node")
SIZES = {**dict.fromkeys(LARGE, 64 * KIB + 1), SMALL: 64 * KIB, NODE: MAX_CODED_BLOCK_BYTES}


@dataclass
class Other:
    """The other end, and the lane between: how they behave, and what they are asked for."""

    features: frozenset[str] = frozenset({BULK})
    hello_after_s: float = 0.0
    offer_after_s: float = 0.0
    port: int = 1
    connect_after_s: float = 0.0
    refuses: bool = False
    requests: int = 0
    wanted: list[Cid] = field(default_factory=list)
    cancelled: list[Cid] = field(default_factory=list)
    wanted_before_closed: int | None = None

    async def serve(self, channel: Channel) -> None:
        connection = ProviderConnection("peer", self.features)
        await trio.sleep(self.hello_after_s)
        await channel.send(connection.data_to_send())
        while data := await channel.receive():
            for message in connection.receive_data(data):
                match message:
                    case BulkRequest():
                        self.requests += 1
                        if self.offer_after_s == inf:
                            continue
                        await trio.sleep(self.offer_after_s)
                        connection.offer_bulk(BulkOffered(self.port, bytes(32), bytes(32)))
                    case BulkClosed():
                        self.wanted_before_closed = len(self.wanted)
                    case WantBlocks(cids):
                        self.wanted += cids
                    case Cancel(cids):
                        self.cancelled += cids
            await channel.send(connection.data_to_send())

    # As the consumer's BulkLane and its end:

    def offer(self, peer_id: PeerId, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        return None

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        await trio.sleep(self.connect_after_s)
        if self.refuses:
            raise PeerUnreachableError("refused")
        return self

    def close(self) -> None:
        """Nothing to end."""


class Deaf:
    """Nothing that a provider tells is of interest here."""

    def provider_delivered(self, provider: Provider, blocks: Sequence[tuple[Cid, int]]) -> None: ...

    def provider_lied(self, provider: Provider, cid: Cid) -> None: ...

    def store_failed(self, error: P2pkvError) -> None: ...

    def provider_said(self, provider: Provider, message: Message) -> None: ...


@asynccontextmanager
async def open_provider(other: Other, *, bulk: bool = True) -> AsyncIterator[Provider]:
    """A provider that runs, at the other end of which ``other`` is; ``bulk``: whether we can use lanes."""
    async with open_world() as world, trio.open_nursery() as nursery:
        SimNode(world, ProviderRecords(), "peer").network.set_channel_handler(other.serve)
        node = SimNode(world, ProviderRecords(), "me")
        node.context.bulk = other if bulk else None
        provider = Provider(node.context, await node.network.open_channel(PeerAddress("peer")), Deaf())
        nursery.start_soon(provider.run)
        yield provider
        nursery.cancel_scope.cancel()


def want(provider: Provider, *cids: Cid) -> None:
    provider.want(cids, SIZES.__getitem__)


async def a_moment() -> None:
    await trio.sleep(0.001)


# --- when ----------------------------------------------------------------------------------------------------------------


async def test_a_lane_is_requested_when_it_is_asked_for_and_once(autojump_clock: MockClock) -> None:
    other = Other()
    async with open_provider(other) as provider:
        await trio.sleep(5)
        want(provider, SMALL, NODE)
        await trio.sleep(5)
        assert other.requests == 0
        for _ in range(2):
            provider.request_lane()
            provider.request_lane()
            await a_moment()
            assert other.requests == 1
            assert provider.bulk


async def test_a_lane_that_is_asked_for_early_is_requested_at_hello(autojump_clock: MockClock) -> None:
    other = Other(hello_after_s=1.0)
    async with open_provider(other) as provider:
        provider.request_lane()
        await trio.sleep(0.999)
        assert other.requests == 0
        await trio.sleep(0.002)
        assert other.requests == 1


async def test_a_large_block_asks_for_a_lane_itself(autojump_clock: MockClock) -> None:
    other = Other()
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, LARGE[0])
        await a_moment()
        assert other.requests == 1
        assert provider.bulk
        assert other.wanted == [LARGE[0]]


@pytest.mark.parametrize("bulk", [True, False])
async def test_no_lane_is_requested_where_one_side_has_none(autojump_clock: MockClock, bulk: bool) -> None:
    other = Other(features=frozenset() if bulk else frozenset({BULK}))
    async with open_provider(other, bulk=bulk) as provider:
        provider.request_lane()
        await provider.wait_ready()
        want(provider, *LARGE)
        await a_moment()
        assert other.requests == 0
        assert other.wanted == LARGE


# --- what waits ----------------------------------------------------------------------------------------------------------


async def test_large_blocks_wait_for_the_lane_and_nothing_else_does(autojump_clock: MockClock) -> None:
    other = Other(connect_after_s=0.5)
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, LARGE[0], SMALL, LARGE[1], NODE)
        await trio.sleep(0.499)
        assert other.wanted == [SMALL, NODE]
        await trio.sleep(0.002)
        assert provider.bulk
        assert other.wanted == [SMALL, NODE, LARGE[0], LARGE[1]]
        want(provider, LARGE[2])
        await a_moment()
        assert other.wanted[4:] == [LARGE[2]]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Other(offer_after_s=inf), id="no offer"),
        pytest.param(Other(connect_after_s=100.0), id="no connection"),
        pytest.param(Other(offer_after_s=0.9, connect_after_s=0.5), id="both slow"),
    ],
)
async def test_they_wait_for_a_second_at_most(autojump_clock: MockClock, other: Other) -> None:
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, *LARGE)
        assert provider.outstanding == 3
        await trio.sleep(0.999)
        assert not other.wanted
        await trio.sleep(0.002)
        assert not provider.bulk
        assert other.wanted == LARGE


async def test_a_lane_that_does_not_open_is_closed_ahead_of_what_waited_for_it(autojump_clock: MockClock) -> None:
    other = Other(refuses=True)
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, SMALL, *LARGE)
        await a_moment()
        assert not provider.bulk
        assert other.wanted == [SMALL, *LARGE]
        assert other.wanted_before_closed == 1


@pytest.mark.parametrize("other", [Other(port=0), Other(refuses=True)], ids=["no lane now", "refused"])
async def test_where_no_lane_will_come_they_wait_no_longer(autojump_clock: MockClock, other: Other) -> None:
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, *LARGE)
        await a_moment()
        assert not provider.bulk
        assert other.wanted == LARGE


async def test_a_lane_that_comes_late_is_used_nevertheless(autojump_clock: MockClock) -> None:
    async with open_provider(Other(offer_after_s=0.9, connect_after_s=0.5)) as provider:
        provider.request_lane()
        await trio.sleep(1.5)
        assert provider.bulk


async def test_whoever_is_reached_through_a_relay_has_no_lane(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryChannel, "remote_host", None)
    other = Other()
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, *LARGE)
        await a_moment()
        assert other.wanted == LARGE
        assert other.requests == 0


async def test_what_is_cancelled_while_it_waits_was_never_asked_for(autojump_clock: MockClock) -> None:
    other = Other(connect_after_s=0.5)
    async with open_provider(other) as provider:
        await provider.wait_ready()
        want(provider, SMALL, *LARGE)
        provider.cancel([SMALL, LARGE[1]])
        await trio.sleep(1)
        assert other.wanted == [SMALL, LARGE[0], LARGE[2]]
        assert other.cancelled == [SMALL]
