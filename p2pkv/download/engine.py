"""One session: every wanted block, every peer, and who is asked for what.

Calls and ``now`` go in, events and the next timer come out; randomness is injected, so equal seeds give equal traces. The
order is that of the pool; a block goes to the peer that would have it here first, and to nobody where the others would have
everything sooner. A block whose peer falls silent goes back to the pool, and the silent peer is tried with one far block at a
time. In the tail, when every block is asked for, an idle peer re-requests what a slow or stalled one still holds, at most two
in flight and at most MAX_DUPLICATE_SHARE extra bytes. A lie costs the liar the session, a timeout does not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from p2pkv.download.events import Ask, Completed, Dropped, Event, PeerProgress, Snubbed, Withdraw
from p2pkv.download.peer import PeerState
from p2pkv.download.pool import Pool, Want, Wanted
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_DUPLICATE_SHARE

__all__ = ["Ask", "Completed", "Download", "Dropped", "Event", "PeerProgress", "Snubbed", "Want", "Withdraw"]


class Download:
    """See the module text. Drain :meth:`next_event` after every call."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._wanted: dict[Cid, Wanted] = {}
        self._pool = Pool()  # those of them that nobody is asked for
        self._peers: dict[str, PeerState] = {}
        self._gone: dict[str, PeerState] = {}
        self._liars: set[str] = set()
        self._events: deque[Event] = deque()
        self._first_asks = 0  # bytes of all wants that were ever asked of anybody, each once
        self._second_asks = 0  # bytes asked of a second peer: the budget for duplicates is spent when asking
        self._duplicate_bytes = 0
        self._tail_timer: float | None = None
        self._heard_at = -inf  # when any peer last delivered

    # --- calls ---------------------------------------------------------------------------------------------------------

    def add_wants(self, wants: Iterable[Want], now: float) -> None:
        """Want more blocks; one that is wanted already stays as it is."""
        new: list[Wanted] = []
        for want in wants:
            if want.cid not in self._wanted:
                wanted = Wanted(want, self._rng.random())
                wanted.lackers.update(state.peer for state in self._peers.values() if want.cid in state.lacks)
                self._wanted[want.cid] = wanted
                new.append(wanted)
        self._pool.add(new)
        self._assign(now)

    def discard_wants(self) -> None:
        """Give up every block that is not here yet."""
        for state in self._peers.values():
            if state.outstanding:
                self._events.append(Withdraw(state.peer, tuple(state.outstanding)))
                state.forget_outstanding()
        self._wanted.clear()
        self._pool.clear()
        self._tail_timer = None

    def add_peer(self, peer: str, now: float) -> None:
        """A peer is connected and may be asked at once; a known one changes nothing, nor does one that was dropped."""
        if peer in self._peers or peer in self._liars:
            return
        state = PeerState(peer)
        before = self._gone.pop(peer, None)
        if before is not None:
            state.received_bytes, state.received_blocks = before.received_bytes, before.received_blocks
        self._peers[peer] = state
        self._assign(now)

    def remove_peer(self, peer: str, now: float) -> None:
        """A peer is gone: what it was asked for goes back to the pool."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for cid in state.lacks:
            if cid in self._wanted:
                self._pool.note_lack(self._wanted[cid], peer, False)
        self._release_all(state)
        state.forget_outstanding()
        self._gone[peer] = state
        self._assign(now)

    def receive_blocks(self, peer: str, blocks: Sequence[tuple[Cid, int]], now: float) -> None:
        """Verified blocks came, each with its size, of a peer that may be gone by now; many at once cost one assignment."""
        state = self._peers.get(peer) or self._gone.get(peer)
        withdrawn: dict[str, list[Cid]] = {}
        sizes: list[int] = []  # of blocks: nodes are too small to say anything of the rate
        for cid, size in blocks:
            wanted = self._wanted.pop(cid, None)
            if wanted is None:
                self._duplicate_bytes += size
                sizes.append(size)
                continue
            if wanted.want.size is not None:
                sizes.append(size)
            if state is not None:
                state.received_bytes += size
                state.received_blocks += 1
            if wanted.pooled:  # late, after its peer was snubbed or left
                self._pool.remove(wanted)
            for holder in wanted.holders:
                if self._peers[holder].settle(cid, wanted.size) and holder != peer:
                    withdrawn.setdefault(holder, []).append(cid)
            self._events.append(Completed(cid, peer))
        self._heard_at = now
        if state is not None and sizes:
            state.delivered(sizes, now)
        elif state is not None:
            state.answered(now)
        self._events += (Withdraw(holder, tuple(cids)) for holder, cids in withdrawn.items())
        self._assign(now)

    def receive_lie(self, peer: str, now: float) -> None:
        """A whole block of this peer had another hash: it is out, and stays out."""
        self._liars.add(peer)
        if peer in self._peers:
            self.remove_peer(peer, now)
            self._events.append(Dropped(peer))

    def receive_dont_have(self, peer: str, cids: Iterable[Cid], now: float) -> None:
        """A peer lacks blocks: they are asked of others, and of it again only after a have."""
        state = self._peers.get(peer)
        if state is None:
            return
        for cid in cids:
            wanted = self._wanted.get(cid)
            if wanted is None:
                continue  # it came from another peer meanwhile
            state.lacks.add(cid)
            self._pool.note_lack(wanted, peer, True)
            if state.settle(cid, wanted.size):
                state.denied(wanted.size, now)
                self._release(wanted, peer)
        self._assign(now)

    def receive_lacks(self, peer: str, cids: Iterable[Cid]) -> None:
        """A peer has told what it lacks before it was asked; what it is asked for already it will deny."""
        state = self._peers.get(peer)
        if state is None:
            return
        for cid in cids:
            state.lacks.add(cid)
            if cid in self._wanted:
                self._pool.note_lack(self._wanted[cid], peer, True)

    def receive_have(self, peer: str, cids: Iterable[Cid], now: float) -> None:
        """A peer has gained blocks that it lacked."""
        state = self._peers.get(peer)
        if state is None:
            return
        for cid in cids:
            state.lacks.discard(cid)
            if cid in self._wanted:
                self._pool.note_lack(self._wanted[cid], peer, False)
        self._assign(now)

    def handle_timer(self, now: float) -> None:
        """Snub the peers whose patience has run out, and look whether somebody stalls in the tail."""
        for state in self._peers.values():
            deadline = state.deadline(self._heard_at)
            if deadline is None or deadline > now:
                continue
            cids = tuple(state.outstanding)
            self._release_all(state)
            state.snub()
            self._events += (Snubbed(state.peer, len(cids)), Withdraw(state.peer, cids))
        self._assign(now)

    # --- results -------------------------------------------------------------------------------------------------------

    def get_timer(self) -> float | None:
        """Return when :meth:`handle_timer` is due."""
        timers = [state.deadline(self._heard_at) for state in self._peers.values()]
        return min((timer for timer in (*timers, self._tail_timer) if timer is not None), default=None)

    def next_event(self) -> Event | None:
        return self._events.popleft() if self._events else None

    @property
    def missing(self) -> int:
        """How many wanted blocks are not here yet."""
        return len(self._wanted)

    @property
    def stuck(self) -> bool:
        """Whether blocks are missing and no peer of the session can be asked for any of them."""
        return bool(self._wanted) and all(len(w.lackers) == len(self._peers) for w in self._wanted.values())

    @property
    def stalled(self) -> bool:
        """Whether blocks are missing and every peer that could be asked for any of them has fallen silent."""
        talking = [state.peer for state in self._peers.values() if not state.snubbed]
        return bool(self._wanted) and all(w.lackers.issuperset(talking) for w in self._wanted.values())

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
        states = (*self._gone.values(), *self._peers.values())
        return tuple(
            PeerProgress(s.peer, s.received_bytes, s.received_blocks, len(s.outstanding), s.rate, s.snubbed) for s in states
        )

    # --- assignment ----------------------------------------------------------------------------------------------------

    def _release(self, wanted: Wanted, peer: str) -> None:
        """Note that ``peer`` is no longer asked for ``wanted``."""
        wanted.holders.remove(peer)
        if not wanted.holders:
            self._pool.add((wanted,))

    def _release_all(self, state: PeerState) -> None:
        released = [self._wanted[cid] for cid in state.outstanding]
        for wanted in released:
            wanted.holders.remove(state.peer)
        self._pool.add(wanted for wanted in released if not wanted.holders)

    def _assign(self, now: float) -> None:
        """Fill the windows, then let idle peers help in the tail."""
        asks: dict[str, list[Cid]] = {}
        ready = [state for state in self._peers.values() if state.has_room and self._pool.has_for(state.peer)]
        self._fill([state for state in ready if not state.snubbed], now, asks)
        for state in ready:
            if state.snubbed:
                self._probe(state, now, asks)
        self._help_in_tail(now, asks)
        for peer, cids in asks.items():
            self._events.append(Ask(peer, tuple(cids)))

    def _fill(self, ready: list[PeerState], now: float, asks: dict[str, list[Cid]]) -> None:
        taken: list[Wanted] = []
        talking = [state for state in self._peers.values() if not state.snubbed]
        ends = _Ends(talking, self._pool.bytes)
        for wanted in self._pool:
            if not ready:
                break
            size = wanted.size
            able = [state for state in ready if state.peer not in wanted.lackers]
            if not able:
                continue
            state = min(able, key=lambda state: state.seconds_for(size))
            if ends.too_late(state, wanted):
                if state.outstanding:  # it will be looked at again; an idle one may be the only one that has a later block
                    ready.remove(state)
                continue
            self._ask(state, wanted, now, asks)
            ends.note(size)
            taken.append(wanted)
            if state.full:
                ready.remove(state)
        for wanted in taken:
            self._pool.remove(wanted)

    def _probe(self, state: PeerState, now: float, asks: dict[str, list[Cid]]) -> None:
        """Ask a snubbed peer for one block, where others are there as well for the one that is needed last."""
        alone = all(other.snubbed for other in self._peers.values())
        order = iter(self._pool) if alone else reversed(self._pool)
        wanted = next((wanted for wanted in order if state.peer not in wanted.lackers), None)
        if wanted is not None:
            self._ask(state, wanted, now, asks)
            self._pool.remove(wanted)

    def _help_in_tail(self, now: float, asks: dict[str, list[Cid]]) -> None:
        """Once every block is asked for: let idle peers re-request from the slowest, within the budget for duplicates."""
        self._tail_timer = None
        if self._pool:
            return
        held: list[tuple[PeerState, Wanted]] | None = None
        for helper in self._peers.values():
            if helper.outstanding or helper.snubbed or not helper.rate:
                continue
            if held is None:
                held = list(self._helpable())
            due = [
                (state.helped_from(2 * wanted.size / helper.rate), index)
                for index, (state, wanted) in enumerate(held)
                if helper.peer not in wanted.lackers
            ]
            if not due:
                continue
            worth_at, index = min(due)
            if worth_at > now:
                self._tail_timer = worth_at if self._tail_timer is None else min(self._tail_timer, worth_at)
            else:
                wanted = held[index][1]
                self._second_asks += wanted.size
                self._ask(helper, wanted, now, asks)
                held = None

    def _helpable(self) -> Iterator[tuple[PeerState, Wanted]]:
        """Yield each busy peer with the last block that it will send, where the budget allows to ask another for that."""
        budget = MAX_DUPLICATE_SHARE * self._first_asks - self._second_asks
        for state in self._peers.values():
            for cid in reversed(state.outstanding):
                wanted = self._wanted[cid]
                if len(wanted.holders) == 1:
                    if wanted.size <= budget:
                        yield state, wanted
                    break

    def _ask(self, state: PeerState, wanted: Wanted, now: float, asks: dict[str, list[Cid]]) -> None:
        state.asked(wanted.want.cid, wanted.size, now)
        wanted.holders.append(state.peer)
        if not wanted.asked_before:
            wanted.asked_before = True
            self._first_asks += wanted.size
        asks.setdefault(state.peer, []).append(wanted.want.cid)


class _Ends:
    """When peers would be done, to see which blocks had better wait for a faster one. Good for one assignment."""

    def __init__(self, talking: list[PeerState], pool_bytes: int) -> None:
        self._talking = talking
        self._pool_bytes = pool_bytes
        self._outstanding = sum(state.outstanding_bytes for state in talking)
        self._pace = sum(state.pace for state in talking)

    def note(self, size: int) -> None:
        """A block of the pool is asked for now."""
        self._pool_bytes -= size
        self._outstanding += size

    def too_late(self, state: PeerState, wanted: Wanted) -> bool:
        """Return whether the others would have everything, ``wanted`` too, before ``state`` had that block alone.

        One of them at least must have it sooner, in whose turn it will be asked for.
        """
        end = state.seconds_for(wanted.size)
        others_pace = self._pace - state.pace
        others_end = (self._pool_bytes + self._outstanding - state.outstanding_bytes) / others_pace if others_pace > 0 else end
        if end <= others_end:
            return False
        return any(
            other.seconds_for(wanted.size) < end and other.peer not in wanted.lackers and other is not state
            for other in self._talking
        )
