"""What every :class:`p2pkv.ports.Network` and :class:`p2pkv.ports.Channel` keeps, whoever implements them.

A test module provides the fixture ``pair`` (:class:`Pair`) and subclasses :class:`ChannelSuite`. Every wait has a deadline.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from p2pkv.errors import PeerUnreachableError, ProtocolError
from p2pkv.ports import Channel, Network, PeerAddress
from p2pkv.units import MIB

DEADLINE_S = 10.0


@dataclass(frozen=True)
class Pair:
    """Two nodes that can reach each other, and how to kill the second at once."""

    client: Network
    server: Network
    server_address: PeerAddress
    kill_server: Callable[[], Awaitable[None]]


@asynccontextmanager
async def connected(pair: Pair) -> AsyncIterator[tuple[Channel, Channel]]:
    """Yield the two ends of one channel; the server's handler stays until the block ends."""
    send, accepted = trio.open_memory_channel[Channel](1)
    leave = trio.Event()

    async def handler(channel: Channel) -> None:
        await send.send(channel)
        await leave.wait()

    pair.server.set_channel_handler(handler)
    with trio.fail_after(DEADLINE_S):
        client = await pair.client.open_channel(pair.server_address)
        # libp2p tells the other side of a stream with its first bytes at the latest.
        await client.send(b"!")
        server = await accepted.receive()
        assert await read_exactly(server, 1) == b"!"
        try:
            yield client, server
        finally:
            leave.set()
            await client.aclose()
            await server.aclose()


async def read_exactly(channel: Channel, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await channel.receive()
        assert piece, f"the channel ended after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


async def read_to_end(channel: Channel) -> bytes:
    data = bytearray()
    while piece := await channel.receive():
        data += piece
    return bytes(data)


class ChannelSuite:
    async def test_both_ends_know_the_other(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            assert client.peer_id == pair.server.peer_id
            assert server.peer_id == pair.client.peer_id
            assert client.remote_host == server.remote_host == "127.0.0.1"

    async def test_whoever_has_a_channel_is_connected(self, pair: Pair) -> None:
        """On either side, once however many channels there are."""
        assert not pair.client.connected_peers
        assert not pair.server.connected_peers
        async with connected(pair), connected(pair):
            assert list(pair.client.connected_peers) == [pair.server.peer_id]
            assert list(pair.server.connected_peers) == [pair.client.peer_id]

    async def test_bytes_arrive_in_order_both_ways(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            await client.send(b"one")
            await client.send(bytearray(b"two"))
            await client.send(memoryview(b"three"))
            assert await read_exactly(server, 11) == b"onetwothree"
            await server.send(b"four")
            assert await read_exactly(client, 4) == b"four"

    async def test_empty_send_is_nothing(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            await client.send(b"")
            await client.send(b"x")
            assert await server.receive() == b"x"

    async def test_large_data_both_ways_at_once(self, pair: Pair) -> None:
        data = hashlib.shake_128(b"data").digest(3 * MIB + 17)
        async with connected(pair) as (client, server):
            got: list[bytes] = []

            async def read(channel: Channel) -> None:
                got.append(await read_exactly(channel, len(data)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, data)
                nursery.start_soon(server.send, data)
                nursery.start_soon(read, client)
                nursery.start_soon(read, server)
            assert got == [data, data]

    async def test_sends_of_two_tasks_do_not_lose_bytes(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            async with trio.open_nursery() as nursery:
                for letter in (b"a", b"b"):
                    nursery.start_soon(client.send, letter * 1000)
            data = await read_exactly(server, 2000)
            assert sorted(data) == sorted(b"a" * 1000 + b"b" * 1000)

    async def test_what_was_sent_before_closing_arrives(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            await client.send(b"last words" * 5000)
            await client.aclose()
            assert await read_to_end(server) == b"last words" * 5000
            assert await server.receive() == b""

    async def test_closing_twice_is_quiet(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            await client.aclose()
            await client.aclose()
            assert await server.receive() == b""
            await server.aclose()

    async def test_closed_channel_neither_sends_nor_receives(self, pair: Pair) -> None:
        async with connected(pair) as (client, _):
            await client.aclose()
            assert await client.receive() == b""
            with pytest.raises(PeerUnreachableError):
                await client.send(b"x")

    async def test_closing_wakes_the_reader_of_the_same_channel(self, pair: Pair) -> None:
        async with connected(pair) as (client, _):
            got: list[bytes] = []

            async def read() -> None:
                got.append(await client.receive())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                await client.aclose()
            assert got == [b""]

    async def test_sender_waits_for_a_reader_that_pauses(self, pair: Pair) -> None:
        data = b"\x07" * (40 * MIB)  # more than any window
        async with connected(pair) as (client, server):
            sent = trio.Event()

            async def send() -> None:
                await client.send(data)
                sent.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                got = len(await read_exactly(server, 1))
                with trio.move_on_after(0.2):
                    await sent.wait()
                assert not sent.is_set()
                while got < len(data):
                    got += len(await server.receive())
            assert sent.is_set()

    async def test_cancelled_receive_loses_nothing(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            for number in range(20):
                with trio.move_on_after(0):
                    await server.receive()
                await client.send(bytes([number]))
                assert await read_exactly(server, 1) == bytes([number])

    async def test_cancelled_send_harms_no_other_channel(self, pair: Pair) -> None:
        async with connected(pair) as (client, server):
            other_send, accepted = trio.open_memory_channel[Channel](1)
            done = trio.Event()

            async def handler(channel: Channel) -> None:
                await other_send.send(channel)
                await done.wait()

            pair.server.set_channel_handler(handler)
            other = await pair.client.open_channel(pair.server_address)
            await other.send(b"a")
            other_server = await accepted.receive()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, b"x" * (60 * MIB))
                await read_exactly(server, MIB)
                nursery.cancel_scope.cancel()
            await client.aclose()
            await other.send(b"b")
            assert await read_exactly(other_server, 2) == b"ab"
            done.set()
            await other.aclose()

    async def test_channel_ends_when_the_handler_returns(self, pair: Pair) -> None:
        async def handler(channel: Channel) -> None:
            await channel.send(await channel.receive())

        pair.server.set_channel_handler(handler)
        with trio.fail_after(DEADLINE_S):
            channel = await pair.client.open_channel(pair.server_address)
            await channel.send(b"x")
            assert await read_to_end(channel) == b"x"
            await channel.aclose()

    @pytest.mark.parametrize("error", [ProtocolError("nonsense"), RuntimeError("a fault of ours")])
    async def test_error_of_a_handler_ends_its_channel_alone(
        self, pair: Pair, error: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def handler(channel: Channel) -> None:
            if await channel.receive() == b"fail":
                raise error
            await channel.send(b"fine")

        pair.server.set_channel_handler(handler)
        with trio.fail_after(DEADLINE_S), caplog.at_level("INFO"):
            for word, answer in ((b"fail", b""), (b"work", b"fine")):
                channel = await pair.client.open_channel(pair.server_address)
                await channel.send(word)
                assert await read_to_end(channel) == answer
                await channel.aclose()
        assert str(error) in caplog.text
        assert ("Traceback" in caplog.text) == isinstance(error, RuntimeError)

    async def test_unknown_peer_cannot_be_dialled(self, pair: Pair) -> None:
        stranger = PeerAddress("12D3KooWNoSuchPeerxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", pair.server_address.addresses)
        with trio.fail_after(DEADLINE_S), pytest.raises(PeerUnreachableError):
            await pair.client.open_channel(stranger)

    async def test_death_breaks_channels_and_dials(self, pair: Pair) -> None:
        async with connected(pair) as (client, _):
            await pair.kill_server()
            # What had arrived before may still be read; then the loss shows, and not as an end.
            with pytest.raises(PeerUnreachableError):
                await read_to_end(client)
            with pytest.raises(PeerUnreachableError):
                await pair.client.open_channel(pair.server_address)
            with pytest.raises(PeerUnreachableError):
                await client.send(b"x" * (40 * MIB))
            with trio.fail_after(DEADLINE_S):
                while pair.client.connected_peers:  # noqa: ASYNC110 - the port has no event for it
                    await trio.sleep(0.01)
