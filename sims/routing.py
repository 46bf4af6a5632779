"""Twin of the DHT: provider records in one dict that all nodes of a simulated world share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2pkv.limits import MAX_PROVIDERS_PER_LOOKUP
from p2pkv.ports import PeerAddress, PeerId


@dataclass(slots=True)
class ProviderRecords:
    """Who announced what. A node that dies stays in here, as its records stay in a real DHT."""

    by_key: dict[bytes, dict[PeerId, PeerAddress]] = field(default_factory=dict)


class MemoryRouting:
    """The port :class:`p2pkv.ports.Routing` of one node. ``latency_s`` passes before the first provider is known."""

    def __init__(self, records: ProviderRecords, own: PeerAddress, *, latency_s: float = 0.0, offline: bool = False) -> None:
        self.offline = offline
        self._records = records
        self._own = own
        self._latency_s = latency_s

    async def announce(self, key: bytes) -> bool:
        await trio.sleep(self._latency_s)
        if self.offline:
            return False
        self._records.by_key.setdefault(key, {})[self._own.peer_id] = self._own
        return True

    @asynccontextmanager
    async def find_providers(self, key: bytes) -> AsyncIterator[AsyncIterator[PeerAddress]]:
        found = {} if self.offline else self._records.by_key.get(key, {})
        others = [peer for peer in found.values() if peer.peer_id != self._own.peer_id]
        await trio.lowlevel.checkpoint()
        yield _Found(iter(others[:MAX_PROVIDERS_PER_LOOKUP]), self._latency_s)


class _Found:
    """Providers, the first of them after ``latency_s``. Not a generator: see the port."""

    def __init__(self, providers: Iterator[PeerAddress], latency_s: float) -> None:
        self._providers = providers
        self._latency_s = latency_s

    def __aiter__(self) -> _Found:
        return self

    async def __anext__(self) -> PeerAddress:
        await trio.sleep(self._latency_s)
        self._latency_s = 0.0
        try:
            return next(self._providers)
        except StopIteration:
            raise StopAsyncIteration from None
