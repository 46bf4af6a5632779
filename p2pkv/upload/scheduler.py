"""The provider's fair queue: which peer is served next, and how much of what it wants.

Deficit round robin (Shreedhar and Varghese) by bytes, over peers and not over their streams: in each turn a peer may be
granted UPLOAD_QUANTUM_BYTES. A newcomer is ahead of its turn with its first quantum, as in FQ-CoDel (RFC 8290), so what a
fetch begins with does not wait for a whole round of greedy peers; every second turn stays with the others, however many
newcomers there are.

What is granted and not yet sent is outstanding, and bounded for each peer and for all of them. Limits of the rate are token
buckets. A peer that takes nothing, or is at its limit, is left out until it can be served again, and holds up nobody.

Calls and ``now`` go in; grants and the next timer come out. Equal calls give equal grants.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pkv.errors import ProtocolError
from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    MAX_CONNECTIONS,
    MAX_UPLOAD_BYTES,
    MAX_UPLOAD_BYTES_PER_PEER,
    MAX_WANTS_PER_PEER,
    NEWCOMER_S,
    UPLOAD_QUANTUM_BYTES,
)
from p2pkv.upload.rates import TokenBucket

# A peer may hold this part of what is free, so that however many hold much there is room for one more
# (the dynamic threshold of Choudhury and Hahne).
_SHARE_OF_FREE = 4


@dataclass(slots=True, eq=False)
class Stream:
    """One stream of a peer, made by :meth:`Scheduler.open`; the driver's handle."""

    peer: _Peer
    wants: dict[Cid, int] = field(default_factory=dict)  # with sizes, in the order wanted
    outstanding: int = 0


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    bucket: TokenBucket | None
    newcomer: bool = False
    deficit: int = 0
    last_served: float = -math.inf
    streams: int = 0
    waiting: deque[Stream] = field(default_factory=deque)  # those with wants, the next first
    wants: int = 0
    outstanding: int = 0
    ready: bool = False  # is in one of the rings
    resting: bool = False  # waits for its bucket
    blocked: bool = False  # waits for something that is outstanding to be sent

    @property
    def next_size(self) -> int:
        return next(iter(self.waiting[0].wants.values()))


@dataclass(frozen=True, slots=True)
class Grant:
    """Send the block ``cid`` of ``size`` bytes over ``stream`` now, and call :meth:`Scheduler.sent` when that is done."""

    stream: Stream
    cid: Cid
    size: int


class Scheduler:
    """See the module text. ``limit`` is for all peers together, ``limit_per_peer`` for each, in bytes per second."""

    def __init__(self, now: float, *, limit: float = math.inf, limit_per_peer: float = math.inf) -> None:
        self._bucket = TokenBucket(limit, now) if limit < math.inf else None
        self._limit_per_peer = limit_per_peer
        self._peers: dict[str, _Peer] = {}
        self._newcomers: deque[_Peer] = deque()
        self._others: deque[_Peer] = deque()
        self._newcomer_was_last = False
        self._resting: dict[_Peer, float] = {}
        self._gone: OrderedDict[str, _Peer] = OrderedDict()  # those who left lately: coming back makes nobody new
        self._pause: float | None = None  # until when the limit for all holds
        self._outstanding = 0

    @property
    def outstanding(self) -> int:
        """Bytes granted and not yet sent, of all peers."""
        return self._outstanding

    def outstanding_by_peer(self) -> dict[str, int]:
        """Return the bytes granted and not yet sent of each peer that has any."""
        return {peer.name: peer.outstanding for peer in self._peers.values() if peer.outstanding}

    # --- calls ---------------------------------------------------------------------------------------------------------

    def open(self, peer: str, now: float) -> Stream:
        """A peer has opened a stream."""
        state = self._peers.get(peer) or self._gone.pop(peer, None)
        if state is None:
            state = _Peer(peer, TokenBucket(self._limit_per_peer, now) if self._limit_per_peer < math.inf else None)
        self._peers[peer] = state
        state.streams += 1
        return Stream(state)

    def close(self, stream: Stream, now: float) -> None:
        """The stream is gone, with its wants and what is outstanding."""
        self.cancel(stream, tuple(stream.wants))
        self.sent(stream, stream.outstanding, now)
        peer = stream.peer
        peer.streams -= 1
        if not peer.streams:
            self._gone[peer.name] = self._peers.pop(peer.name)
            self._forget(now)

    def want(self, stream: Stream, wants: Iterable[tuple[Cid, int]], now: float) -> None:
        """A peer wants blocks, with their sizes; one that waits on this stream already keeps its place.

        Raises ProtocolError where more than MAX_WANTS_PER_PEER then wait.
        """
        peer = stream.peer
        before = len(stream.wants)
        for cid, size in wants:
            stream.wants.setdefault(cid, size)
        peer.wants += len(stream.wants) - before
        if stream.wants and not before:
            peer.waiting.append(stream)
        if peer.wants > MAX_WANTS_PER_PEER:
            raise ProtocolError(f"more than {MAX_WANTS_PER_PEER} wants outstanding")
        if not (peer.outstanding or peer.ready) and peer.last_served <= now - NEWCOMER_S:
            peer.newcomer, peer.deficit = True, UPLOAD_QUANTUM_BYTES  # ahead of its turn
        self._make_ready(peer)

    def cancel(self, stream: Stream, cids: Iterable[Cid]) -> None:
        """A peer takes wants back; what is granted already is sent."""
        peer = stream.peer
        before = len(stream.wants)
        for cid in cids:
            stream.wants.pop(cid, None)
        peer.wants -= before - len(stream.wants)
        if before and not stream.wants:
            peer.waiting.remove(stream)
            if not peer.waiting:
                self._set_aside(peer)

    def sent(self, stream: Stream, size: int, now: float) -> None:
        """``size`` bytes that were granted to ``stream`` have been sent, or never will be."""
        size = min(size, stream.outstanding)  # what a stream held was let go when it was closed
        if not size:
            return
        stream.outstanding -= size
        stream.peer.outstanding -= size
        self._outstanding -= size
        # Whoever is blocked has something outstanding, and so comes by here himself.
        stream.peer.blocked = False
        self._make_ready(stream.peer)

    def get_timer(self) -> float | None:
        """Return when to call :meth:`grant` again without another call in between; ``None`` for never."""
        return min([*self._resting.values(), *([] if self._pause is None else [self._pause])], default=None)

    def grant(self, now: float) -> list[Grant]:
        """Return what is to be sent now, in this order: all that room and limits allow."""
        for peer in [peer for peer, due in self._resting.items() if due <= now]:
            self._set_aside(peer)
            self._make_ready(peer)
        self._pause = None
        grants: list[Grant] = []
        while (ring := self._next_ring()) is not None and self._take_turn(ring, grants, now):
            pass
        return grants

    # --- turns ---------------------------------------------------------------------------------------------------------

    def _make_ready(self, peer: _Peer) -> None:
        if peer.waiting and not (peer.ready or peer.resting or peer.blocked):
            peer.ready = True
            (self._newcomers if peer.newcomer else self._others).append(peer)

    def _set_aside(self, peer: _Peer) -> None:
        """Take a peer out of the ring, or wherever else it waits."""
        if peer.ready:
            (self._newcomers if peer.newcomer else self._others).remove(peer)
            peer.ready = False
        if peer.resting:
            del self._resting[peer]
            peer.resting = False
        peer.blocked = False
        if not peer.newcomer:
            peer.deficit = 0  # a turn that is not used is not saved up

    def _next_ring(self) -> deque[_Peer] | None:
        """Return the ring whose first peer has the next turn: every second one at least is not a newcomer's."""
        if self._newcomers and not (self._others and self._newcomer_was_last):
            return self._newcomers
        return self._others or None

    def _take_turn(self, ring: deque[_Peer], grants: list[Grant], now: float) -> bool:
        """Grant what the first peer of ``ring`` may have in one turn; ``False`` where the limit for all cuts it off."""
        peer = ring[0]
        if not peer.newcomer and peer.next_size > peer.deficit:
            peer.deficit += UPLOAD_QUANTUM_BYTES
        while peer.waiting:
            size = peer.next_size
            if size > peer.deficit:
                ring.popleft()
                if peer.newcomer:
                    peer.newcomer, peer.deficit = False, 0
                self._others.append(peer)
                break
            if peer.outstanding and peer.outstanding + size > self._room(peer):
                self._set_aside(peer)
                peer.blocked = True
                break
            if peer.bucket is not None and (due := peer.bucket.ready_at(size, now)) > now:
                self._set_aside(peer)
                peer.resting = True
                self._resting[peer] = due
                break
            if self._bucket is not None and (due := self._bucket.ready_at(size, now)) > now:
                self._pause = due
                return False
            grants.append(self._serve(peer, now))
        else:
            self._set_aside(peer)
        self._newcomer_was_last = ring is self._newcomers
        return True

    def _room(self, peer: _Peer) -> int:
        """Return how many bytes a peer may have outstanding that has some already."""
        return min(MAX_UPLOAD_BYTES_PER_PEER, (MAX_UPLOAD_BYTES - self._outstanding + peer.outstanding) // _SHARE_OF_FREE)

    def _serve(self, peer: _Peer, now: float) -> Grant:
        stream = peer.waiting.popleft()
        cid, size = next(iter(stream.wants.items()))
        del stream.wants[cid]
        if stream.wants:
            peer.waiting.append(stream)
        peer.wants -= 1
        peer.deficit -= size
        for bucket in (peer.bucket, self._bucket):
            if bucket is not None:
                bucket.take(size, now)
        stream.outstanding += size
        peer.outstanding += size
        self._outstanding += size
        peer.last_served = now
        return Grant(stream, cid, size)

    def _forget(self, now: float) -> None:
        """Drop those who left so long ago that they are as good as new, and more than could be connected at once."""
        while self._gone:
            peer = next(iter(self._gone.values()))
            rested = peer.bucket is None or peer.bucket.full(now)
            if len(self._gone) <= MAX_CONNECTIONS and not (rested and peer.last_served <= now - NEWCOMER_S):
                break
            del self._gone[peer.name]
