"""The peers that a node knows, as its operator sees them: one row for each."""

from __future__ import annotations

import time
from typing import Any

import trio

from p2pkv.ports import PeerId
from p2pkv_node.node import Node


def peer_rows(node: Node) -> list[dict[str, Any]]:
    """Return a row for each peer that is connected, in the routing table, banned, or served, the busy ones first.

    Rates are in bytes per second; ``banned_until`` is in seconds since the epoch, ``None`` for a peer that is not banned.
    """
    connected, dht = frozenset(node.network.connected_peers), frozenset(node.routing.peers)
    banned, served = node.context.bans.until(trio.current_time()), node.server.statistics()
    to_wall_clock = time.time() - trio.current_time()
    rows: dict[PeerId, dict[str, Any]] = {}
    for peer in sorted(connected | dht | banned.keys() | served.rate_by_peer.keys()):
        rows[peer] = {
            "peer": peer,
            "connected": peer in connected,
            "dht": peer in dht,
            "banned_until": banned[peer] + to_wall_clock if peer in banned else None,
            "receiving_rate": 0.0,
            "wanted_blocks": 0,
            "snubbed": False,
            "sending_rate": served.rate_by_peer.get(peer, 0.0),
            "outstanding_bytes": served.outstanding_by_peer.get(peer, 0),
            "addresses": list(node.network.addresses_of(peer)),
        }
    for transfer in node.transfers.running.values():
        for share in transfer.progress.peers if transfer.progress is not None else ():
            row = rows.get(share.peer)
            if row is not None:  # one that has left may have its share of what came
                row["receiving_rate"] += share.rate if share.outstanding else 0.0
                row["wanted_blocks"] += share.outstanding
                row["snubbed"] |= share.snubbed
    return sorted(rows.values(), key=_interest, reverse=True)


def _interest(row: dict[str, Any]) -> tuple[bool, ...]:
    busy = bool(row["wanted_blocks"] or row["outstanding_bytes"])
    return busy, row["banned_until"] is not None, row["connected"], row["dht"]
