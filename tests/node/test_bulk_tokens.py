"""Who may open a bulk lane: tokens, strangers, and a provider that is not who it should be."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from OpenSSL import SSL

from p2pkv.errors import PeerUnreachableError
from p2pkv.limits import MAX_STREAMS_PER_PEER
from p2pkv.ports import BulkOffer
from p2pkv_node.bulk import BulkSettings, TlsBulkLane
from p2pkv_node.bulk_greeting import SIGNATURE_BYTES, TOKEN_BYTES
from p2pkv_node.bulk_tls import TlsConnection, make_identity
from p2pkv_node.bulk_wire import MAGIC
from tests.support.lanes import (
    DEADLINE_S,
    HOST,
    PEER,
    Clock,
    Sink,
    Source,
    another_peer,
    assert_no_answer,
    greeting,
    listening,
    make_lane,
    offered,
    open_descriptors,
    stranger,
    until,
)

# --- tokens ------------------------------------------------------------------------------------------------------------------


async def test_a_wrong_token_is_refused_without_an_answer(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    sink = Sink()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, replace(offer, token=bytes(TOKEN_BYTES)), sink)
    assert lane.statistics().refused_tokens == 1
    await assert_no_answer(lane, greeting(replace(offer, token=bytes(TOKEN_BYTES))))
    assert lane.statistics().refused_tokens == 2
    assert sink.closed == 0
    await lane.connect(HOST, offer, Sink())  # the true one is still good


async def test_another_magic_is_refused(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    await assert_no_answer(lane, b"p2pkvBL2" + greeting(offer)[len(MAGIC) :])
    assert lane.statistics().refused_tokens == 1
    await lane.connect(HOST, offer, Sink())


async def test_the_token_of_another_peer_is_refused_and_stays_good_for_its_owner(lane: TlsBulkLane) -> None:
    """A thief who has all of the offer lacks its owner's key, and cannot burn the token either."""
    source = Source()
    offer = lane.offer(PEER, source, want_sender=lambda sender: None)
    assert offer is not None
    sink = Sink()
    async with make_lane(seed=b"t" * 32).running() as thief:
        for _ in range(3):
            with pytest.raises(PeerUnreachableError):
                await thief.connect(HOST, offer, sink)
    assert lane.statistics().refused_tokens == 3
    assert (lane.statistics().sending_lanes, sink.closed, source.closed) == (0, 0, 0)
    await lane.connect(HOST, offer, Sink())
    assert lane.statistics().sending_lanes == 1


@pytest.mark.parametrize("what", ["another token", "another fingerprint", "another key", "nothing"])
async def test_a_token_is_worth_nothing_without_a_signature_over_this_offer(lane: TlsBulkLane, what: str) -> None:
    offer, others = offered(lane), offered(lane)
    signatures = {
        "another token": greeting(others)[-SIGNATURE_BYTES:],
        "another fingerprint": greeting(replace(offer, fingerprint=bytes(32)))[-SIGNATURE_BYTES:],
        "another key": greeting(offer, b"t" * 32)[-SIGNATURE_BYTES:],
        "nothing": bytes(SIGNATURE_BYTES),
    }
    await assert_no_answer(lane, MAGIC + offer.token + signatures[what])
    assert lane.statistics().refused_tokens == 1
    await lane.connect(HOST, offer, Sink())
    await lane.connect(HOST, others, Sink())


async def test_a_greeting_is_good_once(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    await lane.connect(HOST, offer, Sink())
    await assert_no_answer(lane, greeting(offer))
    assert lane.statistics().refused_tokens == 1


async def test_a_greeting_without_a_signature_gets_no_answer() -> None:
    async with make_lane(BulkSettings(host=HOST, handshake_timeout_s=0.5)).running() as lane:
        await assert_no_answer(lane, MAGIC + offered(lane).token)
        assert lane.statistics().dropped_strangers == 1
        assert lane.statistics().sending_lanes == 0


async def test_who_cannot_be_told_from_others_gets_no_offer(lane: TlsBulkLane) -> None:
    by_hash = ID(bytes.fromhex("1220") + bytes(32)).to_base58()  # a peer id of a long key, such as one of RSA
    assert lane.offer(by_hash, Source(), want_sender=lambda sender: None) is None


async def test_a_token_opens_one_lane_only(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    await lane.connect(HOST, offer, Sink())
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, offer, Sink())
    assert lane.statistics().refused_tokens == 1


async def test_an_expired_token_is_refused() -> None:
    clock = Clock()
    async with make_lane(BulkSettings(host=HOST, token_seconds=10), clock=clock).running() as lane:
        late, in_time = offered(lane), offered(lane)
        clock.now += 9.9
        await lane.connect(HOST, in_time, Sink())
        clock.now += 0.1
        with pytest.raises(PeerUnreachableError):
            await lane.connect(HOST, late, Sink())
        assert lane.statistics().refused_tokens == 1


async def test_tokens_come_from_the_injected_source() -> None:
    tokens = iter([b"a" * TOKEN_BYTES])
    async with make_lane(BulkSettings(host=HOST), token_source=lambda: next(tokens)).running() as lane:
        assert offered(lane).token == b"a" * TOKEN_BYTES


async def test_one_peer_cannot_hoard_offers() -> None:
    clock = Clock()
    async with make_lane(BulkSettings(host=HOST), clock=clock).running() as lane:
        await lane.connect(HOST, offered(lane), Sink())  # an open lane counts as well
        for _ in range(MAX_STREAMS_PER_PEER - 1):
            offered(lane)
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None
        offered(lane, another_peer(1))
        clock.now += 60
        offered(lane)  # what nobody took has expired


async def test_all_offers_together_are_bounded(monkeypatch: pytest.MonkeyPatch, lane: TlsBulkLane) -> None:
    monkeypatch.setattr("p2pkv_node.bulk.MAX_BULK_OFFERS", 3)
    for number in range(3):
        offered(lane, another_peer(number))
    assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None


async def test_lanes_are_bounded_at_both_ends() -> None:
    async with make_lane(BulkSettings(host=HOST, max_connections=1)).running() as lane:
        first, second = offered(lane), offered(lane)
        receiver = await lane.connect(HOST, first, Sink())
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None
        with pytest.raises(PeerUnreachableError, match="no bulk lane can be opened"):
            await lane.connect(HOST, second, Sink())
        async with make_lane().running() as other:
            with pytest.raises(PeerUnreachableError):
                await other.connect(HOST, second, Sink())
            assert lane.statistics().refused_tokens == 0
            receiver.close()
            await until(lambda: lane.statistics().sending_lanes == 0)
            await other.connect(HOST, second, Sink())  # a lane that there was no room for spent nothing


# --- strangers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_handshake", [False, True])
async def test_a_silent_stranger_is_cut_off(with_handshake: bool) -> None:
    async with make_lane(BulkSettings(host=HOST, handshake_timeout_s=0.2)).running() as lane:
        connection = await stranger(lane)
        try:
            if with_handshake:
                await connection.handshake()
                await connection.send(MAGIC)
            with trio.fail_after(DEADLINE_S):
                await connection.wait_readable()
        finally:
            connection.close()
        await until(lambda: lane.statistics().dropped_strangers == 1)


async def test_silent_strangers_do_not_shut_out_honest_peers() -> None:
    async with make_lane(BulkSettings(host=HOST, max_strangers=2, handshake_timeout_s=60)).running() as lane:
        silent = [await stranger(lane) for _ in range(5)]
        try:
            await lane.connect(HOST, offered(lane), Sink())
            # Two stayed until the consumer came and displaced one more.
            await until(lambda: lane.statistics().dropped_strangers == 4)
        finally:
            for connection in silent:
                connection.close()


async def test_a_stranger_that_leaves_at_once_costs_nothing(lane: TlsBulkLane) -> None:
    assert lane.port is not None
    before = open_descriptors()
    with socket.create_connection((HOST, lane.port)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets the connection
    await until(lambda: lane.statistics().dropped_strangers == 1)
    assert open_descriptors() == before


async def test_a_process_out_of_descriptors_accepts_again_later(lane: TlsBulkLane, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def failing_accept(listener: socket.socket) -> object:
        if failures:
            raise OSError(failures.pop(0), "made up")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing_accept)
    await lane.connect(HOST, offered(lane), Sink())
    assert failures == []


async def test_tls_1_2_is_refused_by_the_provider(lane: TlsBulkLane) -> None:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    connection = await stranger(lane, context)
    try:
        with pytest.raises(PeerUnreachableError):
            await connection.handshake()
    finally:
        connection.close()
    await until(lambda: lane.statistics().dropped_strangers == 1)


# --- the provider is not who it should be ----------------------------------------------------------------------------------


@asynccontextmanager
async def impostor(context: SSL.Context) -> AsyncIterator[tuple[int, bytearray]]:
    """A TLS server that takes whatever one client sends; yields its port and the bytes it heard."""
    heard = bytearray()

    async def serve(listener: socket.socket) -> None:
        await trio.lowlevel.wait_readable(listener.fileno())
        raw, _ = listener.accept()
        connection = TlsConnection(raw, context, server_side=True)
        try:
            await connection.handshake()
            while True:
                heard.extend(await connection.receive(1))
        except PeerUnreachableError:
            pass
        finally:
            connection.close()
            ended.set()

    ended = trio.Event()
    with listening() as (listener, port):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener)
            yield port, heard
            with trio.fail_after(DEADLINE_S):
                await ended.wait()


async def test_a_man_in_the_middle_never_sees_the_token(lane: TlsBulkLane) -> None:
    async with impostor(make_identity().context) as (port, heard):
        sink = Sink()
        with pytest.raises(PeerUnreachableError, match="certificate"):
            await lane.connect(HOST, replace(offered(lane), port=port), sink)
    assert heard == b""
    assert lane.statistics().refused_certificates == 1
    assert sink.closed == 0


async def test_tls_1_2_is_refused_by_the_consumer(lane: TlsBulkLane) -> None:
    identity = make_identity()
    identity.context.set_min_proto_version(SSL.TLS1_2_VERSION)
    identity.context.set_max_proto_version(SSL.TLS1_2_VERSION)
    async with impostor(identity.context) as (port, heard):
        with pytest.raises(PeerUnreachableError):
            await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), identity.fingerprint), Sink())
    assert heard == b""


async def test_a_port_that_says_nothing_is_given_up() -> None:
    async with make_lane(BulkSettings(handshake_timeout_s=0.2)).running() as lane:
        with listening() as (_, port), pytest.raises(PeerUnreachableError, match="in time"):
            await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), bytes(32)), Sink())


@pytest.mark.parametrize(("host", "port"), [(HOST, 1), (HOST, 70_000), ("localhost", 1), ("::1", 1)])
async def test_what_cannot_be_dialled_is_unreachable(lane: TlsBulkLane, host: str, port: int) -> None:
    lane.prepare()
    before = open_descriptors()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(host, BulkOffer(port, bytes(TOKEN_BYTES), bytes(32)), Sink())
    assert open_descriptors() == before
