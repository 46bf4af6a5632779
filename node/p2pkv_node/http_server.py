"""Hypercorn under trio, which serves the control socket, with one change: the end of the daemon ends what it writes.

Its connections write in a shielded scope, so a client that reads nothing, such as a command that was suspended in the middle
of a fetch, would hold the daemon up after the first request to stop for as long as it pleased. No setting changes that.
"""

from __future__ import annotations

import hypercorn.trio.run
import trio
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer


class _Connection(TCPServer):
    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                await self.stream.send_all(event.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self.protocol.handle(Closed())


def let_writes_end() -> None:
    """Have hypercorn serve connections whose writes can be cancelled."""
    setattr(hypercorn.trio.run, "TCPServer", _Connection)  # noqa: B010 - the name is not exported
