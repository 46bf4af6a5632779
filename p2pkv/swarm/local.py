"""What is in our own store, asked off the event loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import trio

from p2pkv.artifact.assembly import Assembly
from p2pkv.errors import IntegrityError, MachineError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.limits import READ_LEASE_S
from p2pkv.store.stored_blocks import is_intact
from p2pkv.swarm.context import Context

logger = logging.getLogger(__name__)


async def intact(context: Context, cids: Sequence[Cid]) -> set[Cid]:
    """Return those of ``cids`` that are in the store and still have their hash."""
    return await context.offload(lambda: {cid for cid in cids if context.store.has(cid) and is_intact(context.store, cid)})


class Arrivals:
    """Reads what has arrived. What our own disk lost by then is to be fetched again, and not held against its publisher."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lost: set[Cid] = set()

    async def read(self, cid: Cid) -> bytes | None:
        """Return the verified bytes of a block, ``None`` where it is gone or damaged for the first time.

        Raises what BlockReader.read does, the second time.
        """
        try:
            return await self._context.offload(lambda: self._context.store.read(cid))
        except (NotFoundError, IntegrityError):
            if cid in self._lost:
                raise
            self._lost.add(cid)
            return None


class Leases:
    """Keeps what a fetch of at most ``seconds`` brings from being collected, and a little longer, for whoever reads it."""

    def __init__(self, context: Context, seconds: float) -> None:
        self._context = context
        self._seconds = seconds
        self._taken: list[int] = []

    async def take(self, manifest: Cid) -> None:
        """Keep what belongs to ``manifest``. On a full disk the fetch goes on without, and says what it lacks itself."""
        try:
            lease = partial(self._context.catalog.lease, manifest, self._seconds + READ_LEASE_S)
            self._taken.append(await self._context.offload(lease))
        except MachineError as error:
            logger.warning("%s may be collected while it is fetched: %s", manifest, error)

    async def shorten(self) -> None:
        """The fetch is over, or cancelled."""
        with trio.CancelScope(shield=True):
            for lease in self._taken:
                with suppress(MachineError):  # it ends by itself
                    await self._context.offload(partial(self._context.catalog.renew, lease, READ_LEASE_S))


async def commit(context: Context, assembly: Assembly) -> frozenset[int]:
    """Commit as held the complete segments that are here in every layer, also those not wanted now, and return them.

    Raises DiskFullError, StoreError.
    """
    if not assembly.layers:
        return frozenset()  # none was wanted: nodes alone hold nothing
    others = {index: assembly.others(index) for index in assembly.held()}

    def work() -> frozenset[int]:
        held = frozenset(index for index, cids in others.items() if all(map(context.store.has, cids)))
        context.catalog.add_artifact(assembly.artifact, held)
        return held

    return await context.offload(work)
