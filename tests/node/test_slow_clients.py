"""A client of the control socket that reads nothing holds nobody up, not even the end of the daemon."""

from __future__ import annotations

import trio

from p2pkv.limits import SHUTDOWN_GRACE_S
from p2pkv.store.home import HomeLayout
from tests.support.town import Daemon

REQUESTS = b"GET /v1/status HTTP/1.1\r\nHost: p2pkv\r\n\r\n" * 100


async def test_the_daemon_ends_while_a_client_reads_nothing(daemon: Daemon) -> None:
    async with await trio.open_unix_socket(str(HomeLayout(daemon.home).control_socket)) as deaf:
        full = trio.CancelScope()
        with full:
            for _ in range(10_000):
                full.deadline = trio.current_time() + 0.3
                await deaf.send_all(REQUESTS)
        assert full.cancelled_caught  # neither end takes any more
        assert (await daemon.client.status())["peer_id"] == daemon.peer_id
        with trio.fail_after(5 * SHUTDOWN_GRACE_S):
            await daemon.stop()
