"""What the status page polls: one JSON object with the snapshot, the transfers, the newest artifacts and the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import trio

from p2pkv import __version__
from p2pkv.formats.cid import Cid
from p2pkv.limits import LATE_ANNOUNCEMENT_S, MAX_STATUS_NAME_CHARS, MAX_STATUS_ROWS
from p2pkv.store.index import StoredArtifact
from p2pkv.store.sizes import ArtifactSize, ArtifactSizes
from p2pkv.store.store import Store
from p2pkv.swarm.target import ManifestTarget
from p2pkv_node.peers import peer_rows
from p2pkv_node.snapshot import STARTING, Observer, figures
from p2pkv_node.transfers import Transfer

_CUT: Final = "\N{HORIZONTAL ELLIPSIS}"


async def status_of(observer: Observer, sizes: ArtifactSizes) -> dict[str, Any]:
    """Return the object. Tables have MAX_STATUS_ROWS rows at most; counts beside them tell of all. Raises StoreError."""
    node = observer.node
    snapshot = await observer.snapshot()
    artifacts = await observer.read(partial(_artifacts, node.store, sizes))
    transfers = [*node.transfers.running.values()]
    return {
        "version": __version__,
        "peer_id": node.network.peer_id,
        "addresses": list(node.network.addresses),
        **figures(snapshot),
        "late": snapshot.announcing.late_s > LATE_ANNOUNCEMENT_S,
        "transfers": [_transfer(transfer) for transfer in transfers[:MAX_STATUS_ROWS]],
        "queue": [str(manifest) for manifest in node.transfers.queued[:MAX_STATUS_ROWS]],
        "artifacts": artifacts,
        "peers": peer_rows(node)[:MAX_STATUS_ROWS],
    }


def _artifacts(store: Store, sizes: ArtifactSizes) -> list[dict[str, Any]]:
    """Return the newest artifacts. Blocking."""
    pins: dict[Cid, list[str]] = {}
    for pin in store.holds.pins():
        pins.setdefault(pin.manifest_cid, []).append(pin.name)
    rows = store.index.artifacts(MAX_STATUS_ROWS)
    known = sizes.newest(MAX_STATUS_ROWS)
    return [_artifact(store, row, pins.get(row.manifest_cid, []), known) for row in rows]


def _artifact(store: Store, row: StoredArtifact, pins: Sequence[str], sizes: Mapping[Cid, ArtifactSize]) -> dict[str, Any]:
    held = row.segment_count if row.complete else len(store.index.held_keys(row.manifest_cid))
    size = sizes.get(row.manifest_cid)
    return {
        **asdict(row),
        "manifest_cid": str(row.manifest_cid),
        "model_id": row.model_id.hex(),
        "model_name": _cut(row.model_name),
        "publisher": _cut(row.publisher),
        "held_segments": held,
        "bytes": size.bytes if size is not None else None,  # not known yet
        "shared_bytes": size.shared if size is not None else None,
        "pins": pins[:MAX_STATUS_ROWS],
    }


def _transfer(transfer: Transfer) -> dict[str, Any]:
    """Return a fetch as it stands: what it waits for and for how long, how far it is, and what it has of whom."""
    progress, matched, target, now = transfer.progress, transfer.matched, transfer.target, trio.current_time()
    wanted = target.manifest if isinstance(target, ManifestTarget) else None
    manifest = matched.artifact.cid if matched is not None else wanted
    return {
        "number": transfer.number,
        "seconds": now - transfer.started,
        "manifest": str(manifest) if manifest is not None else None,
        "model_name": _cut(matched.artifact.manifest.model_name) if matched is not None else None,
        "prompt_tokens": None if isinstance(target, ManifestTarget) else len(target.token_ids),
        "hit_tokens": matched.hit_tokens if matched is not None else None,
        "state": transfer.state or STARTING,
        "state_seconds": now - transfer.since,
        "detail": _cut(progress.detail) if progress is not None else "",
        "done_bytes": progress.done_bytes if progress is not None else 0,
        "total_bytes": progress.total_bytes if progress is not None else 0,
        "peers": [asdict(peer) for peer in progress.peers] if progress is not None else [],
    }


def _cut(text: str) -> str:
    """Return the front of a text that a publisher wrote at any length."""
    return text if len(text) <= MAX_STATUS_NAME_CHARS else text[:MAX_STATUS_NAME_CHARS] + _CUT
