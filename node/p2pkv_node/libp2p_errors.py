"""What the exceptions of libp2p, trio and multiaddr mean in p2pkv's tree of errors: one table, used by this package alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.exceptions import RateLimitError
from libp2p.peer.peerstore import PeerStoreError
from libp2p.rcmgr.exceptions import ResourceManagerException
from libp2p.tools.anyio_service.exceptions import ServiceException
from libp2p.transport.quic.exceptions import QUICError
from multiaddr.exceptions import Error as MultiaddrFormatError, MultiaddrError

from p2pkv.errors import P2pkvError, PeerUnreachableError, UsageError

# Each class stands for its subclasses too. libp2p's classes name the layer that noticed, never whose doing it was: for us they
# all mean that this peer cannot be reached now. Only a malformed address is the caller's doing.
TABLE: Final[dict[type[Exception], type[P2pkvError]]] = {
    BaseLibp2pError: PeerUnreachableError,
    PeerStoreError: PeerUnreachableError,
    QUICError: PeerUnreachableError,
    RateLimitError: PeerUnreachableError,
    ResourceManagerException: PeerUnreachableError,
    ServiceException: PeerUnreachableError,
    MultiaddrError: PeerUnreachableError,  # a name that does not resolve
    MultiaddrFormatError: UsageError,
    trio.BrokenResourceError: PeerUnreachableError,
    trio.ClosedResourceError: PeerUnreachableError,
    trio.TooSlowError: PeerUnreachableError,
    OSError: PeerUnreachableError,
}


def translate(error: Exception, doing: str) -> P2pkvError:
    """Return the p2pkv error that ``error`` means; ``doing`` says what failed: "dialling 12D3Koo..."."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            detail = str(error) or type(error).__name__
            return TABLE[cls](f"{doing} failed: {detail}")
    raise AssertionError(f"no entry of the table covers {type(error)!r}")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise the foreign exceptions of the body as p2pkv errors; everything else passes."""
    try:
        yield
    except P2pkvError:
        raise
    except tuple(TABLE) as error:
        raise translate(error, doing) from error
