"""TLS 1.3 for the provider's end of a lane: the node's certificate, and one connection, from the event loop to a thread.

The certificate is made in memory at every start and signed by nobody: its SHA-256 travels over the authenticated libp2p
stream, and the consumer compares it before it says anything. So no name, date or authority is checked, and no key is kept.

A :class:`TlsConnection` has two lives. While it is young, handshake and greeting run as trio tasks, so a stranger costs a
socket and no thread. Then one thread alone writes: OpenSSL does not allow two at once. It never blocks unless
:meth:`TlsConnection.make_blocking` says so. Any other thread may only :meth:`~TlsConnection.shut` it.

pyOpenSSL, and not `ssl`: one call of it sends a whole block, where `ssl` comes back for every record of 16 KiB; it takes a key
that never was in a file; and the OpenSSL of `cryptography` knows the processors of today.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import trio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from p2pkv.errors import PeerUnreachableError
from p2pkv.ports import Buffer

_T = TypeVar("_T")

# X.509 wants dates; nobody checks them here. "99991231235959Z" is RFC 5280's form of "never expires".
_NOT_BEFORE: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)

# SSL_MODE_ENABLE_PARTIAL_WRITE of OpenSSL's ssl.h, which pyOpenSSL sets and does not name.
_PARTIAL_WRITE: Final = 1


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A server context with its own fresh certificate, and the SHA-256 of that certificate (DER)."""

    context: SSL.Context
    fingerprint: bytes


def make_identity() -> TlsIdentity:
    """Return a new identity; its private key exists in the memory of this process only."""
    key = Ed25519PrivateKey.generate()
    certificate = make_certificate(key)
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.clear_mode(_PARTIAL_WRITE)
    # A token opens one lane, so no session is ever resumed.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.use_certificate(certificate)
    context.use_privatekey(key)
    return TlsIdentity(context, hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest())


def make_certificate(key: Ed25519PrivateKey) -> x509.Certificate:
    """Return a certificate of nobody for ``key``, signed by itself."""
    nobody = x509.Name([])
    return (
        x509.CertificateBuilder()
        .subject_name(nobody)
        .issuer_name(nobody)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .sign(key, None)
    )


class TlsConnection:
    """One TLS connection over the connected socket ``raw``, which it owns from here on.

    Raises PeerUnreachableError when the socket is gone already, and from every method marked async when the peer leaves,
    breaks TLS or closes. The blocking method raises OSError, its thread maps it. ``server_side`` is what a node has; tests
    have the other.
    """

    def __init__(self, raw: socket.socket, context: SSL.Context, *, server_side: bool) -> None:
        self._lock = threading.Lock()
        self._shut = False
        self._raw = raw
        try:
            raw.getpeername()  # raises for a peer that has left
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raw.close()
            raise PeerUnreachableError(f"the connection broke at once: {error}") from error
        self._tls = SSL.Connection(context, raw)
        if server_side:
            self._tls.set_accept_state()
        else:
            self._tls.set_connect_state()

    # --- on the event loop -----------------------------------------------------------------------------------------------

    async def handshake(self) -> None:
        await self._drive(self._tls.do_handshake)

    async def send(self, data: bytes) -> None:
        """Send a few bytes that fit one TLS record."""
        await self._drive(partial(self._tls.send, data))

    async def receive(self, count: int) -> bytes:
        """Return exactly ``count`` bytes."""
        data = bytearray()
        while len(data) < count:
            data += await self._drive(partial(self._tls.recv, count - len(data)))
        return bytes(data)

    async def wait_readable(self) -> None:
        """Return when the peer has sent something, or has closed, or :meth:`shut` was called."""
        await trio.lowlevel.wait_readable(self._raw.fileno())

    async def _drive(self, step: Callable[[], _T]) -> _T:
        await trio.lowlevel.checkpoint()
        while True:
            try:
                return step()
            except SSL.WantReadError:
                await trio.lowlevel.wait_readable(self._raw.fileno())
            except SSL.WantWriteError:
                await trio.lowlevel.wait_writable(self._raw.fileno())
            except SSL.Error as error:  # also at the end of the stream
                raise PeerUnreachableError(f"the TLS connection broke: {error!r}") from error

    def make_blocking(self, timeout_s: float) -> None:
        """Let each write of a thread's own wait for ``timeout_s`` until the peer takes something, but not for ever."""
        self._raw.setblocking(True)
        # The kernel's own timeout: a timeout of Python's would make the socket non-blocking for OpenSSL.
        seconds, fraction = divmod(timeout_s, 1)
        timeval = struct.pack("@ll", int(seconds), int(fraction * 1_000_000))
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def close(self) -> None:
        """Release the socket, when neither thread nor task uses it any more. Safe to call twice."""
        with self._lock:
            self._shut = True
            self._raw.close()

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def send_all(self, data: Buffer) -> None:
        """Send all of ``data``. Raises OSError; the connection is of no use any more then."""
        try:
            self._tls.send(data)
        except (SSL.WantWriteError, SSL.WantReadError) as error:
            raise TimeoutError("the peer takes nothing") from error
        except SSL.Error as error:
            raise ConnectionError(f"the TLS connection broke: {error!r}") from error

    # --- from anywhere ---------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """End the connection in both directions at once: whoever waits for it wakes up. Safe from any thread, and twice."""
        with self._lock:
            if not self._shut:
                self._shut = True
                with contextlib.suppress(OSError):  # the peer was faster
                    self._raw.shutdown(socket.SHUT_RDWR)
