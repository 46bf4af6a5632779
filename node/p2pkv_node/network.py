"""The port :class:`p2pkv.ports.Network` over libp2p: TCP, Noise and yamux, protocol ``/p2pkv/exchange/1.0.0``."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Final

import trio
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from multiaddr import Multiaddr
from trio_typing import TaskStatus

from p2pkv.errors import ListenError, P2pkvError, PeerUnreachableError, UsageError
from p2pkv.limits import (
    CLOSE_TIMEOUT_S,
    DIAL_STAGGER_S,
    DIAL_TIMEOUT_S,
    MAX_ADDRESSES_PER_PEER,
    MAX_STREAMS_PER_PEER,
    SHUTDOWN_GRACE_S,
)
from p2pkv.ports import Channel, PeerAddress, PeerId
from p2pkv.units import HOUR
from p2pkv_node.channel import Libp2pChannel
from p2pkv_node.detached import Detached
from p2pkv_node.libp2p_errors import translated
from p2pkv_node.libp2p_host import build_host, inbound_of, swarm_of

logger = logging.getLogger(__name__)

EXCHANGE_PROTOCOL: Final = TProtocol("/p2pkv/exchange/1.0.0")


class Libp2pNetwork:
    """A listening node; :func:`open_network` makes it. All its methods belong to one trio run."""

    def __init__(self, host: IHost, detached: Detached) -> None:
        self.host = host
        self.detached = detached
        self._swarm = swarm_of(host)
        self._inbound = inbound_of(host)
        self._handler: Callable[[Channel], Awaitable[None]] | None = None
        self._dialling: dict[ID, trio.Lock] = {}
        self._serving: Counter[PeerId] = Counter()

    @property
    def peer_id(self) -> PeerId:
        return self.host.get_id().to_base58()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The full multiaddrs at which others reach this node: ``/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...``."""
        return tuple(str(address) for address in self.host.get_addrs())

    @property
    def listening(self) -> tuple[str, ...]:
        """The multiaddrs at which this node listens, whatever it tells others."""
        return tuple(str(address) for listener in self._swarm.listeners.values() for address in listener.get_addrs())

    @property
    def inbound_connections(self) -> int:
        """Connections since the start that came from other addresses than loopback."""
        return self._inbound.remote

    @property
    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(peer.to_base58() for peer in self.host.get_connected_peers())

    def set_channel_handler(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        self._handler = handler

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return the multiaddrs that are known of a peer, without its id; none where nothing is known."""
        try:
            with translated(f"looking up the addresses of {peer}"):
                known = self.host.get_peerstore().addrs(parse_peer_id(peer))
        except P2pkvError:
            return ()
        return tuple(dict.fromkeys(without_peer_id(str(address)) for address in known))

    async def connect(self, address: str) -> PeerAddress:
        """Connect to ``address``, a multiaddr that ends in ``/p2p/<peer id>``, and say who is there.

        Raises UsageError for anything else, PeerUnreachableError after DIAL_TIMEOUT_S.
        """
        peer = parse_peer_address(address)
        peer_id = parse_peer_id(peer.peer_id)
        self.learn(peer)
        await self.detached.run(partial(self._connect, peer_id), doing=f"dialling {address}", timeout=DIAL_TIMEOUT_S)
        return peer

    async def open_channel(self, peer: PeerAddress) -> Channel:
        self.learn(peer)
        stream = await self.open_stream(parse_peer_id(peer.peer_id), EXCHANGE_PROTOCOL)
        return self._channel(stream)

    def learn(self, peer: PeerAddress) -> None:
        """Remember where ``peer`` may be dialled. Addresses that cannot be read are left out."""
        addresses: list[Multiaddr] = []
        for text in peer.addresses[:MAX_ADDRESSES_PER_PEER]:
            try:
                with translated("reading an address"):
                    addresses.append(Multiaddr(text))
            except UsageError:
                logger.debug("%s has an address that cannot be read: %r", peer.peer_id, text)
        if addresses:
            self.host.get_peerstore().add_addrs(parse_peer_id(peer.peer_id), addresses, HOUR)

    async def open_stream(self, peer_id: ID, protocol: TProtocol) -> INetStream:
        """Open a stream, dialling where needed. Raises PeerUnreachableError after DIAL_TIMEOUT_S."""

        async def call() -> INetStream:
            await self._connect(peer_id)
            return await self.host.new_stream(peer_id, [protocol])

        return await self.detached.run(
            call, doing=f"opening a stream to {peer_id}", timeout=DIAL_TIMEOUT_S, discard=lambda stream: stream.reset()
        )

    async def _connect(self, peer_id: ID) -> None:
        """Have a connection to ``peer_id``; the dials of one peer wait for one another."""
        if peer_id == self.host.get_id():
            raise PeerUnreachableError("A node does not dial itself.")
        async with self._dialling.setdefault(peer_id, trio.Lock()):
            try:
                if not any(not connection.is_closed for connection in self._swarm.get_connections(peer_id)):
                    await self._dial(peer_id)
            finally:
                if not self._dialling[peer_id].statistics().tasks_waiting:
                    del self._dialling[peer_id]

    async def _dial(self, peer_id: ID) -> None:
        """Try the known addresses, each a little after the one before, and keep the first connection.

        The swarm's own dialling takes one TCP address of each peer, and none for a minute after a failure.
        """
        with translated(f"dialling {peer_id}"):
            # The library stores the same address with and without the peer id.
            known = (without_peer_id(str(address)) for address in self.host.get_peerstore().addrs(peer_id))
        failures: list[P2pkvError] = []
        connected = False

        async with trio.open_nursery() as nursery:

            async def attempt(address: str, failed: trio.Event) -> None:
                nonlocal connected
                try:
                    with translated(f"dialling {address}"):
                        await self._swarm.dial_addr(Multiaddr(address), peer_id)
                except P2pkvError as error:
                    failures.append(error)
                    failed.set()
                else:
                    connected = True
                    nursery.cancel_scope.cancel()

            for address in list(dict.fromkeys(known))[:MAX_ADDRESSES_PER_PEER]:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(DIAL_STAGGER_S):
                    await failed.wait()
        if not connected:
            reason = failures[-1].message if failures else "no address is known"
            raise PeerUnreachableError(f"{peer_id} cannot be dialled: {reason}")

    def _channel(self, stream: INetStream) -> Libp2pChannel:
        assert isinstance(stream, NetStream)
        assert isinstance(stream.muxed_stream, YamuxStream)
        return Libp2pChannel(stream, stream.muxed_stream, stream.muxed_conn.peer_id.to_base58(), self.detached)

    async def accept(self, stream: INetStream) -> None:
        """Serve one stream that a peer opened; raises nothing, because libp2p ends the whole node over a handler's error."""
        peer_id = stream.muxed_conn.peer_id.to_base58()
        if self._handler is None or self._serving[peer_id] >= MAX_STREAMS_PER_PEER:
            logger.info("refused a stream of %s: %s", peer_id, "too many of them" if self._handler else "not serving yet")
            await stream.reset()
            return
        self._serving[peer_id] += 1
        channel = self._channel(stream)
        try:
            await self._handler(channel)
        except P2pkvError as error:
            logger.info("the channel of %s ends: %s", peer_id, error)
        except Exception:
            logger.exception("the handler of a channel of %s failed", peer_id)
        finally:
            self._serving[peer_id] -= 1
            if not self._serving[peer_id]:
                del self._serving[peer_id]
            await channel.aclose()


def without_peer_id(address: str) -> str:
    return address.partition("/p2p/")[0]


@lru_cache(maxsize=1024)
def parse_peer_id(text: PeerId) -> ID:
    """Return libp2p's form of a peer id. Raises UsageError."""
    try:
        return ID.from_base58(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a peer id.") from error


def parse_peer_address(text: str) -> PeerAddress:
    """Split ``/ip4/../tcp/../p2p/<peer id>``. Raises UsageError."""
    transport, found, peer_id = text.rpartition("/p2p/")
    if not found or not transport:
        raise UsageError(
            f"{text!r} does not end in /p2p/<peer id>.", advice="Copy the whole address that the other node printed."
        )
    parse_peer_id(peer_id)
    with translated(f"reading {text!r}"):
        Multiaddr(transport)
    return PeerAddress(peer_id, (transport,))


@asynccontextmanager
async def open_network(seed: bytes, listen: Sequence[str], *, announce: Sequence[str] = ()) -> AsyncIterator[Libp2pNetwork]:
    """Run a node and yield it when it listens; port 0 takes a free one. Leaving takes at most SHUTDOWN_GRACE_S.

    ``seed`` is 32 secret bytes, ``listen`` and ``announce`` are multiaddrs without ``/p2p/``; ``announce`` replaces the
    addresses that others are told. Raises ListenError, UsageError, KeyFileError.
    """
    with translated("reading the listen addresses"):
        listening = [Multiaddr(text) for text in listen]
        announced = [Multiaddr(text) for text in announce]
    for address in listening:
        await _check_free(address)
    host = build_host(seed, announce=announced)
    stop = trio.Event()
    failure: Exception | None = None

    async def run_host(task_status: TaskStatus[Libp2pNetwork | ListenError]) -> None:
        # Shielded: the host is taken down in order, not cut off, also when the program is being cancelled.
        with trio.CancelScope(shield=True) as scope:
            async with host.run(listening):
                async with trio.open_nursery() as calls:
                    if len(swarm_of(host).listeners) < len({str(address) for address in listening}):
                        task_status.started(ListenError(f"Cannot listen on {', '.join(listen)}."))
                    else:
                        network = Libp2pNetwork(host, Detached(calls))
                        host.set_stream_handler(EXCHANGE_PROTOCOL, network.accept)
                        task_status.started(network)
                        await stop.wait()
                        scope.deadline = trio.current_time() + SHUTDOWN_GRACE_S
                        # First the calls, so that no new connection comes up while the others are closed.
                        network.detached.close()
                await _close_connections(swarm_of(host))
                await host.close()

    async with trio.open_nursery() as nursery:
        started = await nursery.start(run_host)
        # An error of the body is carried around the nursery, which would wrap it in a group.
        if isinstance(started, ListenError):
            failure = started
        else:
            try:
                yield started
            except Exception as error:
                failure = error
            finally:
                stop.set()
    if failure is not None:
        raise failure


async def _check_free(address: Multiaddr) -> None:
    """Raise ListenError when somebody listens there: libp2p sets SO_REUSEPORT, with which two nodes would share a port."""
    with translated(f"reading {address}"):
        parts = {protocol.name: address.value_for_protocol(protocol.code) for protocol in address.protocols()}
    if "tcp" not in parts or not ("ip4" in parts or "ip6" in parts):
        raise ListenError(f"{address} is not of the form /ip4/<address>/tcp/<port>.")
    family = trio.socket.AF_INET if "ip4" in parts else trio.socket.AF_INET6
    with trio.socket.socket(family, trio.socket.SOCK_STREAM) as probe:
        probe.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
        try:
            await probe.bind((parts.get("ip4") or parts["ip6"], int(parts["tcp"] or 0)))
        except OSError as error:
            reason = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror
            raise ListenError(f"Cannot listen on {address}: {reason}.") from error


async def _close_connections(swarm: Swarm) -> None:
    """Close all connections at once, within CLOSE_TIMEOUT_S; the library closes them one after another, 0.2 s each."""
    connections = swarm.get_connections()
    with trio.move_on_after(CLOSE_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for connection in connections:
                nursery.start_soon(connection.close)
    for connection in connections:
        # A connection that the library itself was closing, because its peer left too, is not waited for: its socket is.
        assert isinstance(connection.muxed_conn, Yamux)
        await connection.muxed_conn.secured_conn.close()
