"""Beside the fetch of a prompt: what other publishers signed of the same text, for whoever wants several to agree.

Each of them is found by a small fetch of its own, of a manifest and the nodes that are not here; no block moves. Whether they
agree is counted by whoever asked, who verifies everything again; what is counted here only says when to stop looking.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import trio

from p2pkv.artifact.read import Artifact
from p2pkv.errors import P2pkvError
from p2pkv.limits import MAX_WITNESSES
from p2pkv.swarm.context import Context
from p2pkv.swarm.fetch import Fetch
from p2pkv.swarm.groups import first_error
from p2pkv.swarm.report import FetchEvent, FetchReport, Matched, Witnessed
from p2pkv.swarm.target import PromptTarget, WitnessTarget

Emit: TypeAlias = Callable[[FetchEvent], None]
Deliver: TypeAlias = Callable[[FetchReport], None]

# While the fetch goes on, publishers who were not there a moment ago are looked for so often.
_AGAIN_S: Final = 2.0


async def fetch_with_witnesses(
    context: Context,
    target: PromptTarget,
    quorum: int,
    fetch: Callable[[Emit, Deliver], Awaitable[object]],
    emit: Emit,
    deliver: Deliver,
    patience_s: float,
) -> None:
    """Run ``fetch`` of ``target``, and beside it look until ``quorum`` publishers, the fetched one included, signed the same.

    ``emit`` hears a :class:`Witnessed` of each other publisher among the events of the fetch. The report is delivered when the
    fetch is over and nobody is left to be heard, or ``patience_s`` seconds have passed. Raises what the fetch raises, and
    DiskFullError and StoreError of our own disk.
    """
    search = _Search(context, target, quorum, emit)

    def hear(event: FetchEvent) -> None:
        emit(event)
        search.hear(event)

    async def look() -> None:
        deliver(await search.run(patience_s))

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await fetch(hear, search.conclude)
    except* P2pkvError as group:
        raise first_error(group) from None


class _Search:
    """Looks for witnesses of what one fetch has matched."""

    def __init__(self, context: Context, target: PromptTarget, quorum: int, emit: Emit) -> None:
        self._context = replace(context, bulk=None)  # nodes are small: no lane is worth opening
        self._target = target
        self._quorum = quorum
        self._emit = emit
        self._begun = trio.Event()  # something matched, or nothing ever will
        self._over = trio.Event()
        self._matched: Matched | None = None
        self._report: FetchReport | None = None
        self._found: dict[str, Artifact] = {}  # by holder

    def hear(self, event: FetchEvent) -> None:
        """Hear an event of the fetch."""
        if isinstance(event, Matched):
            self._matched = event
            self._begun.set()

    def conclude(self, report: FetchReport) -> None:
        """The fetch is over."""
        self._report = report
        if report.artifact is None:
            self._matched = None  # it was refused after all
        self._over.set()
        self._begun.set()

    async def run(self, patience_s: float) -> FetchReport:
        """Look until there are enough, or nobody is left, and return the report of the fetch, which is over then."""
        deadline = trio.current_time() + patience_s
        await self._begun.wait()
        while self._wanting and (left := deadline - trio.current_time()) > 0:
            last = self._over.is_set()
            if await self._find(left):
                continue
            if last:
                break
            with trio.move_on_after(min(_AGAIN_S, left)):
                await self._over.wait()
        await self._over.wait()
        assert self._report is not None, "it comes before the fetch is over"
        await self._list(self._report)
        return self._report

    @property
    def _wanting(self) -> bool:
        """Whether some segment that is wanted was not signed by enough, as far as equal nodes tell."""
        if self._matched is None or len(self._found) >= MAX_WITNESSES:
            return False
        artifact, wanted = self._matched.artifact, self._matched.segments
        own = self._context.holder(artifact.manifest.publisher)
        others = [_alike(found, artifact) for who, found in self._found.items() if who != own]
        return any(1 + sum(index in alike for alike in others) < self._quorum for index in range(wanted))

    async def _find(self, patience_s: float) -> bool:
        """Fetch what one more publisher signed, and return whether there was one."""
        target = WitnessTarget.of(self._target, self._counted)
        report = await Fetch(self._context, target, lambda event: None).run(patience_s)
        if report.artifact is None:
            return False
        manifest = report.artifact.manifest
        self._found[self._context.holder(manifest.publisher)] = report.artifact
        if report.segments:
            self._emit(Witnessed(report.artifact, manifest.segments[: report.segments]))
        return True

    def _counted(self, publisher: str) -> bool:
        holder = self._context.holder
        own = holder(self._matched.artifact.manifest.publisher) if self._matched is not None else None
        return holder(publisher) in {own, *self._found}

    async def _list(self, report: FetchReport) -> None:
        """List artifacts whose blocks came as another's: the same prompt finds its witnesses here the next time.

        Raises DiskFullError, StoreError.
        """
        if report.artifact is None:
            return
        here = range(report.segments)
        for found in self._found.values():
            if held := _alike(found, report.artifact) & frozenset(here):
                await self._context.offload(partial(self._context.catalog.add_artifact, found, held))


def _alike(one: Artifact, other: Artifact) -> frozenset[int]:
    """Return the segments that have the same node in both."""
    pairs = enumerate(zip(one.manifest.segments, other.manifest.segments, strict=False))
    return frozenset(index for index, (node, twin) in pairs if node == twin)
