"""The contract of channels, on libp2p over loopback and on the memory twin."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
from trio_typing import TaskStatus

from p2pkv.errors import ListenError, PeerUnreachableError, UsageError
from p2pkv.limits import MAX_STREAMS_PER_PEER, SHUTDOWN_GRACE_S
from p2pkv.ports import Channel, PeerAddress
from p2pkv.units import MIB
from p2pkv_node.identity import peer_id_from_seed
from p2pkv_node.network import open_network, parse_peer_address
from sims.network import Link, open_world
from tests.contract.channel_suite import DEADLINE_S, ChannelSuite, Pair, read_exactly

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SEEDS = [bytes([number]) * 32 for number in range(1, 4)]


class TestLibp2pChannels(ChannelSuite):
    @pytest.fixture
    async def pair(self) -> AsyncIterator[Pair]:
        async with open_network(SEEDS[0], [LOOPBACK]) as client, trio.open_nursery() as nursery:
            stop, stopped = trio.Event(), trio.Event()

            async def run_server(task_status: TaskStatus[Pair]) -> None:
                async with open_network(SEEDS[1], [LOOPBACK]) as server:

                    async def kill() -> None:
                        stop.set()
                        await stopped.wait()

                    task_status.started(Pair(client, server, parse_peer_address(server.addresses[0]), kill))
                    await stop.wait()
                stopped.set()

            yield await nursery.start(run_server)
            stop.set()


class TestMemoryChannels(ChannelSuite):
    @pytest.fixture
    async def pair(self) -> AsyncIterator[Pair]:
        async with open_world() as world:
            client, server = world.add_node("client"), world.add_node("server")

            async def kill() -> None:
                world.kill("server")

            yield Pair(client, server, PeerAddress("server", server.addresses), kill)


async def test_addresses_are_whole_and_can_be_dialled() -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one, open_network(SEEDS[1], [LOOPBACK]) as other:
        (address,) = other.addresses
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert address.endswith(f"/p2p/{other.peer_id}")
        assert other.peer_id == peer_id_from_seed(SEEDS[1])
        with trio.fail_after(DEADLINE_S):
            assert await one.connect(address) == parse_peer_address(address)
        assert one.connected_peers == (other.peer_id,)


async def test_taken_port_is_reported() -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one:
        taken = one.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ListenError, match="taken"):
            async with open_network(SEEDS[1], [taken]):
                pass


@pytest.mark.parametrize("listen", ["/ip4/127.0.0.1/udp/0", "/ip4/203.0.113.9/tcp/0"])
async def test_address_that_cannot_be_listened_on_is_reported(listen: str) -> None:
    with pytest.raises(ListenError):
        async with open_network(SEEDS[0], [listen]):
            pass


@pytest.mark.parametrize("address", ["nonsense", "/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001/p2p/0", "/ip9/1/p2p/1"])
async def test_malformed_peer_address_is_the_callers_doing(address: str) -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one:
        with pytest.raises(UsageError):
            await one.connect(address)


async def test_dead_peer_is_unreachable_and_may_come_back() -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one:
        async with open_network(SEEDS[1], [LOOPBACK]) as other:
            address = other.addresses[0]
        with trio.fail_after(DEADLINE_S), pytest.raises(PeerUnreachableError):
            await one.connect(address)
        async with open_network(SEEDS[1], [address.partition("/p2p/")[0]]):
            with trio.fail_after(DEADLINE_S):
                await one.connect(address)


async def test_wrong_peer_at_an_address_is_refused() -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one, open_network(SEEDS[1], [LOOPBACK]) as other:
        impostor = f"{other.addresses[0].partition('/p2p/')[0]}/p2p/{peer_id_from_seed(SEEDS[2])}"
        with trio.fail_after(DEADLINE_S), pytest.raises(PeerUnreachableError):
            await one.connect(impostor)


async def test_streams_of_one_peer_are_bounded() -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one, open_network(SEEDS[1], [LOOPBACK]) as other:

        async def echo(channel: Channel) -> None:
            while data := await channel.receive():
                await channel.send(data)

        other.set_channel_handler(echo)
        peer = parse_peer_address(other.addresses[0])
        with trio.fail_after(DEADLINE_S):
            channels = [await one.open_channel(peer) for _ in range(MAX_STREAMS_PER_PEER)]
            for channel in channels:
                await channel.send(b"x")
                assert await channel.receive() == b"x"

            async def use_one_more() -> None:
                surplus = await one.open_channel(peer)
                try:
                    await surplus.receive()
                finally:
                    await surplus.aclose()

            with pytest.raises(PeerUnreachableError):
                await use_one_more()
            for channel in channels:
                await channel.aclose()


async def test_network_closes_in_time_around_a_blocked_sender() -> None:
    async with open_network(SEEDS[0], [LOOPBACK]) as one:
        errors: list[PeerUnreachableError] = []
        stopped_reading, asleep = trio.Event(), trio.Event()

        async def stops_reading(channel: Channel) -> None:
            await channel.receive()
            stopped_reading.set()
            await asleep.wait()

        one.set_channel_handler(stops_reading)
        async with trio.open_nursery() as nursery:
            async with open_network(SEEDS[1], [LOOPBACK]) as other:
                channel = await other.open_channel(parse_peer_address(one.addresses[0]))

                async def send() -> None:
                    try:
                        await channel.send(b"x" * (60 * MIB))
                    except PeerUnreachableError as error:
                        errors.append(error)

                nursery.start_soon(send)
                with trio.fail_after(DEADLINE_S):
                    await stopped_reading.wait()
                started = trio.current_time()
            assert trio.current_time() - started < SHUTDOWN_GRACE_S
        assert len(errors) == 1
        asleep.set()


async def test_error_of_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_network(SEEDS[0], [LOOPBACK]):
            _ = 1 // 0


async def test_library_is_quiet(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Its warnings are debug records of ours, and it leaves the logging of the process alone."""
    before = list(logging.getLogger().handlers)
    async with open_network(SEEDS[0], [LOOPBACK]) as one, open_network(SEEDS[1], [LOOPBACK]) as other:
        with caplog.at_level("DEBUG", logger="p2pkv_node.libp2p_host"):
            logging.getLogger("libp2p.host").warning("a peer came and went")
        await one.connect(other.addresses[0])
    assert ("p2pkv_node.libp2p_host", logging.DEBUG, "libp2p.host: a peer came and went") in caplog.record_tuples
    assert not logging.getLogger("libp2p").propagate
    assert logging.getLogger().handlers == before
    assert capfd.readouterr().err == ""


async def test_slow_uplink_of_the_twin_takes_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world() as world:
        client = world.add_node("client", Link(up=MIB, latency_s=0.5))
        server = world.add_node("server")
        received = trio.Event()

        async def read(channel: Channel) -> None:
            await read_exactly(channel, 10 * MIB)
            received.set()

        server.set_channel_handler(read)
        channel = await client.open_channel(PeerAddress("server"))
        await channel.send(bytes(10 * MIB))
        await received.wait()
        assert trio.current_time() == pytest.approx(11.5)  # a dial is a round trip
