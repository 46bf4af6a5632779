"""A fetch that finds the disk full waits for room, visibly, and goes on at the block where it stopped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from p2pkv.errors import DiskFullError
from p2pkv.swarm.report import FetchEvent, FetchReport, FetchState, Progress
from p2pkv.units import MIB, format_bytes

# So much has to be free before it is tried again: a few blocks at once, or each would wait for the next.
ROOM_BYTES: Final = 8 * MIB
# Room is looked for this often. The streams are closed meanwhile: peers are not kept waiting.
_LOOK_S: Final = 1.0


async def fetch_with_room(
    fetch: Callable[[Callable[[FetchEvent], None], float], Awaitable[FetchReport]],
    free_bytes: Callable[[], Awaitable[int]],
    emit: Callable[[FetchEvent], None],
    patience_s: float,
) -> FetchReport:
    """Call ``fetch`` with an ear and the seconds that are left, again whenever the disk was full and has room since.

    Raises what ``fetch`` raises; DiskFullError when ``patience_s`` is over.
    """
    deadline = trio.current_time() + patience_s
    done = total = 0

    def hear(event: FetchEvent) -> None:
        nonlocal done, total
        if isinstance(event, Progress):
            done, total = event.done_bytes, event.total_bytes
        emit(event)

    while True:
        try:
            return await fetch(hear, deadline - trio.current_time())
        except DiskFullError:
            free = 0
            while free < ROOM_BYTES:
                if trio.current_time() + _LOOK_S >= deadline:
                    raise
                detail = f"{format_bytes(free)} are free; it goes on by itself with {format_bytes(ROOM_BYTES)}"
                emit(Progress(FetchState.DISK_FULL, detail, done, total, ()))
                await trio.sleep(_LOOK_S)
                free = await free_bytes()
