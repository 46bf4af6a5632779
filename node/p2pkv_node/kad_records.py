"""Where py-libp2p's ``KadDHT`` keeps provider records and finds them when it answers others: our own store, bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import trio
from libp2p.abc import IHost
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from p2pkv.errors import P2pkvError
from p2pkv.routing.records import ProviderRecords
from p2pkv_node.libp2p_errors import translated
from p2pkv_node.network import parse_peer_id, without_peer_id


class KadRecords(ProviderStore):
    """``ProviderStore`` over :class:`p2pkv.routing.records.ProviderRecords`: its methods that answering others needs."""

    def __init__(self, host: IHost, records: ProviderRecords) -> None:
        super().__init__(host)
        self._records = records

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        self._records.add(key, provider.peer_id.to_base58(), list(_readable(provider.addrs)), trio.current_time())

    def get_providers(self, key: bytes) -> list[PeerInfo]:
        found = self._records.get(key, trio.current_time())
        return [PeerInfo(parse_peer_id(peer_id), list(map(Multiaddr, addresses))) for peer_id, addresses in found.items()]


def _readable(addresses: Iterable[Multiaddr]) -> Iterator[str]:
    """Return those that can be written as text and read again: what a peer sends may be any bytes."""
    for address in addresses:
        try:
            with translated("reading an address"):
                text = without_peer_id(str(address))
                Multiaddr(text)
        except P2pkvError:
            continue
        yield text
