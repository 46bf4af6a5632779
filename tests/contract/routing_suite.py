"""What every :class:`p2pkv.ports.Routing` keeps, whoever implements it.

A test module provides the fixture ``nodes``: five nodes of one network, each of which was told of one other at most. Records
may take a moment to be seen everywhere, so tests poll a condition with a deadline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from p2pkv.ports import PeerAddress, PeerId, Routing

DEADLINE_S = 20.0
POLL_S = 0.05


@dataclass(frozen=True)
class RoutingNode:
    peer_id: PeerId
    routing: Routing
    leave: Callable[[], Awaitable[None]]


def multihash(text: str) -> bytes:
    return b"\x12\x20" + hashlib.sha256(text.encode()).digest()


async def providers(node: RoutingNode, key: bytes) -> list[PeerAddress]:
    async with node.routing.find_providers(key) as found:
        return [peer async for peer in found]


async def announce(node: RoutingNode, key: bytes) -> None:
    """Announce until somebody took it: the others may be about to join."""
    with trio.fail_after(DEADLINE_S):
        while True:
            if await node.routing.announce(key):
                return
            await trio.sleep(POLL_S)


async def wait_for_providers(node: RoutingNode, key: bytes, expected: Sequence[RoutingNode]) -> list[PeerAddress]:
    wanted = {other.peer_id for other in expected}
    with trio.fail_after(DEADLINE_S):
        while True:
            found = await providers(node, key)
            if {peer.peer_id for peer in found} == wanted:
                return found
            await trio.sleep(POLL_S)


class RoutingSuite:
    async def test_every_node_finds_every_other(self, nodes: list[RoutingNode]) -> None:
        for node in nodes:
            await announce(node, multihash(node.peer_id))
        for provider in nodes:
            for node in nodes:
                if node is not provider:
                    (found,) = await wait_for_providers(node, multihash(provider.peer_id), [provider])
                    assert found.addresses
                    assert not any("/p2p/" in address for address in found.addresses)

    async def test_all_providers_of_a_key_each_once_and_never_oneself(self, nodes: list[RoutingNode]) -> None:
        key = multihash("shared")
        for node in nodes[1:4]:
            await announce(node, key)
        for node in nodes:
            expected = [other for other in nodes[1:4] if other is not node]
            found = await wait_for_providers(node, key, expected)
            assert len(found) == len(expected)

    async def test_new_provider_is_seen_after_an_earlier_look_up(self, nodes: list[RoutingNode]) -> None:
        key = multihash("grows")
        await announce(nodes[0], key)
        await wait_for_providers(nodes[4], key, nodes[:1])
        await announce(nodes[1], key)
        await wait_for_providers(nodes[4], key, nodes[:2])

    async def test_own_announcement_does_not_hide_others(self, nodes: list[RoutingNode]) -> None:
        key = multihash("both")
        await announce(nodes[0], key)
        await announce(nodes[1], key)
        await wait_for_providers(nodes[0], key, nodes[1:2])

    async def test_missing_key_has_no_providers(self, nodes: list[RoutingNode]) -> None:
        with trio.fail_after(DEADLINE_S):
            assert await providers(nodes[2], multihash("nobody has this")) == []

    async def test_look_up_can_be_left_early(self, nodes: list[RoutingNode]) -> None:
        key = multihash("left early")
        for node in nodes[:3]:
            await announce(node, key)
        with trio.fail_after(DEADLINE_S):
            async with nodes[4].routing.find_providers(key) as found:
                async for peer in found:
                    assert peer.peer_id
                    break
            async with nodes[4].routing.find_providers(key):
                pass
        await wait_for_providers(nodes[4], key, nodes[:3])

    async def test_many_look_ups_at_once(self, nodes: list[RoutingNode]) -> None:
        keys = [multihash(f"key {number}") for number in range(6)]
        for key in keys:
            await announce(nodes[1], key)
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(wait_for_providers, nodes[3], key, nodes[1:2])

    async def test_look_ups_go_on_when_a_node_has_left(self, nodes: list[RoutingNode]) -> None:
        key = multihash("survives")
        await announce(nodes[1], key)
        await nodes[2].leave()
        await wait_for_providers(nodes[4], key, nodes[1:2])
