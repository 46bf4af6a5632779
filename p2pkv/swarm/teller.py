"""Tells how a fetch goes: progress while it runs, a report when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from p2pkv.artifact.assembly import Assembly
from p2pkv.download.engine import Download
from p2pkv.swarm.pool import ProviderPool
from p2pkv.swarm.report import FetchEvent, FetchReport, FetchState, Progress, Refusal
from p2pkv.units import plural

# Progress is for eyes: more often than this nobody sees it, and each costs the transfer a little.
_PROGRESS_INTERVAL_S: Final = 0.05


class Teller:
    """Notes what the report needs. ``assembly`` is that of the manifest that is being fetched."""

    def __init__(self, emit: Callable[[FetchEvent], None], download: Download) -> None:
        self.assembly: Assembly | None = None
        self.local_bytes = 0
        self.blocks_refused = 0
        self.refusals: list[Refusal] = []
        self._emit = emit
        self._download = download
        self._started = trio.current_time()
        self._shown = 0.0
        self._times: dict[str, float] = {}

    def mark(self, name: str) -> bool:
        """Note when something happened, where it is the first time; return whether it is."""
        first = name not in self._times
        if first:
            self._times[name] = trio.current_time() - self._started
        return first

    def show(self, state: FetchState, detail: str) -> None:
        self._shown = trio.current_time()
        done = self.assembly.done_bytes if self.assembly else 0
        total = self.assembly.total_bytes if self.assembly else 0
        self._emit(Progress(state, detail, done, total, self._download.progress()))

    def show_transfer(self, peers: int, *, often: bool = False) -> None:
        """Say what is being waited for; where that happens ``often``, only now and then."""
        if not often or trio.current_time() - self._shown > _PROGRESS_INTERVAL_S:
            missing = plural(self._download.missing, "block")
            asked = [share.peer for share in self._download.progress() if share.outstanding]
            if not self._download.missing:
                self.show(FetchState.TRANSFERRING, "")
            elif not peers:
                self.show(FetchState.LOOKING_UP, f"nobody reachable has the {missing} that are missing yet")
            else:
                who = f"peer {asked[0]}" if len(asked) == 1 else plural(peers, "peer")
                self.show(FetchState.TRANSFERRING, f"waiting for {missing} of {who}")

    def report(self, pool: ProviderPool) -> FetchReport:
        self.mark("done_s")
        segments, hit_tokens = self.assembly.usable() if self.assembly else (0, 0)
        shares = [share for share in self._download.progress() if share.bytes]
        return FetchReport(
            artifact=self.assembly.artifact if self.assembly else None,
            hit_tokens=hit_tokens,
            segments=segments,
            layers=self.assembly.layers if self.assembly else None,
            local_bytes=self.local_bytes,
            bytes_by_peer={share.peer: share.bytes for share in shares},
            rate_by_peer={share.peer: share.rate for share in shares},
            duplicate_bytes=self._download.duplicate_bytes,
            blocks_refused=self.blocks_refused,
            peers_lost=len(pool.lost),
            peers_dropped=tuple(pool.dropped),
            refusals=tuple(self.refusals),
            times=dict(self._times),
        )
