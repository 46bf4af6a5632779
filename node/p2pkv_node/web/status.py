"""What the status page polls: one JSON object with the snapshot, the transfers, the newest artifacts and the peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import trio

from p2pkv import __version__
from p2pkv.formats.cid import Cid
from p2pkv.limits import LATE_ANNOUNCEMENT_S, MAX_STATUS_NAME_CHARS, MAX_STATUS_ROWS
from p2pkv.ports import PeerId
from p2pkv.store.index import StoredArtifact
from p2pkv.store.store import Store
from p2pkv.swarm.context import in_thread
from p2pkv.swarm.target import ManifestTarget
from p2pkv_node.node import Node
from p2pkv_node.transfers import Transfer
from p2pkv_node.web.snapshot import Snapshot, take_snapshot

_CUT: Final = "\N{HORIZONTAL ELLIPSIS}"


async def status_of(node: Node, unready: str | None) -> dict[str, Any]:
    """Return the object. Tables have MAX_STATUS_ROWS rows at most; counts beside them tell of all. Raises StoreError."""
    snapshot = await take_snapshot(node, unready)
    artifacts = await in_thread(partial(_artifacts, node.store))
    transfers = [*node.transfers.running.values()]
    figures = asdict(snapshot)
    figures |= {name: len(getattr(snapshot, name)) for name in ("connected_peers", "dht_peers", "banned_peers")}
    del figures["served"]["outstanding_by_peer"]
    return {
        "version": __version__,
        "peer_id": node.network.peer_id,
        "addresses": list(node.network.addresses),
        **figures,
        "late": snapshot.announcing.late_s > LATE_ANNOUNCEMENT_S,
        "transfers": [_transfer(transfer) for transfer in transfers[:MAX_STATUS_ROWS]],
        "artifacts": artifacts,
        "peers": _peers(snapshot, transfers)[:MAX_STATUS_ROWS],
    }


def _artifacts(store: Store) -> list[dict[str, Any]]:
    """Return the newest artifacts. Blocking."""
    pins: dict[Cid, list[str]] = {}
    for pin in store.holds.pins():
        pins.setdefault(pin.manifest_cid, []).append(pin.name)
    rows = store.index.artifacts()[:MAX_STATUS_ROWS]
    return [_artifact(store, row, pins.get(row.manifest_cid, [])) for row in rows]


def _artifact(store: Store, row: StoredArtifact, pins: Sequence[str]) -> dict[str, Any]:
    held = row.segment_count if row.complete else len(store.index.held_keys(row.manifest_cid))
    return {
        **asdict(row),
        "manifest_cid": str(row.manifest_cid),
        "model_id": row.model_id.hex(),
        "model_name": _cut(row.model_name),
        "publisher": _cut(row.publisher),
        "held_segments": held,
        "pins": pins[:MAX_STATUS_ROWS],
    }


def _transfer(transfer: Transfer) -> dict[str, Any]:
    """Return a fetch as it stands: what it waits for, how far it is, and what it has of whom."""
    progress, matched, target = transfer.progress, transfer.matched, transfer.target
    wanted = target.manifest if isinstance(target, ManifestTarget) else None
    manifest = matched.artifact.cid if matched is not None else wanted
    return {
        "number": transfer.number,
        "seconds": trio.current_time() - transfer.started,
        "manifest": str(manifest) if manifest is not None else None,
        "model_name": _cut(matched.artifact.manifest.model_name) if matched is not None else None,
        "prompt_tokens": None if isinstance(target, ManifestTarget) else len(target.token_ids),
        "hit_tokens": matched.hit_tokens if matched is not None else None,
        "state": progress.state.value if progress is not None else None,
        "detail": _cut(progress.detail) if progress is not None else "",
        "done_bytes": progress.done_bytes if progress is not None else 0,
        "total_bytes": progress.total_bytes if progress is not None else 0,
        "peers": [asdict(peer) for peer in progress.peers] if progress is not None else [],
    }


def _peers(snapshot: Snapshot, transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """Return one row for each peer, those first that something is on its way from or to."""
    rows: dict[PeerId, dict[str, Any]] = {}
    known = snapshot.connected_peers | snapshot.dht_peers | snapshot.banned_peers
    for peer in sorted(known | snapshot.served.outstanding_by_peer.keys()):
        rows[peer] = {
            "peer": peer,
            "connected": peer in snapshot.connected_peers,
            "dht": peer in snapshot.dht_peers,
            "banned": peer in snapshot.banned_peers,
            "snubbed": False,
            "receiving_rate": 0.0,
            "wanted_blocks": 0,
            "outstanding_bytes": snapshot.served.outstanding_by_peer.get(peer, 0),
        }
    for transfer in transfers:
        for share in transfer.progress.peers if transfer.progress is not None else ():
            row = rows.get(share.peer)
            if row is not None:
                row["receiving_rate"] += share.rate if share.outstanding else 0.0
                row["wanted_blocks"] += share.outstanding
                row["snubbed"] |= share.snubbed
    return sorted(rows.values(), key=_interest, reverse=True)


def _interest(row: dict[str, Any]) -> tuple[Any, ...]:
    busy = bool(row["wanted_blocks"] or row["outstanding_bytes"])
    return busy, row["banned"], row["connected"], row["dht"]


def _cut(text: str) -> str:
    """Return the front of a text that a publisher wrote at any length."""
    return text if len(text) <= MAX_STATUS_NAME_CHARS else text[:MAX_STATUS_NAME_CHARS] + _CUT
