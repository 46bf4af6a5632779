"""A bit that flips below the exchange, in the encrypted bytes: the connection dies of it, and the answer is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import trio

from p2pkv.formats.cid import Cid, Codec
from p2pkv.ports import BulkLane, BulkOffer, BulkReceiver, BulkSender, BulkSink, BulkSource
from tests.integration.conftest import SHARED, Ask, is_block, provide
from tests.support.crafted import Pieces
from tests.support.proxy import Proxy, open_proxy
from tests.support.stores import tampering
from tests.support.town import Town


async def test_a_bit_in_the_encrypted_stream(town: Town, pieces: Pieces, ask: Ask) -> None:
    async with open_proxy() as proxy:
        flipped = threading.Event()

        def strike(cid: Cid, data: bytes) -> bytes:
            if is_block(cid):
                proxy.flip_next()
            return data

        def after_the_strike(cid: Cid, data: bytes) -> bytes:
            if is_block(cid):
                assert flipped.wait(20)
            return data

        far = await provide(town, "far", pieces, serve_from=tampering(strike), announce=(proxy.address,), bulk=False)
        proxy.target = far.listen_port
        near = await provide(town, "near", pieces, serve_from=tampering(after_the_strike), bulk=False)
        # Whoever dials first would choose the way: so the consumer joins through the proxy.
        consumer = await town.start("consumer", bootstrap=(far.address,), bulk=False)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_when, lambda: proxy.flipped > 0, flipped)
            report = await ask(consumer)
        assert proxy.flipped == 1
        assert report.hit_tokens == SHARED
        assert report.blocks_refused == 0  # the cipher caught it before any block was whole
        assert report.peers_lost == 1
        assert report.bytes_by_peer[near.peer_id] >= sum(len(pieces.blocks[cid]) for cid in pieces.cids(Codec.RAW))


async def tell_when(condition: Callable[[], bool], event: threading.Event) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - the proxy is no trio event
            await trio.sleep(0.002)
    event.set()


class ThroughProxy:
    """A bulk lane whose offers lead through a proxy."""

    def __init__(self, lane: BulkLane, proxy: Proxy) -> None:
        self._lane = lane
        self._proxy = proxy

    def offer(self, peer_id: str, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        offer = self._lane.offer(peer_id, source, want_sender=want_sender)
        if offer is None:
            return None
        self._proxy.target = offer.port
        return replace(offer, port=self._proxy.port)

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        return await self._lane.connect(host, offer, sink)


async def test_a_bit_in_the_encrypted_bulk_lane(town: Town, pieces: Pieces, ask: Ask) -> None:
    async with open_proxy() as proxy:

        def strike(cid: Cid, data: bytes) -> bytes:
            if is_block(cid):
                proxy.flip_next()
            return data

        provider = await provide(town, "provider", pieces, serve_from=tampering(strike))
        assert provider.node.context.bulk is not None
        provider.node.context.bulk = ThroughProxy(provider.node.context.bulk, proxy)
        report = await ask(await town.start("consumer"))
        assert proxy.flipped == 1
        assert report.hit_tokens == SHARED  # over the stream, once the lane was gone
        assert report.blocks_refused == 0
        assert report.peers_dropped == ()
