"""Who may open a bulk lane: tokens, strangers, and a provider that is not who it should be."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from p2pkv.errors import PeerUnreachableError
from p2pkv.limits import MAX_STREAMS_PER_PEER
from p2pkv.ports import BulkOffer
from p2pkv_node.bulk import MAGIC, TOKEN_BYTES, BulkSettings, TlsBulkLane
from p2pkv_node.bulk_tls import TlsConnection, make_identity
from tests.support.lanes import (
    DEADLINE_S,
    HOST,
    PEER,
    Clock,
    Sink,
    Source,
    listening,
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
    connection = await stranger(lane)
    try:
        await connection.handshake()
        await connection.send(MAGIC + bytes(TOKEN_BYTES))
        with pytest.raises(PeerUnreachableError):
            await connection.receive(1)
    finally:
        connection.close()
    assert sink.closed == 0
    await lane.connect(HOST, offer, Sink())  # the true one is still good


async def test_a_token_with_another_magic_is_refused_and_spent(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    connection = await stranger(lane)
    try:
        await connection.handshake()
        await connection.send(b"p2pkvBL2" + offer.token)
        with pytest.raises(PeerUnreachableError):
            await connection.receive(1)
    finally:
        connection.close()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, offer, Sink())


async def test_a_token_opens_one_lane_only(lane: TlsBulkLane) -> None:
    offer = offered(lane)
    await lane.connect(HOST, offer, Sink())
    with pytest.raises(PeerUnreachableError):
        await lane.connect(HOST, offer, Sink())
    assert lane.statistics().refused_tokens == 1


async def test_an_expired_token_is_refused() -> None:
    clock = Clock()
    async with TlsBulkLane(BulkSettings(host=HOST, token_seconds=10), clock=clock).running() as lane:
        late, in_time = offered(lane), offered(lane)
        clock.now += 9.9
        await lane.connect(HOST, in_time, Sink())
        clock.now += 0.1
        with pytest.raises(PeerUnreachableError):
            await lane.connect(HOST, late, Sink())
        assert lane.statistics().refused_tokens == 1


async def test_tokens_come_from_the_injected_source() -> None:
    tokens = iter([b"a" * TOKEN_BYTES])
    async with TlsBulkLane(BulkSettings(host=HOST), token_source=lambda: next(tokens)).running() as lane:
        assert offered(lane).token == b"a" * TOKEN_BYTES


async def test_one_peer_cannot_hoard_offers() -> None:
    clock = Clock()
    async with TlsBulkLane(BulkSettings(host=HOST), clock=clock).running() as lane:
        await lane.connect(HOST, offered(lane), Sink())  # an open lane counts as well
        for _ in range(MAX_STREAMS_PER_PEER - 1):
            offered(lane)
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None
        offered(lane, "another peer")
        clock.now += 60
        offered(lane)  # what nobody took has expired


async def test_all_offers_together_are_bounded(monkeypatch: pytest.MonkeyPatch, lane: TlsBulkLane) -> None:
    monkeypatch.setattr("p2pkv_node.bulk.MAX_BULK_OFFERS", 3)
    for number in range(3):
        offered(lane, f"peer {number}")
    assert lane.offer("one more", Source(), want_sender=lambda sender: None) is None


async def test_lanes_are_bounded_at_both_ends() -> None:
    async with TlsBulkLane(BulkSettings(host=HOST, max_connections=1)).running() as lane:
        first, second = offered(lane), offered(lane)
        await lane.connect(HOST, first, Sink())
        assert lane.offer(PEER, Source(), want_sender=lambda sender: None) is None
        with pytest.raises(PeerUnreachableError, match="no bulk lane can be opened"):
            await lane.connect(HOST, second, Sink())
        async with TlsBulkLane().running() as other:
            with pytest.raises(PeerUnreachableError):
                await other.connect(HOST, second, Sink())


# --- strangers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_handshake", [False, True])
async def test_a_silent_stranger_is_cut_off(with_handshake: bool) -> None:
    async with TlsBulkLane(BulkSettings(host=HOST, handshake_timeout_s=0.2)).running() as lane:
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
    async with TlsBulkLane(BulkSettings(host=HOST, max_strangers=2, handshake_timeout_s=60)).running() as lane:
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    connection = await stranger(lane, context)
    try:
        with pytest.raises(PeerUnreachableError):
            await connection.handshake()
    finally:
        connection.close()
    await until(lambda: lane.statistics().dropped_strangers == 1)


# --- the provider is not who it should be ----------------------------------------------------------------------------------


@asynccontextmanager
async def impostor(context: ssl.SSLContext) -> AsyncIterator[tuple[int, bytearray]]:
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
    identity.context.minimum_version = ssl.TLSVersion.TLSv1_2
    identity.context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with impostor(identity.context) as (port, heard):
        with pytest.raises(PeerUnreachableError):
            await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), identity.fingerprint), Sink())
    assert heard == b""


async def test_a_port_that_says_nothing_is_given_up() -> None:
    async with TlsBulkLane(BulkSettings(handshake_timeout_s=0.2)).running() as lane:
        with listening() as (_, port), pytest.raises(PeerUnreachableError, match="in time"):
            await lane.connect(HOST, BulkOffer(port, bytes(TOKEN_BYTES), bytes(32)), Sink())


@pytest.mark.parametrize(("host", "port"), [(HOST, 1), (HOST, 70_000), ("localhost", 1), ("::1", 1)])
async def test_what_cannot_be_dialled_is_unreachable(lane: TlsBulkLane, host: str, port: int) -> None:
    before = open_descriptors()
    with pytest.raises(PeerUnreachableError):
        await lane.connect(host, BulkOffer(port, bytes(TOKEN_BYTES), bytes(32)), Sink())
    assert open_descriptors() == before
