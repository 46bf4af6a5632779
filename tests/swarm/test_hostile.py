"""Hostile peers on the stream, at either end: refused with a code, bounded in what they cost, and nobody else notices."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pkv.errors import PeerUnreachableError
from p2pkv.exchange.messages import Block, ErrorMessage, Have, Hello, MessageType, encode
from p2pkv.formats.cid import Cid
from p2pkv.limits import HELLO_TIMEOUT_S, MAX_CONTROL_BYTES, MAX_FRAME_BYTES, MAX_WANTS_PER_MESSAGE
from p2pkv.ports import Channel
from p2pkv.units import KIB, MIB
from sims.network import open_world
from tests.support.artifacts import PUBLISHER, make_sample
from tests.support.memory import bounded_memory
from tests.support.serving import CIDS, Client, EndlessStore, Place, open_place, serves_on
from tests.support.sim_town import TOKENS, Town, prompt

# A window of the transport at each end, one frame, and room for what the tests keep themselves.
MEMORY = 6 * MIB
HELLO = encode(Hello("hostile", frozenset()))


def header(kind: int, length: int) -> bytes:
    return length.to_bytes(4, "big") + bytes((kind,))


OVERSIZED = {
    "a control message": header(MessageType.QUERY, MAX_CONTROL_BYTES + 1),
    "a list": header(MessageType.WANT, 36 * MAX_WANTS_PER_MESSAGE + 36),
    "a block": header(MessageType.BLOCK, MAX_FRAME_BYTES + 1),
    "an unknown type": header(0x70, MAX_FRAME_BYTES + 1),
    "4 GiB": header(MessageType.HAVE, 2**32 - 1),
}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with open_place(EndlessStore(KIB)) as found:
        yield found


async def pour(channel: Channel, data: bytes) -> None:
    """Send ``data`` again and again until the other side has enough."""
    with suppress(PeerUnreachableError):
        while True:
            await channel.send(data)


# --- at a provider -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", OVERSIZED.values(), ids=OVERSIZED)
async def test_an_oversized_frame_is_refused_by_its_header_while_others_are_served(place: Place, head: bytes) -> None:
    honest, hostile = await place.join("honest"), await place.join("hostile")
    with bounded_memory(MEMORY):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(honest.fetch, CIDS[:50])
            await hostile.channel.send(head)
            nursery.start_soon(pour, hostile.channel, bytes(64 * KIB))
            messages = await hostile.read_to_the_end()
    assert isinstance(messages[-1], ErrorMessage)
    assert messages[-1].code == "wire.protocol"
    assert place.server.refused == 1
    assert len(honest.blocks) == 50
    await wait_all_tasks_blocked()
    assert place.server.statistics().channels == 1
    await serves_on(place, "another")


@pytest.mark.parametrize("drip", [b"", HELLO], ids=["silent", "a hello in drops"])
async def test_who_says_no_hello_in_time_is_refused_with_a_code(autojump_clock: MockClock, place: Place, drip: bytes) -> None:
    hostile = Client(await place.channel("hostile"))
    ended: list[float] = []

    async def read() -> None:
        messages = await hostile.read_to_the_end()
        assert isinstance(messages[-1], ErrorMessage)
        assert messages[-1].code == "wire.protocol"
        ended.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for number in range(len(drip)):
            if ended:
                break
            await hostile.channel.send(drip[number : number + 1])
            await trio.sleep(1.0)
        await serves_on(place)
    assert HELLO_TIMEOUT_S <= ended[0] - began < HELLO_TIMEOUT_S + 2.0
    assert place.server.refused == 1


async def test_many_that_never_end_a_frame_hold_no_more_than_they_sent(autojump_clock: MockClock, place: Place) -> None:
    """A want of the largest size is announced by each of fifty peers, and comes byte by byte."""
    hostile = [await place.join(f"hostile {number}") for number in range(50)]
    with bounded_memory(MEMORY):
        for client in hostile:
            await client.channel.send(header(MessageType.WANT, 36 * MAX_WANTS_PER_MESSAGE))
        for _ in range(100):
            for client in hostile:
                await client.channel.send(b"\x01")
            await trio.sleep(1.0)
        await serves_on(place)
    await wait_all_tasks_blocked()
    assert place.server.statistics().channels == 50
    for client in hostile:
        await client.channel.aclose()
    await wait_all_tasks_blocked()
    assert place.server.statistics().channels == 0


# --- at a consumer -------------------------------------------------------------------------------------------------------

Evil = Callable[[Channel], Awaitable[None]]


def says(head: bytes, poured: bytes) -> Evil:
    async def evil(channel: Channel) -> None:
        await channel.send(HELLO + head)
        await pour(channel, poured)

    return evil


def drips(data: bytes) -> Evil:
    async def evil(channel: Channel) -> None:
        for number in range(len(data)):
            await channel.send(data[number : number + 1])
            await trio.sleep(0.5)

    return evil


UNASKED = Cid.of_block(b"unasked")


@pytest.mark.parametrize(
    ("evil", "dropped"),
    [
        *(pytest.param(says(head, bytes(64 * KIB)), True, id=f"oversized: {name}") for name, head in OVERSIZED.items()),
        pytest.param(says(b"", encode(Block(UNASKED, b"unasked"))), True, id="blocks that nobody asked for"),
        pytest.param(drips(HELLO), False, id="a hello in drops"),
        pytest.param(drips(HELLO + encode(Block(UNASKED, bytes(KIB)))), False, id="all in drops"),
    ],
)
async def test_a_hostile_provider_ends_alone(autojump_clock: MockClock, evil: Evil, dropped: bool) -> None:
    sample = make_sample(TOKENS)
    async with open_world() as world:
        town = Town(world)
        hostile = await town.provider("hostile", sample)
        hostile.network.set_channel_handler(evil)
        await town.provider("honest", sample)
        with bounded_memory(MEMORY):
            report = await town.node("consumer", trusted=[PUBLISHER]).fetch(prompt())
        assert report.hit_tokens == 600
        assert ("hostile" in report.peers_dropped) is dropped
        assert set(report.bytes_by_peer) == {"honest"}


async def test_haves_for_ever_cost_no_memory(autojump_clock: MockClock) -> None:
    """They are legal; those that nobody waits for are forgotten."""
    sample = make_sample(TOKENS)
    numbers = itertools.count()

    async def evil(channel: Channel) -> None:
        await channel.send(HELLO)
        while True:
            news = itertools.islice(numbers, MAX_WANTS_PER_MESSAGE)
            await channel.send(encode(Have(tuple(Cid.of_block(number.to_bytes(4, "big")) for number in news))))
            await trio.sleep(0.05)

    async with open_world() as world:
        town = Town(world)
        hostile = await town.provider("hostile", sample)
        hostile.network.set_channel_handler(evil)
        await town.provider("honest", sample)
        with bounded_memory(MEMORY):
            report = await town.node("consumer", trusted=[PUBLISHER]).fetch(prompt())
        assert report.hit_tokens == 600
        assert next(numbers) > 30 * MAX_WANTS_PER_MESSAGE
