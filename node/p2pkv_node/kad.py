"""The port :class:`p2pkv.ports.Routing` over py-libp2p's Kademlia DHT, protocol ``/p2pkv/kad/1.0.0``, server mode.

py-libp2p's ``KadDHT`` answers others and keeps the records and the routing table. Asking is done here, because the library's
look-ups end at the first record in the node's own store, return one provider many times, wait for the slowest peer and turn
failures into empty lists; its service loop, which announces everything a second time, does not run. Its protocol id cannot be
set (``protocol_prefix`` is stored and never read), so its stream handler is registered under ours.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.common import PROTOCOL_ID as LIBRARY_PROTOCOL
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID

from p2pkv.errors import P2pkvError
from p2pkv.limits import (
    DHT_CLOSEST,
    DHT_PARALLEL,
    DHT_REFRESH_S,
    JOIN_TIMEOUT_S,
    LOOKUP_TIMEOUT_S,
    MAX_PROVIDERS_PER_LOOKUP,
)
from p2pkv.ports import PeerAddress, PeerId
from p2pkv.routing.records import ProviderRecords
from p2pkv.swarm.background import open_background
from p2pkv_node.kad_client import KAD_PROTOCOL, KadClient
from p2pkv_node.kad_records import KadRecords
from p2pkv_node.libp2p_errors import translated
from p2pkv_node.network import Libp2pNetwork, parse_peer_address, parse_peer_id, without_peer_id

logger = logging.getLogger(__name__)

Ask = Callable[[ID], Awaitable[Iterable[PeerAddress]]]
"""Asks one peer and returns the peers that it thinks closer. Raises P2pkvError when the peer does not answer."""

_PREFIX: Final = TProtocol("/p2pkv")


class KadRouting:
    """The node's part in the DHT; :func:`open_routing` makes it."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network
        self._client = KadClient(network)
        # Strict validation: it takes no values but signed ones of known kinds, so nobody can fill the memory with others.
        self._dht = KadDHT(network.host, DHTMode.SERVER, protocol_prefix=_PREFIX, strict_validation=True)
        self._records = ProviderRecords(network.peer_id)
        self._dht.provider_store = KadRecords(network.host, self._records)
        network.host.remove_stream_handler(LIBRARY_PROTOCOL)
        network.host.set_stream_handler(KAD_PROTOCOL, self._serve)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers in the routing table."""
        return tuple(peer.to_base58() for peer in self._dht.routing_table.get_peer_ids())

    async def announce(self, key: bytes) -> bool:
        """Tell the peers closest to ``key``; ``True`` when one or more confirmed. Callers pace: see ANNOUNCE_BURST."""
        own = tuple(map(without_peer_id, self._network.addresses))
        self._records.add(key, self._network.peer_id, own, trio.current_time())
        told: list[ID] = []

        async def tell(peer_id: ID) -> None:
            try:
                await self._client.add_provider(peer_id, key)
                told.append(peer_id)
            except P2pkvError as error:
                logger.debug("announcing to %s: %s", peer_id, error)

        with trio.move_on_after(LOOKUP_TIMEOUT_S):
            closest = await self._closest(key)
            async with trio.open_nursery() as nursery:
                for peer_id in closest:
                    nursery.start_soon(tell, peer_id)
        return bool(told)

    def withdraw(self, key: bytes) -> None:
        """See :meth:`p2pkv.ports.Routing.withdraw`."""
        self._records.discard(key, self._network.peer_id)

    @asynccontextmanager
    async def find_providers(self, key: bytes) -> AsyncIterator[AsyncIterator[PeerAddress]]:
        """See :meth:`p2pkv.ports.Routing.find_providers`. Every provider's addresses are known to the network afterwards."""
        send, receive = trio.open_memory_channel[PeerAddress](MAX_PROVIDERS_PER_LOOKUP)
        lookup = _Lookup(self._network, self._client, key, send)
        with receive:
            lookup.offer(itertools.starmap(PeerAddress, self._records.get(key, trio.current_time()).items()))
            if not self._network.detached.start(partial(lookup.run, self._walk)):
                send.close()
            yield receive
        lookup.scope.cancel()

    async def refresh(self) -> None:
        """Look this node itself up, so that it knows its neighbours and they know it."""
        with trio.move_on_after(LOOKUP_TIMEOUT_S):
            await self._closest(self._network.host.get_id().to_bytes())

    async def maintain(self, bootstrap: Sequence[str]) -> None:
        """Refresh for ever, reconnect to the bootstrap peers when nobody is left, and drop expired records."""
        for pause in itertools.chain(DHT_REFRESH_S, itertools.repeat(DHT_REFRESH_S[-1])):
            # A node without peers keeps the short pause: it has nothing, and it bothers only its own bootstrap peers.
            await trio.sleep(pause if self.peers else min(pause, DHT_REFRESH_S[1]))
            if not self.peers:
                await self.join(bootstrap)
            else:
                await self.refresh()
            self._records.expire(trio.current_time())
            self._dht.value_store.cleanup_expired()

    async def join(self, bootstrap: Sequence[str]) -> None:
        """Connect to the bootstrap peers and learn from them who else is there; within JOIN_TIMEOUT_S, never raises."""

        async def meet(address: str) -> None:
            try:
                peer = await self._network.connect(address)
            except P2pkvError as error:
                logger.warning("bootstrap %s: %s", address, error)
            else:
                await self._remember(parse_peer_id(peer.peer_id), peer.addresses)

        with trio.move_on_after(JOIN_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for address in bootstrap:
                    nursery.start_soon(meet, address)
            await self.refresh()

    async def _serve(self, stream: INetStream) -> None:
        peer_id = stream.muxed_conn.peer_id
        try:
            with translated(f"serving the DHT to {peer_id}"):
                await self._dht.handle_stream(stream)
                # The library does it before the peer's first message, which brings the addresses.
                await self._dht.add_peer(peer_id, skip_server_mode_check=True)
        except P2pkvError as error:
            logger.debug("%s", error)

    async def _closest(self, key: bytes) -> list[ID]:
        async def ask(peer_id: ID) -> Iterable[PeerAddress]:
            return (await self._client.find_node(peer_id, key)).closer

        return await self._walk(key, ask)

    async def _walk(self, key: bytes, ask: Ask) -> list[ID]:
        """Ask the peers closest to ``key``, DHT_PARALLEL at once, and the closer ones that they name, until the DHT_CLOSEST
        closest known have all answered or failed. Return those that answered, closest first.
        """
        own = self._network.host.get_id()
        candidates = set(self._dht.routing_table.get_peer_ids())
        asked: set[ID] = set()
        answered: set[ID] = set()
        finished_send, finished = trio.open_memory_channel[tuple[ID, tuple[PeerAddress, ...] | None]](DHT_PARALLEL)

        async def one(peer_id: ID) -> None:
            try:
                closer = tuple(await ask(peer_id))
            except P2pkvError as error:
                logger.debug("asking %s: %s", peer_id, error)
                await finished_send.send((peer_id, None))
            else:
                await finished_send.send((peer_id, closer))

        running = 0
        async with trio.open_nursery() as nursery:
            while True:
                closest = sorted(candidates, key=lambda peer_id: _distance(peer_id, key))[:DHT_CLOSEST]
                waiting = [peer_id for peer_id in closest if peer_id not in asked]
                for peer_id in waiting[: DHT_PARALLEL - running]:
                    asked.add(peer_id)
                    running += 1
                    nursery.start_soon(one, peer_id)
                if not running:
                    break
                peer_id, closer = await finished.receive()
                running -= 1
                if closer is None:
                    candidates.discard(peer_id)
                    self._dht.routing_table.remove_peer(peer_id)
                    continue
                answered.add(peer_id)
                self._network.detached.start(partial(self._remember, peer_id, ()))
                for peer in closer:
                    closer_id = parse_peer_id(peer.peer_id)
                    if closer_id != own and closer_id not in asked:
                        self._network.learn(peer)
                        candidates.add(closer_id)
        return [peer_id for peer_id in closest if peer_id in answered]

    async def _remember(self, peer_id: ID, addresses: Sequence[str]) -> None:
        """Put a peer that answers into the routing table. A full bucket may take a while: it pings its oldest peer."""
        if addresses:
            self._network.learn(PeerAddress(peer_id.to_base58(), tuple(addresses)))
        with trio.move_on_after(LOOKUP_TIMEOUT_S):
            # It answered a DHT question, so it is a server, whatever the identify protocol has learnt so far.
            await self._dht.add_peer(peer_id, skip_server_mode_check=True)


class _Lookup:
    """One look-up of providers, as it runs in the background of its user."""

    def __init__(
        self, network: Libp2pNetwork, client: KadClient, key: bytes, out: trio.MemorySendChannel[PeerAddress]
    ) -> None:
        self.scope = trio.CancelScope()
        self._network = network
        self._client = client
        self._key = key
        self._out = out
        self._offered: set[PeerId] = {network.peer_id}

    def offer(self, providers: Iterable[PeerAddress]) -> None:
        """Hand new providers over, and let the network know all their addresses. Ends the look-up after enough of them."""
        for peer in providers:
            if len(self._offered) > MAX_PROVIDERS_PER_LOOKUP:
                self.scope.cancel()
                return
            self._network.learn(peer)
            # Without an address it cannot be dialled: another peer's record of it may have one.
            if peer.addresses and peer.peer_id not in self._offered:
                self._offered.add(peer.peer_id)
                try:
                    self._out.send_nowait(peer)
                except trio.BrokenResourceError:
                    self.scope.cancel()
                    return

    async def run(self, walk: Callable[[bytes, Ask], Awaitable[list[ID]]]) -> None:
        async def ask(peer_id: ID) -> Iterable[PeerAddress]:
            answer = await self._client.get_providers(peer_id, self._key)
            self.offer(answer.providers)
            return answer.closer

        with self._out, self.scope, trio.move_on_after(LOOKUP_TIMEOUT_S):
            await walk(self._key, ask)


def _distance(peer_id: ID, key: bytes) -> int:
    """Kademlia's distance of libp2p: XOR of the SHA-256 of both."""
    return int.from_bytes(hashlib.sha256(peer_id.to_bytes()).digest()) ^ int.from_bytes(hashlib.sha256(key).digest())


@asynccontextmanager
async def open_routing(network: Libp2pNetwork, bootstrap: Sequence[str] = ()) -> AsyncIterator[KadRouting]:
    """Join the DHT through ``bootstrap`` (full multiaddrs) and yield when the neighbours are known, or after JOIN_TIMEOUT_S.

    A node without bootstrap peers waits for others. Raises UsageError for an address that cannot be read.
    """
    for address in bootstrap:
        parse_peer_address(address)
    routing = KadRouting(network)
    await routing.join(bootstrap)
    async with open_background() as nursery:
        nursery.start_soon(routing.maintain, tuple(bootstrap))
        yield routing
