"""Attacks by DHT peers: answers and questions that are none. Whoever hears them goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from libp2p.abc import INetStream

from p2pkv.errors import PeerUnreachableError
from p2pkv.limits import MAX_DHT_MESSAGE_BYTES
from p2pkv_node import kad_client
from p2pkv_node.kad import open_routing
from p2pkv_node.kad_client import KAD_PROTOCOL
from p2pkv_node.network import open_network, parse_peer_id
from tests.contract.routing_suite import multihash
from tests.hostile.attack import Attack, assert_refused, given

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
# What is left of libp2p's messages when they are unfolded: fields 8 and 9 are lists of peers, whose field 2 is of addresses.
FOLDED: dict[str, bytes] = {
    "a peer in two bytes": bytes.fromhex("4200") * (MAX_DHT_MESSAGE_BYTES // 2),
    "closer peers and providers": bytes.fromhex("42004a00") * (MAX_DHT_MESSAGE_BYTES // 4),
    "an address in two bytes": bytes.fromhex("42ffff0f") + bytes.fromhex("1200") * 0x1FFFF,
}
SAID: dict[str, bytes] = {
    "no protobuf": b"\x01\xff",
    "an empty message": b"\0",
    "a message of megabytes": b"\xff\xff\xff\x7f",
    "a length without end": b"\xff" * 20,
    "a peer that is none": bytes.fromhex("08 4209 0a02 ffff 1203 ffffff".replace(" ", "")),
    "HTTP": b"HTTP/1.1 200 OK\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("answer", SAID.values(), ids=SAID)
async def test_an_answer_that_is_none_ends_the_question_alone(answer: bytes) -> None:
    asked = trio.Event()

    async def lie(stream: INetStream) -> None:
        asked.set()
        await stream.read(1024)
        if answer:
            await stream.write(answer)
        await stream.close()

    with trio.fail_after(20):
        async with open_network(bytes([1]) * 32, [LOOPBACK]) as liar:
            handler: Callable[[INetStream], Awaitable[None]] = lie
            liar.host.set_stream_handler(KAD_PROTOCOL, handler)
            async with (
                open_network(bytes([2]) * 32, [LOOPBACK]) as network,
                open_routing(network, list(liar.addresses)) as routing,
            ):
                await asked.wait()
                async with routing.find_providers(multihash("wanted")) as found:
                    assert [peer async for peer in found] == []
                assert not await routing.announce(multihash("offered"))


def unfold(data: bytes) -> None:
    answer = kad_client._answer(kad_client._parse(data))
    raise PeerUnreachableError(f"{len(answer.providers)} providers, {len(answer.closer)} closer peers")


ATTACKS = [
    *(Attack(f"unfolded: {name}", unfold, PeerUnreachableError, given(data)) for name, data in FOLDED.items()),
    *(Attack(f"parsed: {name}", unfold, PeerUnreachableError, given(data[1:])) for name, data in SAID.items()),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_an_answer_stays_within_the_bounds(attack: Attack) -> None:
    assert_refused(attack)


@pytest.mark.parametrize("question", SAID.values(), ids=SAID)
async def test_a_question_that_is_none_costs_the_node_nothing(question: bytes) -> None:
    key = multihash("kept")
    with trio.fail_after(20):
        async with (
            open_network(bytes([1]) * 32, [LOOPBACK]) as victim,
            open_routing(victim, []),
            open_network(bytes([2]) * 32, [LOOPBACK]) as network,
            open_routing(network, list(victim.addresses)) as routing,
        ):
            for _ in range(3):
                stream = await network.open_stream(parse_peer_id(victim.peer_id), KAD_PROTOCOL)
                if question:
                    await stream.write(question)
                await stream.close()
            assert await routing.announce(key)
