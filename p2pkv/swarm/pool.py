"""The providers of one fetch: found by look-ups, dialled, asked what matches, kept until they leave, lie or are not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from p2pkv.artifact.match import Match
from p2pkv.errors import P2pkvError, PeerUnreachableError, ProtocolError
from p2pkv.exchange.messages import ErrorMessage, Matches, Message
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_PEERS_PER_FETCH, PEER_CONNECT_TIMEOUT_S, QUERY_TIMEOUT_S
from p2pkv.ports import PeerAddress, PeerId
from p2pkv.swarm.context import Context
from p2pkv.swarm.provider import BlockEvents, Provider

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
        self._answered: dict[PeerId, trio.Event] = {}
        self._settled = trio.Event()
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
        return len(self._met)

    def search(self, keys: Sequence[bytes], *, hopeful: int, enough: int = MAX_PEERS_PER_FETCH) -> None:
        """Look up ``keys``, the longest boundary first, and meet every provider as it is found, until there are ``enough``.

        The ``hopeful`` first ones go out at once; the others follow a moment later unless :meth:`settle` was called by then:
        a hit is mostly found at the longest boundaries, and each further look-up costs every node near its key.
        """
        for place, key in enumerate(keys):
            self._under_way += 1
            self._nursery.start_soon(self._look_up, key, enough, 0.0 if place < hopeful else _SECOND_WAVE_S)

    def settle(self) -> None:
        """The manifest is chosen: look-ups that have not begun are not worth it any more."""
        self._settled.set()

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
                    return
            async with self._context.routing.find_providers(key) as addresses:
                async for address in addresses:
                    if len(self._met) - len(self.lost) < enough:
                        self.meet(address)
        finally:
            self._finish_one()

    def meet(self, address: PeerAddress) -> None:
        """Connect to a provider, unless it was met before, is banned, or there are too many."""
        peer = address.peer_id
        if len(self._met) >= MAX_PEERS_PER_FETCH or peer in self._met:
            return
        if self._context.bans.banned(peer, trio.current_time()):
            return
        self._met.add(peer)
        self._under_way += 1
        due = max(self._next_dial, trio.current_time())
        self._next_dial = due + _DIAL_STAGGER_S
        self._nursery.start_soon(self._connect, address, due)

    async def _connect(self, address: PeerAddress, due: float) -> None:
        peer = address.peer_id
        await trio.sleep_until(due)
        try:
            with trio.fail_after(PEER_CONNECT_TIMEOUT_S):
                channel = await self._context.network.open_channel(address)
        except (PeerUnreachableError, trio.TooSlowError):
            self.lost.add(peer)
            self._finish_one()
            return
        provider = Provider(self._context, channel, self)
        answered = self._answered[peer] = trio.Event()
        if self._query_keys:
            provider.query(self._query_keys)
        else:
            answered.set()
        self._nursery.start_soon(self._run, provider)
        with trio.move_on_after(QUERY_TIMEOUT_S):
            await provider.wait_ready()
            if not provider.closed:
                self.providers[peer] = provider
                self._events.provider_joined(provider)
                await answered.wait()
        self._finish_one()

    async def _run(self, provider: Provider) -> None:
        peer = provider.peer_id
        try:
            await provider.run()
        except ProtocolError:
            self.drop(peer)
        except PeerUnreachableError:
            self.lost.add(peer)
        else:
            if peer in self.providers:  # it closed the stream, which is its right
                self.lost.add(peer)
        self.providers.pop(peer, None)
        self._answered[peer].set()
        self._events.provider_left(peer)

    def _finish_one(self) -> None:
        self._under_way -= 1
        self._events.search_changed()

    # --- what providers report -----------------------------------------------------------------------------------------

    def provider_said(self, provider: Provider, message: Message) -> None:
        match message:
            case Matches(_, matches):
                for match in matches:
                    self._events.provider_matched(provider, match)
                self._answered[provider.peer_id].set()
            case ErrorMessage():
                provider.close()
            case _:
                self._events.provider_said(provider, message)

    def provider_delivered(self, provider: Provider, blocks: Sequence[tuple[Cid, int]]) -> None:
        self._events.provider_delivered(provider, blocks)

    def provider_lied(self, provider: Provider, cid: Cid) -> None:
        self._events.provider_lied(provider, cid)

    def store_failed(self, error: P2pkvError) -> None:
        self._events.store_failed(error)
