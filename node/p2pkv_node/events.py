"""Answers of the control API that tell how something goes, as server-sent events (``docs/control-api.md``)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import trio
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from p2pkv.errors import P2pkvError
from p2pkv_node.node import Node

logger = logging.getLogger(__name__)


class Events:
    """What one task tells. The event that :meth:`end` takes is the last of the answer, though the task may go on."""

    def __init__(self) -> None:
        self._send, self.receive = trio.open_memory_channel[dict[str, Any]](math.inf)
        self.over = False

    def emit(self, event: str, fields: dict[str, Any]) -> None:
        if not self.over:
            self._send.send_nowait({"event": event, **fields})

    def end(self, event: str, fields: dict[str, Any]) -> None:
        self.emit(event, fields)
        self.close()

    def close(self) -> None:
        self.over = True
        self._send.close()


def answer_with_events(node: Node, work: Callable[[Events], Awaitable[None]]) -> Response:
    """Answer with the events of ``work``, a task of the node's that is cancelled where the client leaves before its end."""
    return _EventStream(_told(node, work), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class _EventStream(StreamingResponse):
    """Closes what it streams from as soon as the client is gone; Starlette leaves that to the garbage collector."""

    def __init__(self, events: AsyncGenerator[bytes, None], **settings: Any) -> None:
        super().__init__(events, **settings)
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


async def _told(node: Node, work: Callable[[Events], Awaitable[None]]) -> AsyncGenerator[bytes, None]:
    """Yield the events of one task. It lives in a nursery of the node's, so that no scope is open around a yield."""
    events = Events()

    async def run() -> None:
        try:
            await work(events)
        except P2pkvError as error:
            events.emit("error", error.to_dict())
        except Exception as error:  # a defect ends this task, and not the node with everybody else's
            logger.exception("a call failed for a reason that nobody foresaw")
            defect = P2pkvError(f"{type(error).__name__} in the daemon", advice="Please report it with the daemon's log.")
            events.emit("error", defect.to_dict())
        finally:
            events.close()

    scope = node.background(run)
    try:
        async for event in events.receive:
            yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    finally:
        if not events.over:
            scope.cancel()  # the client went away: what came so far is kept, and the same call goes on with it
