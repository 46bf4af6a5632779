"""Which manifest a fetch takes: of those on offer the best that verifies, that is trusted, and that nobody signed anew."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from p2pkv.artifact.match import Match
from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.download.engine import Want
from p2pkv.errors import SupersededError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.routing.candidates import Candidates
from p2pkv.routing.contest import Contest
from p2pkv.swarm.context import Context
from p2pkv.swarm.local import Arrivals, intact
from p2pkv.swarm.target import MANIFEST_DEADLINE, Target


class Manifests:
    """The manifests of one fetch. Open what :meth:`next` names, and :meth:`read` it when it has arrived."""

    def __init__(self, context: Context, target: Target, arrivals: Arrivals) -> None:
        self._context = context
        self._target = target
        self._arrivals = arrivals
        self._candidates = Candidates(target.best_match)
        self._contest = Contest(self._candidates)

    def offer(self, peer: str, match: Match) -> None:
        self._candidates.add(peer, match, trio.current_time())

    @property
    def on_offer(self) -> bool:
        """Whether there is one that was not opened yet."""
        return bool(self._candidates)

    def next(self, *, searching: bool) -> Cid | None:
        """Return the manifest to open now, ``None`` for none yet; ``searching``: others may still be offered."""
        now = trio.current_time()
        if self._contest.under_way:
            return self._contest.next(now)
        candidate = self._candidates.choose(now, searching=searching)
        return candidate.manifest if candidate is not None else None

    async def read(self, cid: Cid) -> Artifact | Want | Cid:
        """Verify and judge a manifest that has arrived; return the artifact that is taken.

        Or else what is missing of it, or another manifest to open first. Raises why it is refused, StoreError of our own disk.
        """
        envelope = await self._arrivals.read(cid)
        if envelope is None:
            return Want(cid, None, MANIFEST_DEADLINE)
        manifest = Envelope.decode(envelope).open()
        self._context.judge(manifest, cid).require()
        self._context.met(manifest.publisher)
        self._target.check(manifest)
        chosen = self._contest.enter(cid, manifest, trio.current_time())
        if chosen != cid:
            return chosen
        tokens = manifest.tokens.cid
        if tokens is None:
            return open_manifest(cid, manifest)
        block = await self._arrivals.read(tokens) if await intact(self._context, [tokens]) else None
        if block is None:
            return Want(tokens, manifest.token_bytes, MANIFEST_DEADLINE)
        return open_manifest(cid, manifest, block)

    def give_up_rival(self, cid: Cid) -> bool:
        """Return whether ``cid``, which does not come, was waited for long enough while there is another to be taken."""
        timer = self._contest.get_timer()
        if timer is None or timer > trio.current_time():
            return False
        self._contest.leave(cid)
        return True

    def refuse(self, cid: Cid) -> None:
        """A manifest cannot be used: others may be, also those that it was preferred to."""
        self._contest.refuse(cid)

    def superseded(self) -> Iterator[tuple[Cid, SupersededError]]:
        """Yield the older ones of the artifact that was taken."""
        return self._contest.superseded()

    def get_timer(self, opening: Cid | None) -> float | None:
        """Return when there is something to do while ``opening`` is awaited."""
        return self._candidates.get_timer() if opening is None else self._contest.get_timer()
