"""Builds the libp2p host of a node: TCP, Noise and yamux, with py-libp2p's settings that would hurt a node switched off."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Sequence
from typing import Final

import libp2p.network.connection.swarm_connection as swarm_connection
import trio
from libp2p import new_host
from libp2p.abc import IHost, IMuxedConn, IRawConnection
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL, Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL, Yamux, YamuxStream
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr

from p2pkv.limits import CLOSE_TIMEOUT_S, DIAL_TIMEOUT_S, MAX_CONNECTIONS, MAX_STREAMS_PER_PEER
from p2pkv_node.identity import key_pair_from_seed

logger = logging.getLogger(__name__)

# One count of connections is enough: that of the resource manager below.
_NO_CAP: Final = 1_000_000_000


class _Demote(logging.Handler):
    """Repeats py-libp2p's records as debug records of ours: its warnings report peers that came and went."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.debug("%s: %s", record.name, record.getMessage())


_return_credit = YamuxStream._auto_tune_and_send_window_update


async def _return_credit_in_halves(stream: YamuxStream, *, bytes_read: int = 0) -> None:
    """Give a peer window back when half of it is used up, as yamux's specification advises.

    The library answers every read with a frame of its own, encrypted and sent by itself, and reads the negotiation of each
    stream byte by byte: opening one costs dozens of them. What is not given back now is part of what is owed later.
    """
    waiting = len(stream.conn.stream_buffers.get(stream.stream_id, b""))
    owed = stream.target_recv_window - (stream.recv_window + waiting)
    if owed >= stream._grow_threshold():
        await _return_credit(stream, bytes_read=bytes_read)


_read = YamuxStream.read


async def _read_and_leave_nothing(stream: YamuxStream, n: int | None = -1) -> bytes:
    """Read, and take away what the library puts back for a stream that ended while somebody waited for its data.

    Otherwise each stream, and so each question to a DHT peer, would leave an entry behind for as long as its connection lasts.
    """
    try:
        return await _read(stream, n)
    finally:
        if stream.stream_id not in stream.conn.streams:
            stream.conn.stream_events.pop(stream.stream_id, None)


class _NoAutoConnector(AutoConnector):
    """Does not dial every peer that the node ever heard of until it has 128 connections; no setting says so."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()


class InboundConnections:
    """Ends the library's task for a connection that it accepted when the connection ends, and not when the node does.

    Otherwise each connection in the lifetime of a node would leave a task, a socket object and a slot behind. ``remote``
    counts those from other addresses than loopback.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._upgrade = swarm.upgrade_inbound_raw_conn
        self.remote = 0

    async def upgrade(self, raw_conn: IRawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Stand in for the swarm's method; its caller lets the connection go after an error, and otherwise never."""
        connection = await self._upgrade(raw_conn, maddr)
        assert isinstance(connection, Yamux)
        self.remote += _is_remote(raw_conn.get_remote_address())
        await connection.event_closed.wait()
        raise SwarmException("the connection has ended")


def quiet_logging() -> None:
    """Send py-libp2p's log to the debug level of this module, unless ``LIBP2P_DEBUG`` asks for it. May be called again."""
    # This module of py-libp2p logs through the root logger, whose functions configure logging for the whole process.
    swarm_connection.logging = logging.getLogger("libp2p.network.connection")  # type: ignore[assignment, attr-defined] # see above: a logger has the functions that it calls
    if os.environ.get("LIBP2P_DEBUG"):
        return
    library = logging.getLogger("libp2p")
    library.propagate = False
    if not any(isinstance(handler, _Demote) for handler in library.handlers):
        library.addHandler(_Demote())


def build_host(seed: bytes, *, announce: Sequence[Multiaddr] = ()) -> IHost:
    """Return a host that does not listen yet. ``announce`` replaces the addresses that others are told, where given."""
    quiet_logging()
    YamuxStream._auto_tune_and_send_window_update = _return_credit_in_halves  # type: ignore[assignment]  # see there
    YamuxStream.read = _read_and_leave_nothing  # type: ignore[assignment]  # see there
    key_pair = key_pair_from_seed(seed)
    host = new_host(
        key_pair=key_pair,
        sec_opt={NOISE_PROTOCOL: NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_PROTOCOL): Yamux},
        connection_config=ConnectionConfig(
            max_connections=_NO_CAP,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            dial_timeout=DIAL_TIMEOUT_S,
            outbound_upgrade_timeout=DIAL_TIMEOUT_S,
            connection_close_timeout=CLOSE_TIMEOUT_S,
        ),
        resource_manager=ResourceManager(
            limits=ResourceLimits(max_connections=2 * MAX_CONNECTIONS, max_streams=2 * MAX_CONNECTIONS * MAX_STREAMS_PER_PEER),
            enable_metrics=False,
            # Five refused connections would make it refuse all connections for a minute.
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
        ),
        # Addresses that peers claim to see are not to be trusted; an operator behind a NAT names the address.
        disable_identify_address_discovery=True,
        addrs_factory=lambda listening: list(announce) or _concrete(listening),
    )
    swarm = swarm_of(host)
    swarm.auto_connector = _NoAutoConnector(swarm)
    swarm.upgrade_inbound_raw_conn = InboundConnections(swarm).upgrade  # type: ignore[method-assign]  # see there
    # A dial is one attempt per address; who dials decides whether to try again.
    swarm.retry_config = RetryConfig(max_retries=0)
    return host


def swarm_of(host: IHost) -> Swarm:
    """Return the host's swarm, which has the calls that its interface class does not declare."""
    swarm = host.get_network()
    assert isinstance(swarm, Swarm)
    return swarm


def inbound_of(host: IHost) -> InboundConnections:
    """Return what :func:`build_host` put in front of the swarm's own way to accept a connection."""
    inbound = getattr(swarm_of(host).upgrade_inbound_raw_conn, "__self__", None)
    assert isinstance(inbound, InboundConnections)
    return inbound


def _is_remote(address: tuple[str, int] | None) -> bool:
    """Return whether a connection from ``address`` (host and port) came over a network; ``None``: it is gone already."""
    if address is None:
        return False
    found = ipaddress.ip_address(address[0].partition("%")[0])
    return not (getattr(found, "ipv4_mapped", None) or found).is_loopback


def _concrete(listening: Sequence[Multiaddr]) -> list[Multiaddr]:
    """Return the addresses with 0.0.0.0 and :: replaced by those of the network interfaces."""
    concrete: list[Multiaddr] = []
    for address in listening:
        wildcard = str(address).startswith(("/ip4/0.0.0.0/", "/ip6/::/"))
        concrete.extend(expand_wildcard_address(address) if wildcard else [address])
    return list(dict.fromkeys(concrete))
