"""Streams that have ended leave nothing behind in a connection that goes on."""

from __future__ import annotations

import trio
import trio.testing
from libp2p.stream_muxer.yamux.yamux import Yamux

from p2pkv.ports import Channel
from p2pkv_node.libp2p_host import swarm_of
from p2pkv_node.network import Libp2pNetwork, open_network
from tests.support.town import LOOPBACK, until


def left(network: Libp2pNetwork) -> int:
    """Return how many entries the connections of a node have for streams that are there, or were."""
    connections = [connection.muxed_conn for connection in swarm_of(network.host).get_connections()]
    assert connections
    assert all(isinstance(connection, Yamux) for connection in connections)
    found = [connection for connection in connections if isinstance(connection, Yamux)]
    return sum(len(kept) for muxer in found for kept in (muxer.streams, muxer.stream_buffers, muxer.stream_events))


async def test_streams_that_ended_leave_nothing() -> None:
    """Also where somebody waits for data when the stream ends."""

    async def answer(channel: Channel) -> None:
        await channel.receive()

    async with open_network(bytes(32), LOOPBACK) as provider, open_network(bytes([1]) * 32, LOOPBACK) as consumer:
        provider.set_channel_handler(answer)
        peer = await consumer.connect(provider.addresses[0])
        for number in range(12):
            channel = await consumer.open_channel(peer)
            if number % 2:
                await channel.send(b"question")
                assert await channel.receive() == b""
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(channel.receive)
                    await trio.testing.wait_all_tasks_blocked(0.001)
                    await channel.aclose()
            await channel.aclose()
        await until(lambda: left(provider) == left(consumer) == 0)
