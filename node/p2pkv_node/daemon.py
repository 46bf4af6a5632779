"""Run a node with its control API until it is told to stop."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import anyio.lowlevel
import hypercorn.config
import hypercorn.trio
import trio

from p2pkv.limits import SHUTDOWN_GRACE_S
from p2pkv.ports import BlockStore
from p2pkv.store.store import Store
from p2pkv_node.config import NodeConfig
from p2pkv_node.control import control_app
from p2pkv_node.http_server import let_writes_end
from p2pkv_node.node import Node, open_node
from p2pkv_node.web import serve as web

logger = logging.getLogger(__name__)


async def run_daemon(
    config: NodeConfig,
    *,
    ready: Callable[[Node], None],
    stop: trio.Event | None = None,
    serve_from: Callable[[Store], BlockStore] = lambda store: store,
) -> None:
    """Serve until ``stop`` is set or a client asks for it; ``ready`` is called when node and control socket are up.

    Raises HomeLockedError, ListenError, UsageError, StoreError.
    """
    stop = trio.Event() if stop is None else stop
    async with open_node(config, serve_from=serve_from) as node:
        node.ending = stop
        socket_path = node.store.layout.secure_control_socket()
        _remove(socket_path)  # the home's lock is held, so whoever left it is gone
        settings = hypercorn.config.Config()
        settings.bind = [f"unix:{socket_path}"]
        settings.umask = 0o077
        settings.graceful_timeout = SHUTDOWN_GRACE_S / 2
        settings.errorlog = logging.getLogger("p2pkv_node.http")
        let_writes_end()
        serve = partial(
            hypercorn.trio.serve,
            control_app(node, stop),  # type: ignore[arg-type]  # hypercorn's ASGI types are narrower than starlette's
            settings,
            shutdown_trigger=stop.wait,
        )
        # Loads what Starlette streams answers with; otherwise the first fetch would wait for the import.
        await anyio.lowlevel.checkpoint()
        try:
            with web.listening(config.web) as listener:
                async with trio.open_nursery() as nursery:
                    await nursery.start(serve)
                    if listener is not None:
                        await nursery.start(web.server(node, listener, stop))
                        node.web_url = web.url_of(listener)
                        logger.info("metrics and status page at %s", node.web_url)
                    ready(node)
        finally:
            _remove(socket_path)


@contextmanager
def stop_on_signals(stop: trio.Event) -> Iterator[None]:
    """Set ``stop`` at the first SIGINT or SIGTERM; the second ends the process at once. For the main thread."""
    token = trio.lowlevel.current_trio_token()

    def handle(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.info("stopping for signal %d; once more stops at once", number)
        token.run_sync_soon(stop.set)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(socket_path: Path) -> None:
    """Remove the control socket; hypercorn may have done so already."""
    socket_path.unlink(missing_ok=True)
