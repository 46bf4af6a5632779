"""The provider records that a DHT node keeps for others: who provides which key, bounded in number and in time. Sans-IO.

Records are dropped PROVIDER_RECORD_S after they came last, and of one key at most DHT_CLOSEST are kept, the first ones. Where
MAX_PROVIDER_RECORDS are there already, one more takes the place of the oldest of the peer that has most: whoever announces
without end pushes out his own records, and those who announce little lose nothing. The node's own count against nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from p2pkv.limits import DHT_CLOSEST, MAX_ADDRESSES_PER_PEER, MAX_PROVIDER_RECORDS, PROVIDER_RECORD_S

# Of the records of the peer that has most, the share that makes room at once: finding that peer is paid for by many records.
_ROOM_SHARE = 1 / 64


@dataclass(slots=True)
class _Provider:
    addresses: tuple[str, ...] = ()
    since: dict[bytes, float] = field(default_factory=dict)  # by key, the record that came last at the end


class ProviderRecords:
    """``own`` is the peer id whose records are never pushed out. Times are seconds of one clock that goes forward only."""

    def __init__(self, own: str, *, limit: int = MAX_PROVIDER_RECORDS) -> None:
        self._own = own
        self._limit = limit
        self._providers: dict[str, _Provider] = {}
        self._by_key: dict[bytes, tuple[str, ...]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many records there are, the node's own with them."""
        return self._count

    def add(self, key: bytes, peer_id: str, addresses: Sequence[str], now: float) -> None:
        """Keep, or keep anew, that a peer has ``key``; its addresses take the place of those that it told before."""
        others = self._by_key.get(key, ())
        if peer_id in others:
            del self._providers[peer_id].since[key]
        elif len(others) >= DHT_CLOSEST and peer_id != self._own:
            return
        else:
            if self._foreign() >= self._limit and peer_id != self._own:
                self._make_room()
            self._by_key[key] = (*self._by_key.get(key, ()), peer_id)
            self._count += 1
        known = self._providers.setdefault(peer_id, _Provider())
        known.since[key] = now
        known.addresses = tuple(addresses[:MAX_ADDRESSES_PER_PEER])

    def get(self, key: bytes, now: float) -> dict[str, tuple[str, ...]]:
        """Return the addresses of each provider of ``key``, the one that came first at the front."""
        providers = ((peer_id, self._providers[peer_id]) for peer_id in self._by_key.get(key, ()))
        return {peer_id: known.addresses for peer_id, known in providers if not _is_over(known.since[key], now)}

    def discard(self, key: bytes, peer_id: str) -> None:
        """Forget that ``peer_id`` provides ``key``, if it does."""
        if peer_id in self._by_key.get(key, ()):
            self._drop(key, peer_id)

    def expire(self, now: float) -> None:
        """Drop the records whose time is over."""
        for peer_id, known in list(self._providers.items()):
            over = [key for key, since in known.since.items() if _is_over(since, now)]
            for key in over:
                self._drop(key, peer_id)

    def _foreign(self) -> int:
        own = self._providers.get(self._own)
        return self._count - (len(own.since) if own is not None else 0)

    def _make_room(self) -> None:
        most, peer_id = max((len(known.since), peer_id) for peer_id, known in self._providers.items() if peer_id != self._own)
        oldest = list(islice(self._providers[peer_id].since, math.ceil(most * _ROOM_SHARE)))
        for key in oldest:
            self._drop(key, peer_id)

    def _drop(self, key: bytes, peer_id: str) -> None:
        left = tuple(other for other in self._by_key[key] if other != peer_id)
        if left:
            self._by_key[key] = left
        else:
            del self._by_key[key]
        known = self._providers[peer_id]
        del known.since[key]
        if not known.since:
            del self._providers[peer_id]
        self._count -= 1


def _is_over(since: float, now: float) -> bool:
    return now - since >= PROVIDER_RECORD_S
