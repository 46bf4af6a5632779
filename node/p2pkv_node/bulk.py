"""The bulk lane (``docs/spec/exchange.md``): block payloads over direct TLS 1.3 connections beside the libp2p stream.

A provider that keeps a bulk port answers a consumer's request, on their authenticated libp2p stream, with an offer: port,
one-time token, certificate fingerprint. The consumer connects to that port, compares the certificate *before* it sends the
token, and from then on both ends know each other. Greetings::

    consumer: MAGIC (8 bytes), token (32), signature (64; `bulk_greeting`)
    provider: MAGIC, then block frames (`bulk_lane`)

Who shows no valid token, or the token of another peer, gets no answer. Where ``connect`` raises or the lane closes, blocks
come over the libp2p stream: that is the caller's business.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Self

import trio
from nacl.signing import VerifyKey
from OpenSSL import SSL

from p2pkv.errors import ListenError, PeerUnreachableError
from p2pkv.limits import (
    BULK_HANDSHAKE_TIMEOUT_S,
    BULK_TOKEN_SECONDS,
    MAX_BLOCK_TIMEOUT_S,
    MAX_BULK_CONNECTIONS,
    MAX_BULK_OFFERS,
    MAX_BULK_STRANGERS,
    MAX_STREAMS_PER_PEER,
)
from p2pkv.ports import BulkOffer, BulkReceiver, BulkSender, BulkSink, BulkSource, PeerId
from p2pkv.swarm.background import open_background
from p2pkv_node.bulk_greeting import GREETING_BYTES, TOKEN_BYTES, Signer, make_greeting, takes_up, token_of
from p2pkv_node.bulk_lane import BulkCounters, BulkStatistics
from p2pkv_node.bulk_receive import LaneProcess, LaneProcesses, LaneReceiver
from p2pkv_node.bulk_send import LaneSender
from p2pkv_node.bulk_tls import TlsConnection, TlsIdentity, make_identity
from p2pkv_node.bulk_wire import MAGIC
from p2pkv_node.identity import verify_key_of

_BACKLOG: Final = 128
_MAX_PORT: Final = 65_535
# When the process has no descriptor left for a new connection, others have to end first.
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_DESCRIPTOR_PAUSE_S: Final = 0.1
# The one congestion control that every Linux has and lets everybody use.
_UNPACED: Final = b"reno"


def make_token() -> bytes:
    """Return a token that nobody guesses."""
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class BulkSettings:
    """Where to listen, and the bounds that tests shorten. ``host`` is an IP address; ``None`` keeps no bulk port."""

    host: str | None = None
    port: int = 0
    token_seconds: float = BULK_TOKEN_SECONDS
    handshake_timeout_s: float = BULK_HANDSHAKE_TIMEOUT_S
    send_timeout_s: float = MAX_BLOCK_TIMEOUT_S
    max_connections: int = MAX_BULK_CONNECTIONS
    max_strangers: int = MAX_BULK_STRANGERS


@dataclass(frozen=True, slots=True)
class _Pending:
    offer: BulkOffer
    peer_id: PeerId
    key: VerifyKey  # the peer's
    expires: float
    source: BulkSource
    want_sender: Callable[[BulkSender], None]


class TlsBulkLane:
    """All bulk lanes of a node, both as provider and as consumer (``BulkLane``).

    It works inside ``async with lane.running()``.
    ``sign`` signs with the node's own key, for providers to see who comes.
    ``clock`` gives seconds for the life of tokens, ``token_source`` 32 fresh random bytes.
    """

    def __init__(
        self,
        settings: BulkSettings | None = None,
        *,
        sign: Signer,
        clock: Callable[[], float] = trio.current_time,
        token_source: Callable[[], bytes] = make_token,
    ) -> None:
        self._settings = settings or BulkSettings()
        self._sign = sign
        self._clock = clock
        self._token_source = token_source
        self._counters = BulkCounters()
        self._pending: dict[bytes, _Pending] = {}  # by the SHA-256 of the token, so that no look-up leaks its bytes
        self._strangers: dict[trio.CancelScope, None] = {}  # those that have not greeted yet, oldest first
        self._sending: dict[TlsConnection, PeerId] = {}
        self._receiving = 0  # lanes that are open or being opened
        self._limiter = trio.CapacityLimiter(2 * self._settings.max_connections)  # a thread for each that sends, and more
        self._processes = LaneProcesses(self._start_process)
        self._identity: TlsIdentity | None = None
        self._listener: socket.socket | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def port(self) -> int | None:
        """The TCP port that is listened on; ``None`` where none is, and outside :meth:`running`."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def statistics(self) -> BulkStatistics:
        return self._counters.snapshot(sending_lanes=len(self._sending), receiving_lanes=self._receiving)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve inside the ``async with``; at its end every lane, thread and socket is closed. Raises ListenError."""
        with contextlib.ExitStack() as stack:
            if self._settings.host is not None:
                self._identity = make_identity()
                self._listener = stack.enter_context(listen(self._settings.host, self._settings.port))
            try:
                async with open_background() as self._nursery:
                    if self._identity is not None and self._listener is not None:
                        self._nursery.start_soon(self._accept, self._listener, self._identity.context)
                    yield self
            finally:
                self._nursery = self._listener = self._identity = None
                self._pending.clear()

    # --- provider --------------------------------------------------------------------------------------------------------

    def offer(self, peer_id: PeerId, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        """Make a one-time offer for this peer alone.

        ``None`` without a bulk port, when too many lanes or offers are open, and where the peer id carries no Ed25519 key.
        """
        key = verify_key_of(peer_id)
        if self._identity is None or self.port is None or key is None:
            return None
        now = self._clock()
        for expired in [token_key for token_key, pending in self._pending.items() if pending.expires <= now]:
            del self._pending[expired]
        of_peer = sum(pending.peer_id == peer_id for pending in self._pending.values())
        of_peer += sum(holder == peer_id for holder in self._sending.values())
        if (
            len(self._pending) >= MAX_BULK_OFFERS
            or len(self._sending) >= self._settings.max_connections
            or of_peer >= MAX_STREAMS_PER_PEER
        ):
            return None
        offer = BulkOffer(self.port, self._token_source(), self._identity.fingerprint)
        expires = now + self._settings.token_seconds
        self._pending[_token_key(offer.token)] = _Pending(offer, peer_id, key, expires, source, want_sender)
        return offer

    async def _accept(self, listener: socket.socket, context: SSL.Context) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(listener.fileno())
                try:
                    raw, _ = listener.accept()
                except OSError as error:  # also when the stranger has left again
                    if error.errno in _OUT_OF_DESCRIPTORS:
                        await trio.sleep(_DESCRIPTOR_PAUSE_S)
                    continue
                nursery.start_soon(self._meet, raw, context)

    async def _meet(self, raw: socket.socket, context: SSL.Context) -> None:
        """Give a stranger a little time for handshake and greeting; whose greeting is good becomes a lane."""
        try:
            connection = TlsConnection(raw, context, server_side=True)
        except PeerUnreachableError:
            self._counters.add(dropped_strangers=1)
            return
        try:
            pending = await self._greet(connection)
            if pending is not None:
                # A consumer that takes longer for a block has given it up.
                connection.make_blocking(self._settings.send_timeout_s)
                sender = LaneSender(connection, pending.source, self._counters)
                pending.want_sender(sender)
                await sender.run(self._limiter)
        finally:
            connection.close()
            self._sending.pop(connection, None)

    async def _greet(self, connection: TlsConnection) -> _Pending | None:
        with trio.move_on_after(self._settings.handshake_timeout_s) as patience:
            self._strangers[patience] = None
            if len(self._strangers) > self._settings.max_strangers:
                oldest = next(iter(self._strangers))  # it has had the most time
                del self._strangers[oldest]  # here, so that the next newcomer picks another
                oldest.cancel()
            try:
                await connection.handshake()
                pending = self._redeem(connection, await connection.receive(GREETING_BYTES))
                if pending is not None:
                    await connection.send(MAGIC)
            except PeerUnreachableError:
                self._counters.add(dropped_strangers=1)
                return None
            finally:
                self._strangers.pop(patience, None)
        if patience.cancelled_caught:
            self._counters.add(dropped_strangers=1)
            return None
        return pending

    def _redeem(self, connection: TlsConnection, greeting: bytes) -> _Pending | None:
        """Return the offer that the greeting takes up, which now counts as a lane; its token is gone after this.

        What is refused spends nothing: who has got hold of a token cannot take it from its owner.
        """
        token_key = _token_key(token_of(greeting))
        pending = self._pending.get(token_key)
        if pending is None or pending.expires <= self._clock() or not takes_up(greeting, pending.offer, pending.key):
            self._counters.add(refused_tokens=1)
            return None
        if len(self._sending) >= self._settings.max_connections:
            return None
        del self._pending[token_key]
        self._sending[connection] = pending.peer_id
        return pending

    # --- consumer --------------------------------------------------------------------------------------------------------

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        """Open the lane that ``offer`` describes; ``host`` is an IP address.

        The lane is open when this returns: the provider has taken the token. Raises PeerUnreachableError.
        """
        nursery = self._nursery
        if nursery is None or self._receiving >= self._settings.max_connections:
            raise PeerUnreachableError("no bulk lane can be opened here now")
        if not (_is_ip_address(host) and 0 < offer.port <= _MAX_PORT):
            raise PeerUnreachableError(f"no bulk lane can be at {host} port {offer.port}")
        greeting = make_greeting(offer, self._sign)
        receiver = self._processes.least_busy().open_lane(host, offer, greeting, sink, self._counters)
        self._receiving += 1
        nursery.start_soon(self._receive, receiver)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(receiver.close)
            with trio.move_on_after(self._settings.handshake_timeout_s):
                await receiver.wait_open()
            if not receiver.is_open:
                raise PeerUnreachableError(f"the bulk port of {host} did not answer in time")
            on_failure.pop_all()
        return receiver

    def prepare(self) -> None:
        """Start what receives, ahead of the first lane."""
        self._processes.prepare()

    def _start_process(self, process: LaneProcess) -> None:
        assert self._nursery is not None, "lanes are opened while it runs"
        self._nursery.start_soon(process.run, self._limiter)

    async def _receive(self, receiver: LaneReceiver) -> None:
        try:
            await receiver.run()
        finally:
            self._count_out()

    def _count_out(self) -> None:
        self._receiving -= 1


def _token_key(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket that does not block. Raises ListenError."""
    try:
        family = _family(host)
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
        )
    except (OSError, ValueError, OverflowError) as error:
        raise ListenError(f"the bulk port cannot listen on {host} port {port}: {error}") from error
    listener.setblocking(False)
    if ipaddress.ip_address(host).is_loopback and sys.platform == "linux":
        # Lanes inherit it. Where nothing lies between two processes there is no path to spare: pacing, as of BBR, is only a
        # timer for every few packets, and takes a third of the time of who receives.
        with contextlib.suppress(OSError):  # a machine that forbids the choice
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
    return listener


def _is_ip_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(_family(text))
    return False


def _family(host: str) -> socket.AddressFamily:
    """Raises ValueError for anything but an IP address."""
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
