"""Twin of the DHT: provider records in one dict that all nodes of a simulated world share."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2pkv.limits import MAX_PROVIDERS_PER_LOOKUP
from p2pkv.ports import PeerAddress, PeerId

# As many providers of one key as a real DHT node stores; it drops later ones without a word.
_RECORDS_PER_KEY = 20


@dataclass(slots=True)
class ProviderRecords:
    """Who announced what. A node that dies stays in here, as its records stay in a real DHT."""

    by_key: dict[bytes, dict[PeerId, PeerAddress]] = field(default_factory=dict)

    def add(self, key: bytes, provider: PeerAddress) -> None:
        found = self.by_key.setdefault(key, {})
        if provider.peer_id in found or len(found) < _RECORDS_PER_KEY:
            found[provider.peer_id] = provider


class MemoryRouting:
    """The port :class:`p2pkv.ports.Routing` of one node. ``latency_s`` passes before the first provider is known.

    Providers come in an order of chance, as from several nodes of a real DHT.
    """

    def __init__(
        self,
        records: ProviderRecords,
        own: PeerAddress,
        *,
        latency_s: float = 0.0,
        offline: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self.offline = offline
        self._rng = rng or random.Random(0)
        self._records = records
        self._own = own
        self._latency_s = latency_s

    async def announce(self, key: bytes) -> bool:
        await trio.sleep(self._latency_s)
        if self.offline:
            return False
        self._records.add(key, self._own)
        return True

    def withdraw(self, key: bytes) -> None:
        """Nothing to do: the node itself is asked by nobody here."""

    @asynccontextmanager
    async def find_providers(self, key: bytes) -> AsyncIterator[AsyncIterator[PeerAddress]]:
        found = {} if self.offline else self._records.by_key.get(key, {})
        others = [peer for peer in found.values() if peer.peer_id != self._own.peer_id]
        self._rng.shuffle(others)
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
