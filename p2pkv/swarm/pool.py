"""The providers of one fetch: found by look-ups, dialled, asked what matches, kept until they leave, lie or are not needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import trio

from p2pkv.artifact.match import Match
from p2pkv.errors import P2pkvError, PeerUnreachableError, ProtocolError
from p2pkv.exchange.messages import DontHave, ErrorMessage, Matches, Message
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_PEERS_PER_FETCH, PEER_CONNECT_TIMEOUT_S, QUERY_TIMEOUT_S
from p2pkv.ports import PeerAddress, PeerId
from p2pkv.swarm.context import Context
from p2pkv.swarm.provider import BlockEvents, Provider
from p2pkv.units import MIB

# So many of the peers that are connected anyway are asked before anybody is looked up, each at the cost of a stream.
_MAX_GREETED = 4
# The others are asked when the first has nothing or is silent, or so much later: they could only slow its first block down,
# which on a LAN is here by then.
_HEAD_START_S = 0.025
# While the first alone brings more than the links of most machines, and the rest within moments, the others are not asked: one
# sender keeps a consumer busy then, and each of them would cost both sides a stream, a lane and their handshakes.
_ENOUGH_BYTES_PER_S = 400 * MIB
_SOON_S = 0.5
# One that has answered by the end of its head start is looked at again, so often at most, until it brings enough: its first
# bytes say little, and on a busy machine neither does one moment. A gigabit link is known for one at the third look.
_EARLY_LOOKS = 4
_GIGABIT_BYTES_PER_S = 125 * MIB
# And later this often, each time at what came since the look before the last: one that slows down or stalls is alone for no
# longer than two of these.
_LOOK_S = 0.1
# Answers are here by then on a LAN; a look-up that is needed nevertheless begins this much later.
_GREETING_S = 0.03
# One that does not answer by then is let go: nobody said that it has anything, and a miss does not wait for it.
_GREETED_PATIENCE_S = 0.5
# A look-up answers within some 20 ms on a LAN; a miss is told this much later.
_SECOND_WAVE_S = 0.05
# Providers that are found together are dialled so far apart: each dial is work for both sides, and the first block is here
# sooner when the first provider does not share the processor with the dials of the others.
_DIAL_STAGGER_S = 0.01


class PoolEvents(BlockEvents, Protocol):
    """What a fetch wants to know of its providers, beside their blocks. All calls come from the event loop."""

    def provider_joined(self, provider: Provider) -> None:
        """The provider said hello and may be asked for blocks."""

    def provider_left(self, peer: PeerId) -> None:
        """The provider is gone, for whatever reason."""

    def provider_matched(self, provider: Provider, match: Match) -> None:
        """The provider offers a manifest."""

    def provider_said(self, provider: Provider, message: Message) -> None:
        """Another message: don't-have or have."""

    def missing_bytes(self) -> int:
        """Return the bytes that are known to be missing."""

    def search_changed(self) -> None:
        """A look-up, dial or query came to its end."""


class ProviderPool:
    """Runs in ``nursery``. ``query_keys`` are asked of every provider; empty where the manifest is known already."""

    def __init__(self, context: Context, nursery: trio.Nursery, events: PoolEvents, query_keys: Sequence[bytes]) -> None:
        self._context = context
        self._nursery = nursery
        self._events = events
        self._query_keys = query_keys
        self._met: set[PeerId] = set()
        self._under_way = 0
        self._next_dial = 0.0
        self._answered: dict[Provider, trio.Event] = {}  # by all that run and were not let go
        self._settled = trio.Event()
        self._left_out: list[bytes] = []
        self._first_is_out = trio.Event()  # of those greeted: it has nothing, or is gone
        self._received = 0  # bytes, of all providers
        self._greeted: set[PeerId] = set()  # of those met, who were only greeted and have shown nothing yet
        self._named: dict[PeerId, PeerAddress] = {}  # of those greeted, who were found meanwhile
        self.providers: dict[PeerId, Provider] = {}
        self.lost: set[PeerId] = set()
        self.dropped: list[PeerId] = []

    @property
    def searching(self) -> bool:
        """Whether look-ups, dials or queries are under way."""
        return self._under_way > 0

    @property
    def found(self) -> int:
        """How many providers were found so far, reachable or not."""
        return len(self._met) - len(self._greeted)

    def greet(self) -> None:
        """Ask peers that are connected already, those first that blocks came from; who has nothing is let go again."""
        connected = self._context.network.connected_peers
        known = [peer for peer in reversed(self._context.sources) if peer in connected]
        now = trio.current_time()
        welcome = (peer for peer in dict.fromkeys((*known, *connected)) if not self._context.bans.banned(peer, now))
        peers = list(itertools.islice(welcome, _MAX_GREETED))
        self._greet(peers[:1])
        if peers[1:]:
            self._under_way += 1
            self._nursery.start_soon(self._greet_later, peers[1:])

    def _greet(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            if self.meet(PeerAddress(peer), stagger=0.0):
                self._greeted.add(peer)

    async def _greet_later(self, peers: Sequence[PeerId]) -> None:
        rate = await self._early_rate()
        enough = rate >= _ENOUGH_BYTES_PER_S
        while enough:
            before, rate = rate, await self._watch_first(_LOOK_S)
            both = (before + rate) / 2
            enough = both >= _ENOUGH_BYTES_PER_S and self._events.missing_bytes() <= _SOON_S * both
        self._greet(peers)
        self._finish_one()

    async def _early_rate(self) -> float:
        """Look at the first until it brings enough, or clearly does not; return the bytes per second of the last look."""
        rate = 0.0
        for look in range(_EARLY_LOOKS):
            rate = await self._watch_first(_HEAD_START_S)
            silent = not self._received and (look > 0 or not self.providers)
            slow = look > 1 and rate < _GIGABIT_BYTES_PER_S
            if rate >= _ENOUGH_BYTES_PER_S or self._first_is_out.is_set() or silent or slow:
                break
        return rate

    async def _watch_first(self, seconds: float) -> float:
        """Wait so long and return the bytes per second that came meanwhile; once the first is out return 0 at once."""
        before = self._received
        with trio.move_on_after(seconds) as watch:
            await self._first_is_out.wait()
        return (self._received - before) / seconds if watch.cancelled_caught else 0.0

    def search(self, keys: Sequence[bytes], *, hopeful: int, enough: int = MAX_PEERS_PER_FETCH) -> None:
        """Look up ``keys``, the longest boundary first, and meet every provider as it is found, until there are ``enough``.

        Peers that were greeted just now may answer first. Then the ``hopeful`` keys go out, and the others a moment later: a
        hit is mostly found at the longest boundaries, and each look-up costs every node near its key. Those that have not
        begun when :meth:`settle` is called do not, unless :meth:`resume` is.
        """
        first = _GREETING_S if self._greeted and not self._settled.is_set() else 0.0
        for place, key in enumerate(keys):
            self._under_way += 1
            self._nursery.start_soon(self._look_up, key, enough, first if place < hopeful else first + _SECOND_WAVE_S)

    def settle(self) -> None:
        """The manifest is chosen: look-ups that have not begun are not worth it any more, and lanes will be needed."""
        self._settled.set()
        for provider in self.providers.values():
            provider.request_lane()

    def resume(self) -> None:
        """The manifest was refused: look-ups that were left out for it begin after all."""
        if self._settled.is_set():
            self._settled = trio.Event()
            keys, self._left_out = self._left_out, []
            self.search(keys, hopeful=len(keys))

    def ban(self, peer: PeerId) -> None:
        """End a provider that lied, and refuse it for a while."""
        self._context.bans.ban(peer, trio.current_time())
        self.drop(peer)

    def drop(self, peer: PeerId) -> None:
        """End a provider that broke the rules; another fetch may try it again."""
        self.dropped.append(peer)
        if peer in self.providers:
            self.providers.pop(peer).close()

    async def _look_up(self, key: bytes, enough: int, delay_s: float) -> None:
        try:
            if delay_s:
                with trio.move_on_after(delay_s):
                    await self._settled.wait()
                if self._settled.is_set():
                    self._left_out.append(key)
                    return
            async with self._context.routing.find_providers(key) as addresses:
                async for address in addresses:
                    if len(self._met) - len(self.lost) < enough:
                        self.meet(address)
        finally:
            self._finish_one()

    def meet(self, address: PeerAddress, *, stagger: float = _DIAL_STAGGER_S) -> bool:
        """Connect to a provider, unless it was met before, is banned, or there are too many; return whether it is done."""
        peer = address.peer_id
        if peer in self._greeted:
            self._named[peer] = address
        if len(self._met) >= MAX_PEERS_PER_FETCH or peer in self._met:
            return False
        if self._context.bans.banned(peer, trio.current_time()):
            return False
        self._met.add(peer)
        self._under_way += 1
        due = max(self._next_dial, trio.current_time())
        self._next_dial = due + stagger
        self._nursery.start_soon(self._connect, address, due)
        return True

    async def _connect(self, address: PeerAddress, due: float) -> None:
        peer = address.peer_id
        await trio.sleep_until(due)
        greeted = peer in self._greeted
        try:
            with trio.fail_after(_GREETED_PATIENCE_S if greeted else PEER_CONNECT_TIMEOUT_S):
                channel = await self._context.network.open_channel(address)
        except (PeerUnreachableError, trio.TooSlowError):
            self._lose(peer)
            self._finish_one()
            return
        provider = Provider(self._context, channel, self)
        if peer not in self._greeted or self._settled.is_set():
            provider.request_lane()
        answered = self._answered[provider] = trio.Event()
        if self._query_keys:
            provider.query(self._query_keys)
        else:
            answered.set()
        self._nursery.start_soon(self._run, provider)
        with trio.move_on_after(_GREETED_PATIENCE_S if greeted else QUERY_TIMEOUT_S) as patience:
            await provider.wait_ready()
            if not provider.closed:
                self.providers[peer] = provider
                self._events.provider_joined(provider)
                await answered.wait()
        if patience.cancelled_caught and peer in self._greeted:
            self._let_go(provider)
        self._finish_one()

    async def _run(self, provider: Provider) -> None:
        peer = provider.peer_id
        failure: P2pkvError | None = None
        try:
            await provider.run()
        except (ProtocolError, PeerUnreachableError) as error:
            failure = error
        self._first_is_out.set()
        answered = self._answered.pop(provider, None)
        if answered is None:
            return  # it was let go, and may have been met anew
        if isinstance(failure, ProtocolError):
            self.drop(peer)
        elif failure is not None or peer in self.providers:  # it closed the stream, which is its right
            self._lose(peer)
        self.providers.pop(peer, None)
        answered.set()
        self._events.provider_left(peer)

    def _lose(self, peer: PeerId) -> None:
        if peer in self._greeted:
            self._forget(peer)
        else:
            self.lost.add(peer)

    def _let_go(self, provider: Provider) -> None:
        """End one that was only greeted and has nothing."""
        self.providers.pop(provider.peer_id, None)
        self._answered.pop(provider).set()
        provider.close()
        self._events.provider_left(provider.peer_id)  # not once its stream is closed: until then it would be asked for blocks
        self._forget(provider.peer_id)

    def _forget(self, peer: PeerId) -> None:
        """Nothing is lost of one that was only greeted: whoever finds it meets it anew."""
        self._first_is_out.set()
        self._greeted.discard(peer)
        self._met.discard(peer)
        if peer in self._named:
            self.meet(self._named.pop(peer))

    def _finish_one(self) -> None:
        self._under_way -= 1
        self._events.search_changed()

    # --- what providers report -----------------------------------------------------------------------------------------

    def provider_said(self, provider: Provider, message: Message) -> None:
        if provider not in self._answered:
            return  # it was let go
        match message:
            case Matches(_, matches):
                for match in matches:
                    self._greeted.discard(provider.peer_id)
                    self._events.provider_matched(provider, match)
                self._answered[provider].set()
                if provider.peer_id in self._greeted:
                    self._let_go(provider)
            case DontHave() if provider.peer_id in self._greeted:
                self._let_go(provider)
            case ErrorMessage():
                provider.close()
            case _:
                self._events.provider_said(provider, message)

    def provider_delivered(self, provider: Provider, blocks: Sequence[tuple[Cid, int]]) -> None:
        self._greeted.discard(provider.peer_id)
        self._context.note_source(provider.peer_id)
        self._received += sum(size for _, size in blocks)
        self._events.provider_delivered(provider, blocks)

    def provider_lied(self, provider: Provider, cid: Cid) -> None:
        self._events.provider_lied(provider, cid)

    def store_failed(self, error: P2pkvError) -> None:
        self._events.store_failed(error)
