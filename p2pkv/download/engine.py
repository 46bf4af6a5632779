"""One session: every wanted block, every peer, and who is asked for what.

Calls and ``now`` go in, events and the next timer come out; randomness is injected, so equal seeds give equal traces. The
order is: the nearest deadline first, rarest first among equals, chance among those; the peer with the least outstanding
time next. A block whose peer falls silent goes back to the pool; in the tail an idle peer re-requests what a slow one still
holds, at most two in flight and at most MAX_DUPLICATE_SHARE extra bytes. A lie costs the liar the session, a timeout does not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from p2pkv.download.peer import PeerState
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_DUPLICATE_SHARE


@dataclass(frozen=True, slots=True)
class Want:
    """A block to fetch. ``size`` is exact for blocks and ``None`` for nodes; a smaller ``deadline`` comes first."""

    cid: Cid
    size: int | None
    deadline: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Event: send ``cids`` as a want to ``peer``."""

    peer: str
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Event: send ``cids`` as a cancel to ``peer``."""

    peer: str
    cids: tuple[Cid, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """Event: ``cid`` is here, verified; ``peer`` was first to deliver it."""

    cid: Cid
    peer: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Event: ``peer`` lied and is out of this session."""

    peer: str


@dataclass(frozen=True, slots=True)
class Snubbed:
    """Event: ``peer`` was silent too long; its ``blocks`` blocks are asked of others."""

    peer: str
    blocks: int


Event: TypeAlias = Ask | Withdraw | Completed | Dropped | Snubbed

# What a node of unknown size counts as in windows and loads.
_NODE_GUESS = 8192


@dataclass(slots=True)
class _Wanted:
    want: Want
    holders: list[str]  # peers that are asked for it now

    @property
    def size(self) -> int:
        return self.want.size if self.want.size is not None else _NODE_GUESS


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """One peer's share, for progress displays and reports."""

    peer: str
    bytes: int
    blocks: int
    outstanding: int
    rate: float
    snubbed: bool


class Download:
    """See the module text. Drain :meth:`next_event` after every call."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._wanted: dict[Cid, _Wanted] = {}
        self._peers: dict[str, PeerState] = {}
        self._gone: dict[str, PeerState] = {}
        self._events: deque[Event] = deque()
        self._asked_bytes = 0
        self._duplicate_bytes = 0
        self._second_asks = 0  # bytes asked of a second peer: the budget for duplicates is spent when asking

    # --- calls ---------------------------------------------------------------------------------------------------------

    def add_wants(self, wants: Iterable[Want], now: float) -> None:
        for want in wants:
            if want.cid not in self._wanted:
                self._wanted[want.cid] = _Wanted(want, [])
        self._assign(now)

    def discard_wants(self) -> None:
        """Give up every block that is not here yet."""
        for state in self._peers.values():
            if state.outstanding:
                self._events.append(Withdraw(state.peer, tuple(state.outstanding)))
                state.outstanding.clear()
                state.outstanding_bytes = 0
        self._wanted.clear()

    def add_peer(self, peer: str, now: float) -> None:
        """A peer is connected and may be asked at once."""
        if peer not in self._peers:
            self._peers[peer] = PeerState(peer, joined=now)
            self._assign(now)

    def remove_peer(self, peer: str, now: float) -> None:
        """A peer is gone: what it was asked for goes back to the pool."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for cid in state.outstanding:
            self._wanted[cid].holders.remove(peer)
        state.outstanding.clear()
        state.outstanding_bytes = 0
        self._gone[peer] = state
        self._assign(now)

    def receive_block(self, peer: str, cid: Cid, size: int, now: float) -> bool:
        """A verified block came. Returns whether it is news."""
        wanted = self._wanted.pop(cid, None)
        state = self._peers.get(peer)
        if state is not None:
            state.settle(cid, wanted.size if wanted else size)
            state.delivered(size, now)
        if wanted is None:
            self._duplicate_bytes += size
            self._assign(now)
            return False
        self._events.append(Completed(cid, peer))
        for holder in wanted.holders:
            if holder != peer and self._peers[holder].settle(cid, wanted.size):
                self._events.append(Withdraw(holder, (cid,)))
        self._assign(now)
        return True

    def receive_lie(self, peer: str, now: float) -> None:
        """A whole block of this peer had another hash: it is out."""
        if peer in self._peers:
            self.remove_peer(peer, now)
            self._events.append(Dropped(peer))

    def receive_dont_have(self, peer: str, cids: Iterable[Cid], now: float) -> None:
        state = self._peers.get(peer)
        if state is None:
            return
        for cid in cids:
            state.lacks.add(cid)
            self._release(state, cid)
        if not state.outstanding:
            state.last_progress = now
        self._assign(now)

    def receive_have(self, peer: str, cids: Iterable[Cid], now: float) -> None:
        state = self._peers.get(peer)
        if state is not None:
            state.lacks.difference_update(cids)
            self._assign(now)

    def handle_timer(self, now: float) -> None:
        """Snub the peers whose patience has run out."""
        for state in list(self._peers.values()):
            if state.deadline is None or state.deadline > now:
                continue
            cids = tuple(state.outstanding)
            for cid in cids:
                self._wanted[cid].holders.remove(state.peer)
            state.snub()
            self._events += (Snubbed(state.peer, len(cids)), Withdraw(state.peer, cids))
        self._assign(now)

    # --- results -------------------------------------------------------------------------------------------------------

    def get_timer(self) -> float | None:
        """Return when :meth:`handle_timer` is due."""
        return min((state.deadline for state in self._peers.values() if state.deadline is not None), default=None)

    def next_event(self) -> Event | None:
        return self._events.popleft() if self._events else None

    @property
    def missing(self) -> int:
        """How many wanted blocks are not here yet."""
        return len(self._wanted)

    @property
    def stuck(self) -> bool:
        """Whether blocks are missing and no peer of the session can be asked for any of them."""
        return bool(self._wanted) and not any(c not in s.lacks for s in self._peers.values() for c in self._wanted)

    def expected_size(self, cid: Cid) -> int | None:
        """Return the largest size that ``cid`` may have (exact for blocks); ``None`` when it is not wanted."""
        wanted = self._wanted.get(cid)
        if wanted is None:
            return None
        return wanted.want.size if wanted.want.size is not None else MAX_CODED_BLOCK_BYTES

    @property
    def duplicate_bytes(self) -> int:
        """Bytes that came although they were here already."""
        return self._duplicate_bytes

    def progress(self) -> tuple[PeerProgress, ...]:
        """Return every peer's share, those that are gone as well."""
        states = {**self._gone, **self._peers}
        return tuple(
            PeerProgress(s.peer, s.received_bytes, s.received_blocks, len(s.outstanding), s.rate, s.snubbed)
            for s in states.values()
        )

    # --- assignment ----------------------------------------------------------------------------------------------------

    def _release(self, state: PeerState, cid: Cid) -> None:
        wanted = self._wanted.get(cid)
        if wanted is not None and state.settle(cid, wanted.size):
            wanted.holders.remove(state.peer)

    def _assign(self, now: float) -> None:
        """Fill the windows, then let idle peers help in the tail."""
        ready = [state for state in self._peers.values() if self._has_room(state)]
        if not ready:
            return
        asks: dict[str, list[Cid]] = {}
        pool = [wanted for wanted in self._wanted.values() if not wanted.holders]
        if pool:
            for wanted in self._ordered(pool):
                state = self._pick(ready, wanted)
                if state is None:
                    continue
                self._ask(state, wanted, now, asks)
                if len(state.outstanding) >= state.window:
                    ready.remove(state)
                    if not ready:
                        break
        else:
            self._help_in_tail(now, asks)
        for peer, cids in asks.items():
            self._events.append(Ask(peer, tuple(cids)))

    def _has_room(self, state: PeerState) -> bool:
        """A window is refilled when half of it is free, so that wants travel in batches and not one by one."""
        return len(state.outstanding) <= state.window // 2

    def _ordered(self, pool: list[_Wanted]) -> list[_Wanted]:
        rarity = {w.want.cid: sum(w.want.cid not in s.lacks for s in self._peers.values()) for w in pool}
        return sorted(pool, key=lambda w: (w.want.deadline, rarity[w.want.cid], self._rng.random()))

    def _pick(self, ready: list[PeerState], wanted: _Wanted) -> PeerState | None:
        able = [state for state in ready if wanted.want.cid not in state.lacks]
        return min(able, key=lambda state: (state.snubbed, state.load), default=None)

    def _help_in_tail(self, now: float, asks: dict[str, list[Cid]]) -> None:
        """Nothing is left to ask first: an idle peer takes over from the slowest, within the budget for duplicates."""
        idle = [s for s in self._peers.values() if not s.outstanding and not s.snubbed and s.rate > 0]
        for state in idle:
            late = [w for w in self._wanted.values() if len(w.holders) == 1 and w.want.cid not in state.lacks]
            late = [w for w in late if self._peers[w.holders[0]].load > 2 * w.size / state.rate]
            if not late:
                continue
            worst = max(late, key=lambda w: (self._peers[w.holders[0]].load, self._rng.random()))
            if self._second_asks + worst.size > MAX_DUPLICATE_SHARE * self._asked_bytes:
                return
            self._second_asks += worst.size
            self._ask(state, worst, now, asks)

    def _ask(self, state: PeerState, wanted: _Wanted, now: float, asks: dict[str, list[Cid]]) -> None:
        state.asked(wanted.want.cid, wanted.size, now)
        wanted.holders.append(state.peer)
        self._asked_bytes += wanted.size
        asks.setdefault(state.peer, []).append(wanted.want.cid)
