"""The contract of routing, on the Kademlia DHT over loopback and on the memory twin."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr
from trio_typing import TaskStatus

from p2pkv.errors import UsageError
from p2pkv.ports import PeerAddress
from p2pkv_node.kad import KadRouting, open_routing
from p2pkv_node.network import Libp2pNetwork, open_network
from sims.routing import MemoryRouting, ProviderRecords
from tests.contract.routing_suite import RoutingNode, RoutingSuite, multihash, providers

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def kad_node(number: int, bootstrap: list[str]) -> AsyncIterator[tuple[Libp2pNetwork, KadRouting]]:
    async with open_network(bytes([number + 1]) * 32, [LOOPBACK]) as network, open_routing(network, bootstrap) as routing:
        yield network, routing


class TestKadRouting(RoutingSuite):
    @pytest.fixture
    async def nodes(self) -> AsyncIterator[list[RoutingNode]]:
        """A chain: each node was told of the one before it alone."""
        stop = [trio.Event() for _ in range(5)]
        stopped = [trio.Event() for _ in range(5)]
        address: list[str] = []

        async def live(number: int, task_status: TaskStatus[RoutingNode]) -> None:
            async def leave() -> None:
                stop[number].set()
                await stopped[number].wait()

            async with kad_node(number, address) as (network, routing):
                address[:] = network.addresses
                task_status.started(RoutingNode(network.peer_id, routing, leave))
                await stop[number].wait()
            stopped[number].set()

        async with trio.open_nursery() as nursery:
            yield [await nursery.start(live, number) for number in range(5)]
            for event in stop:
                event.set()


class TestMemoryRouting(RoutingSuite):
    @pytest.fixture
    async def nodes(self) -> list[RoutingNode]:
        records = ProviderRecords()

        def node(name: str) -> RoutingNode:
            async def leave() -> None:
                await trio.lowlevel.checkpoint()

            return RoutingNode(name, MemoryRouting(records, PeerAddress(name, (f"/memory/{name}",))), leave)

        return [node(f"node{number}") for number in range(5)]


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[KadRouting, KadRouting]]:
    async with kad_node(0, []) as (network, one), kad_node(1, list(network.addresses)) as (_, other):
        yield one, other


async def test_record_is_stored_under_exactly_the_multihash() -> None:
    """py-libp2p maps textual keys to record keys in a way that changed between releases; ours must pass as they are."""
    key = multihash("pinned")
    async with two_nodes() as (keeper, provider):
        assert await provider.announce(key)
        (record,) = keeper._dht.provider_store.get_providers(key)
        assert record.peer_id == provider._dht.local_peer_id
        assert len(keeper._records) == 1


async def test_distance_is_that_of_the_library() -> None:
    """A key's place among the peers is the same for our look-ups and for the library's answers."""
    key = multihash("near")
    async with two_nodes() as (one, _), kad_node(2, list(one._network.addresses)) as (_, last):
        ours = await last._closest(key)
        assert len(ours) == 2
        assert ours == last._dht.routing_table.find_local_closest_peers(key)
        target = int.from_bytes(hashlib.sha256(key).digest())
        assert ours == sorted(ours, key=lambda peer: target ^ int.from_bytes(hashlib.sha256(peer.to_bytes()).digest()))


async def test_speaks_its_own_protocol_alone() -> None:
    async with kad_node(0, []) as (network, _):
        protocols = {str(protocol) for protocol in network.host.get_mux().get_protocols()}
    assert "/p2pkv/kad/1.0.0" in protocols
    assert not any("ipfs/kad" in protocol for protocol in protocols)


async def test_lonely_node_announces_to_nobody_and_finds_nothing() -> None:
    async with kad_node(0, []) as (network, routing):
        node = RoutingNode(network.peer_id, routing, trio.lowlevel.checkpoint)
        assert not await routing.announce(multihash("alone"))
        assert await providers(node, multihash("alone")) == []


async def test_dead_bootstrap_peer_does_not_stop_a_node() -> None:
    async with open_network(bytes([9]) * 32, [LOOPBACK]) as gone:
        address = gone.addresses[0]
    with trio.fail_after(10):
        async with kad_node(0, [address]) as (_, routing):
            assert routing.peers == ()


async def test_bootstrap_address_without_a_peer_id_is_refused() -> None:
    async with open_network(bytes([1]) * 32, [LOOPBACK]) as network:
        with pytest.raises(UsageError):
            async with open_routing(network, ["/ip4/127.0.0.1/tcp/4001"]):
                pass


async def test_record_in_the_own_store_is_offered() -> None:
    key = multihash("at hand")
    async with two_nodes() as (keeper, provider):
        own_id = provider._dht.local_peer_id
        assert await provider.announce(key)
        async with keeper.find_providers(key) as found:
            assert [peer.peer_id async for peer in found] == [own_id.to_base58()]
        # A record without an address waits for one that has it.
        keeper._dht.provider_store.add_provider(key, PeerInfo(own_id, []))
        async with keeper.find_providers(key) as found:
            (peer,) = [peer async for peer in found]
        assert peer.addresses


async def test_what_is_withdrawn_is_offered_to_nobody_who_asks_this_node() -> None:
    key = multihash("withdrawn")
    async with two_nodes() as (keeper, provider):
        await keeper.announce(key)
        provider._records.discard(key, keeper._network.peer_id)  # as if it had not been told
        node = RoutingNode(provider._network.peer_id, provider, trio.lowlevel.checkpoint)
        assert [peer.peer_id for peer in await providers(node, key)] == [keeper._network.peer_id]
        keeper.withdraw(key)
        assert await providers(node, key) == []


async def test_an_address_that_cannot_be_read_again_does_not_spoil_a_key() -> None:
    key = multihash("garbage")
    async with two_nodes() as (keeper, provider):
        store = keeper._dht.provider_store
        store.add_provider(key, PeerInfo(ID(b"\x12\x20" + bytes(32)), [Multiaddr(b"\xff\xff\xff")]))
        assert await provider.announce(key)
        assert [info.peer_id for info in store.get_providers(key)][-1] == provider._dht.local_peer_id


async def test_refused_announcement_is_reported() -> None:
    """py-libp2p takes ten records in ten seconds from one peer and drops the next ones; whoever announces has to know."""
    async with two_nodes() as (_, provider):
        told = [await provider.announce(multihash(f"burst {number}")) for number in range(12)]
    assert told == [True] * 10 + [False] * 2
