"""The bulk lane (``docs/spec/exchange.md``): block payloads over direct TLS 1.3 connections beside the libp2p stream.

A provider that keeps a bulk port answers a consumer's request, on their authenticated libp2p stream, with an offer: port,
one-time token, certificate fingerprint. The consumer connects to that port, compares the certificate *before* it sends the
token, and from then on both ends know each other. Greetings::

    consumer: MAGIC (8 bytes), token (32 bytes)        provider: MAGIC, then block frames (`bulk_lane`)

A stranger with no valid token gets no answer. Where ``connect`` raises or the lane closes, blocks come over the libp2p
stream: that is the caller's business.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Self

import trio

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
from p2pkv_node.bulk_lane import BulkCounters, BulkStatistics
from p2pkv_node.bulk_receive import LaneReader, LaneReaders, LaneReceiver
from p2pkv_node.bulk_send import LaneSender
from p2pkv_node.bulk_tls import TlsConnection, TlsIdentity, client_context, make_identity

MAGIC: Final = b"p2pkvBL1"
TOKEN_BYTES: Final = 32
_BACKLOG: Final = 128
# When the process has no descriptor left for a new connection, others have to end first.
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_DESCRIPTOR_PAUSE_S: Final = 0.1


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
    peer_id: PeerId
    expires: float
    source: BulkSource
    want_sender: Callable[[BulkSender], None]


class TlsBulkLane:
    """All bulk lanes of a node, both as provider and as consumer (``BulkLane``).

    It works inside ``async with lane.running()``.
    ``clock`` gives seconds for the life of tokens, ``token_source`` 32 fresh random bytes.
    """

    def __init__(
        self,
        settings: BulkSettings | None = None,
        *,
        clock: Callable[[], float] = trio.current_time,
        token_source: Callable[[], bytes] = make_token,
    ) -> None:
        self._settings = settings or BulkSettings()
        self._clock = clock
        self._token_source = token_source
        self._counters = BulkCounters()
        self._pending: dict[bytes, _Pending] = {}  # by the SHA-256 of the token, so that no look-up leaks its bytes
        self._strangers: dict[trio.CancelScope, None] = {}  # those that have not shown a token yet, oldest first
        self._sending: dict[TlsConnection, PeerId] = {}
        self._receiving = 0  # lanes that are open or being opened
        self._limiter = trio.CapacityLimiter(2 * self._settings.max_connections)  # a thread for each that sends, and more
        self._readers = LaneReaders(self._start_reader)
        self._client_context = client_context()
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
                self._listener = stack.enter_context(_listen(self._settings.host, self._settings.port))
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
        """Make a one-time offer; ``None`` without a bulk port, and when too many lanes or offers are open."""
        if self._identity is None or self.port is None:
            return None
        now = self._clock()
        for key in [key for key, pending in self._pending.items() if pending.expires <= now]:
            del self._pending[key]
        of_peer = sum(pending.peer_id == peer_id for pending in self._pending.values())
        of_peer += sum(holder == peer_id for holder in self._sending.values())
        if (
            len(self._pending) >= MAX_BULK_OFFERS
            or len(self._sending) >= self._settings.max_connections
            or of_peer >= MAX_STREAMS_PER_PEER
        ):
            return None
        token = self._token_source()
        self._pending[_token_key(token)] = _Pending(peer_id, now + self._settings.token_seconds, source, want_sender)
        return BulkOffer(self.port, token, self._identity.fingerprint)

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
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

    async def _meet(self, raw: socket.socket, context: ssl.SSLContext) -> None:
        """Give a stranger a little time for handshake and token; the bearer of a good token becomes a lane."""
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
                pending = self._redeem(connection, await connection.receive(len(MAGIC) + TOKEN_BYTES))
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
        """Return the offer that the greeting's token stands for, which now counts as a lane; a token is gone after this."""
        magic, token = greeting[: len(MAGIC)], greeting[len(MAGIC) :]
        pending = self._pending.pop(_token_key(token), None)
        if magic != MAGIC or pending is None or pending.expires <= self._clock():
            self._counters.add(refused_tokens=1)
            return None
        if len(self._sending) >= self._settings.max_connections:
            return None
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
        with contextlib.ExitStack() as on_failure:
            self._receiving += 1
            on_failure.callback(self._count_out)
            with trio.move_on_after(self._settings.handshake_timeout_s) as patience:
                connection = TlsConnection(await _dial(host, offer.port), self._client_context, server_side=False)
                on_failure.callback(connection.close)
                await self._introduce(connection, offer)
            if patience.cancelled_caught:
                raise PeerUnreachableError(f"the bulk port of {host} did not answer in time")
            on_failure.pop_all()
        receiver = LaneReceiver(connection, sink, self._counters)
        nursery.start_soon(self._receive, receiver)
        return receiver

    async def _introduce(self, connection: TlsConnection, offer: BulkOffer) -> None:
        await connection.handshake()
        if not hmac.compare_digest(connection.peer_fingerprint(), offer.fingerprint):
            self._counters.add(refused_certificates=1)
            raise PeerUnreachableError("somebody else answers at the bulk port: its certificate is not the one of the offer")
        await connection.send(MAGIC + offer.token)
        if await connection.receive(len(MAGIC)) != MAGIC:
            raise PeerUnreachableError("the bulk port speaks another protocol")

    def _start_reader(self, reader: LaneReader) -> None:
        assert self._nursery is not None, "lanes are opened while it runs"
        self._nursery.start_soon(reader.run, self._limiter)

    async def _receive(self, receiver: LaneReceiver) -> None:
        try:
            await receiver.run(self._readers)
        finally:
            self._count_out()

    def _count_out(self) -> None:
        self._receiving -= 1


def _token_key(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket that does not block. Raises ListenError."""
    try:
        family = _family(host)
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
        )
    except (OSError, ValueError, OverflowError) as error:
        raise ListenError(f"the bulk port cannot listen on {host} port {port}: {error}") from error
    listener.setblocking(False)
    return listener


async def _dial(host: str, port: int) -> socket.socket:
    """Return a connected socket. Raises PeerUnreachableError."""
    try:
        raw = socket.socket(_family(host), socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise PeerUnreachableError(f"no bulk lane to {host}: {error}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(raw.close)
        raw.setblocking(False)
        try:
            await trio.socket.from_stdlib_socket(raw).connect((host, port))
        except (OSError, OverflowError) as error:
            raise PeerUnreachableError(f"the bulk port {port} of {host} cannot be reached: {error}") from error
        stack.pop_all()
        return raw


def _family(host: str) -> socket.AddressFamily:
    """Raises ValueError for anything but an IP address."""
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
