"""A nursery for tasks that live as long as a block of code, and whose errors do not disguise that code's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_background() -> AsyncIterator[trio.Nursery]:
    """Yield a nursery whose tasks are cancelled at the end of the block.

    An error of the block is raised as it is: a plain nursery would wrap it in a group, which no caller expects of an
    ``async with``. Errors of the tasks come as the group that they are.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
