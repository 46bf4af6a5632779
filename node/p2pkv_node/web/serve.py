"""The listening socket of the status page, and its server."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import trio

from p2pkv.errors import ListenError
from p2pkv_node.node import Node
from p2pkv_node.setting_values import OFF
from p2pkv_node.web.app import web_app
from p2pkv_node.web.connections import Connections
from p2pkv_node.web.guard import Guard, hosts_of

_BACKLOG = 64


@contextmanager
def listening(address: str) -> Iterator[socket.socket | None]:
    """Listen on the setting ``web`` until the end of the block; yields ``None`` where that is off. Raises ListenError."""
    if address == OFF:
        yield None
        return
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror
        raise ListenError(
            f"the status page cannot listen on {address}: {reason}",
            advice="Choose another address with --web; port 0 takes a free one.",
        ) from error
    with closing(listener):
        yield listener


def url_of(listener: socket.socket) -> str:
    """Return the URL at which the status page is: ``http://127.0.0.1:9464``."""
    return f"http://{_host_of(listener)}:{listener.getsockname()[1]}"


def server(node: Node, listener: socket.socket, stop: trio.Event) -> Callable[..., Awaitable[Any]]:
    """Return what serves the page until ``stop`` is set: a task to be started in a nursery."""
    app = Guard(web_app(node, stop), hosts_of(_host_of(listener), listener.getsockname()[1]))
    return partial(Connections(app, trio.SocketListener(trio.socket.from_stdlib_socket(listener))).serve, stop)


def _host_of(listener: socket.socket) -> str:
    host: str = listener.getsockname()[0]
    return f"[{host}]" if listener.family == socket.AF_INET6 else host
