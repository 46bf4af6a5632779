"""The fetches of a node as its operator sees them: those under way, and how those went that are over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from p2pkv.formats.cid import Cid
from p2pkv.swarm.report import FetchEvent, FetchReport, FetchState, Matched, Progress
from p2pkv.swarm.target import PromptTarget, Target


class Outcome(StrEnum):
    """How a fetch ended.

    Complete: all that was wanted of the artifact is here; partial: some of it; miss: nothing, or no artifact. Failed: the
    fetch ended with an error. Abandoned: whoever wanted it left, or the node stopped.
    """

    COMPLETE = "complete"
    PARTIAL = "partial"
    MISS = "miss"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class Transfer:
    """One fetch, from its start until its streams are closed. ``since`` its state is what it is; both in monotonic seconds."""

    number: int
    target: Target
    started: float
    since: float
    matched: Matched | None = None
    progress: Progress | None = None
    outcome: Outcome | None = None

    @property
    def state(self) -> FetchState | None:
        """What it waits for; ``None`` before it has begun to."""
        return self.progress.state if self.progress is not None else None

    def hear(self, event: FetchEvent, now: float) -> None:
        if isinstance(event, Progress):
            if event.state is not self.state:
                self.since = now
            self.progress = event
        elif isinstance(event, Matched):
            self.matched = event


@dataclass(slots=True)
class Transfers:
    """All fetches of a node. Counts are since the start, tokens those of prompts: what was asked for, and what was here.

    ``queued`` are artifacts that were being fetched when the node ended the last time, and wait for their turn.
    """

    running: dict[int, Transfer] = field(default_factory=dict)
    queued: list[Cid] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    _begun: int = 0

    @contextmanager
    def watch(
        self, target: Target, emit: Callable[[FetchEvent], None], deliver: Callable[[FetchReport], None]
    ) -> Iterator[tuple[Callable[[FetchEvent], None], Callable[[FetchReport], None]]]:
        """Watch one fetch. Yields what to call in the place of ``emit`` and ``deliver``, which are called in turn."""
        self._begun += 1
        now = trio.current_time()
        transfer = Transfer(self._begun, target, started=now, since=now)

        def hear(event: FetchEvent) -> None:
            transfer.hear(event, trio.current_time())
            emit(event)

        def conclude(report: FetchReport) -> None:
            self._count(transfer, _outcome(transfer, report), report.hit_tokens)
            deliver(report)

        self.running[transfer.number] = transfer
        try:
            yield hear, conclude
        finally:
            del self.running[transfer.number]
            if transfer.outcome is None:
                cancelled = trio.current_effective_deadline() == -math.inf
                self._count(transfer, Outcome.ABANDONED if cancelled else Outcome.FAILED, 0)

    def _count(self, transfer: Transfer, outcome: Outcome, hit_tokens: int) -> None:
        transfer.outcome = outcome
        self.outcomes[outcome] += 1
        if isinstance(transfer.target, PromptTarget) and outcome is not Outcome.ABANDONED:
            self.prompt_tokens += len(transfer.target.token_ids)
            self.hit_tokens += hit_tokens


def _outcome(transfer: Transfer, report: FetchReport) -> Outcome:
    if report.artifact is None or transfer.matched is None or not report.segments:
        return Outcome.MISS
    return Outcome.COMPLETE if report.segments >= transfer.matched.segments else Outcome.PARTIAL
