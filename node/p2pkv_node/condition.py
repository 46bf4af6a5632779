"""What a node alone can tell of how it stands in the network and on its machine; ``p2pkv doctor`` judges it."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from p2pkv_node.bulk import TlsBulkLane
from p2pkv_node.network import parse_peer_address
from p2pkv_node.node import Node


@dataclass(frozen=True, slots=True)
class Condition:
    """``listen`` are the multiaddrs that the node was told, ``listening`` those where it really listens.

    ``bulk_port`` is ``None`` without a bulk lane. ``inbound_connections`` came from other addresses than loopback since the
    start. ``bootstrap_peers`` were named, ``bootstrap_connected`` of them are connected now. ``open_files_limit`` is ``None``
    for no limit.
    """

    pid: int
    listen: tuple[str, ...]
    listening: tuple[str, ...]
    bulk_port: int | None
    inbound_connections: int
    bootstrap_peers: int
    bootstrap_connected: int
    open_files_limit: int | None


def condition_of(node: Node) -> Condition:
    """Return the condition of ``node`` now."""
    bootstrap = {parse_peer_address(address).peer_id for address in node.config.bootstrap}
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bulk = node.context.bulk
    return Condition(
        pid=os.getpid(),
        listen=node.config.listen,
        listening=node.network.listening,
        bulk_port=bulk.port if isinstance(bulk, TlsBulkLane) else None,
        inbound_connections=node.network.inbound_connections,
        bootstrap_peers=len(bootstrap),
        bootstrap_connected=len(bootstrap.intersection(node.network.connected_peers)),
        open_files_limit=None if soft == resource.RLIM_INFINITY else soft,
    )
