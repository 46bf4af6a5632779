"""What is in our own store, asked off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.artifact.assembly import Assembly
from p2pkv.errors import IntegrityError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.ports import BlockStore
from p2pkv.swarm.context import Context


async def intact(context: Context, cids: Sequence[Cid]) -> set[Cid]:
    """Return those of ``cids`` that are in the store and still have their hash."""
    return await context.offload(lambda: {cid for cid in cids if _is_intact(context.store, cid)})


def _is_intact(store: BlockStore, cid: Cid) -> bool:
    if not store.has(cid):
        return False
    try:
        store.read(cid)
    except (NotFoundError, IntegrityError):
        return False
    return True


async def read(context: Context, cid: Cid) -> bytes:
    """Return the verified bytes of a block. Raises what BlockReader.read does."""
    return await context.offload(lambda: context.store.read(cid))


async def commit(context: Context, assembly: Assembly) -> frozenset[int]:
    """Commit as held the complete segments that are here in every layer, also those not wanted now, and return them.

    Raises DiskFullError, StoreError.
    """
    others = {index: assembly.others(index) for index in assembly.held()}

    def work() -> frozenset[int]:
        held = frozenset(index for index, cids in others.items() if all(map(context.store.has, cids)))
        context.catalog.add_artifact(assembly.artifact, held)
        return held

    return await context.offload(work)
