"""TLS 1.3 for the provider's end of a lane: the node's certificate, and one connection, from the event loop to a thread.

The certificate is made in memory at every start and signed by nobody: its SHA-256 travels over the authenticated libp2p
stream, and the consumer compares it before it says anything. So no name, date or authority is checked, and no key is kept.

A :class:`TlsConnection` has two lives. While it is young, handshake and greeting run as trio tasks, so a stranger costs a
socket and no thread. Then one thread alone reads or alone writes: OpenSSL does not allow both at once. It never blocks unless
:meth:`TlsConnection.make_blocking` says so. Any other thread may only :meth:`~TlsConnection.shut` it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pkv.errors import PeerUnreachableError
from p2pkv.ports import Buffer

_T = TypeVar("_T")

# X.509 wants dates; nobody checks them here. "99991231235959Z" is RFC 5280's form of "never expires".
_NOT_BEFORE: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A server context with its own fresh certificate, and the SHA-256 of that certificate (DER)."""

    context: ssl.SSLContext
    fingerprint: bytes


def make_identity() -> TlsIdentity:
    """Return a new identity; its private key exists in this process only."""
    key = Ed25519PrivateKey.generate()
    nobody = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(nobody)
        .issuer_name(nobody)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .sign(key, None)
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a token opens one lane, so no session is ever resumed
    _load_certificate(context, pem)
    return TlsIdentity(context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest())


def _load_certificate(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificate by way of a file, since `ssl` takes no bytes; only we can read it, and it is gone at once."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-") as folder:
        path = Path(folder, "identity.pem")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)


class TlsConnection:
    """One TLS connection over the connected socket ``raw``, which it owns from here on.

    Raises PeerUnreachableError when the socket is gone already, and from every method marked async when the peer leaves,
    breaks TLS or closes. The blocking methods raise OSError (``ssl.SSLError`` is one), their thread maps it.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._lock = threading.Lock()
        self._shut = False
        try:
            raw.getpeername()  # raises for a peer that has left, whose socket `wrap_socket` would take and not close
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._tls = context.wrap_socket(raw, server_side=server_side, do_handshake_on_connect=False)
        except OSError as error:
            raw.close()
            raise PeerUnreachableError(f"the connection broke at once: {error}") from error

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
            part = await self._drive(partial(self._tls.recv, count - len(data)))
            if not part:
                raise PeerUnreachableError("the peer closed the connection")
            data += part
        return bytes(data)

    async def wait_readable(self) -> None:
        """Return when the peer has sent something, or has closed, or :meth:`shut` was called."""
        await trio.lowlevel.wait_readable(self._tls.fileno())

    async def _drive(self, step: Callable[[], _T]) -> _T:
        await trio.lowlevel.checkpoint()
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._tls.fileno())
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self._tls.fileno())
            except OSError as error:
                raise PeerUnreachableError(f"the TLS connection broke: {error}") from error

    def make_blocking(self, timeout_s: float) -> None:
        """Let each call of a thread's own take ``timeout_s``, but not for ever."""
        self._tls.settimeout(timeout_s)

    def close(self) -> None:
        """Release the socket, when neither thread nor task uses it any more. Safe to call twice."""
        with self._lock:
            self._shut = True
            self._tls.close()

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def send_all(self, data: Buffer) -> None:
        """Send all of ``data``. Raises OSError."""
        self._tls.sendall(data)

    # --- from anywhere ---------------------------------------------------------------------------------------------------

    @property
    def is_shut(self) -> bool:
        return self._shut

    def shut(self) -> None:
        """End the connection in both directions at once: whoever waits for it wakes up. Safe from any thread, and twice."""
        with self._lock:
            if not self._shut:
                self._shut = True
                with contextlib.suppress(OSError):  # the peer was faster
                    # SSLSocket.shutdown would also forget TLS, and the thread would take what is buffered for plain text.
                    socket.socket.shutdown(self._tls, socket.SHUT_RDWR)
