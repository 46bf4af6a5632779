"""One exchange stream over libp2p as a :class:`p2pkv.ports.Channel`.

Reading and writing happen in tasks of the network (see :mod:`p2pkv_node.detached`), so that cancelling a ``send`` or a
``receive`` never harms the connection. A ``send`` that was cancelled leaves the channel fit for closing only, because the
peer may have got a part of the data.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.stream_muxer.yamux.yamux import HEADER_SIZE, YamuxStream

from p2pkv.errors import P2pkvError, PeerUnreachableError
from p2pkv.limits import CLOSE_LINGER_S, CLOSE_TIMEOUT_S, SEND_STALL_S
from p2pkv.ports import Buffer, PeerId
from p2pkv.units import KIB
from p2pkv_node.detached import Detached
from p2pkv_node.libp2p_errors import translated

logger = logging.getLogger(__name__)

# One yamux frame of this payload is exactly one Noise message; the library's own frames of 64 KiB make a full message and a
# tiny one each.
_PIECE_BYTES: Final = MAX_PLAINTEXT_LENGTH - HEADER_SIZE
# A read takes what has arrived, up to this, and sends one window update for it.
_READ_BYTES: Final = 256 * KIB
# How often a sender looks whether a slow peer has taken something; the library wakes nobody for it.
_WINDOW_POLL_S: Final = 0.002
_NETWORK_CLOSED: Final = "The network was closed."


class Libp2pChannel:
    """A channel over one libp2p stream; made by :class:`p2pkv_node.network.Libp2pNetwork` alone."""

    def __init__(self, stream: INetStream, muxed: YamuxStream, peer_id: PeerId, detached: Detached) -> None:
        self._stream = stream
        self._muxed = muxed
        self._peer_id = peer_id
        self._detached = detached
        self._send_lock = trio.Lock()
        self._closed = False
        self._send_cut = False
        self._failure: str | None = None
        self._pump_done = trio.Event()
        self._pump_scope = trio.CancelScope()
        self._arrived_send, self._arrived = trio.open_memory_channel[bytes](1)
        remote = stream.get_remote_address()
        self._remote_host = remote[0] if remote else None
        if not detached.start(self._pump):
            self._failure = _NETWORK_CLOSED
            self._arrived_send.close()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def remote_host(self) -> str | None:
        return self._remote_host

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if not view:
            await trio.lowlevel.checkpoint()
            return
        try:
            await self._detached.run(partial(self._write, view), doing=self._doing("sending"), timeout=float("inf"))
        except trio.Cancelled:
            self._send_cut = True
            raise

    async def receive(self) -> bytes:
        try:
            return await self._arrived.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if self._failure is not None and not self._closed:
                raise PeerUnreachableError(self._failure) from None
            return b""

    async def aclose(self) -> None:
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        self._arrived.close()
        self._detached.start(self._linger)
        try:
            await self._detached.run(self._finish, doing=self._doing("closing"), timeout=CLOSE_TIMEOUT_S)
        except PeerUnreachableError:
            logger.debug("the stream to %s was gone before it was closed", self._peer_id)

    def _doing(self, what: str) -> str:
        return f"{what} the stream to {self._peer_id}" if what == "closing" else f"{what} on the stream to {self._peer_id}"

    async def _write(self, view: memoryview) -> None:
        async with self._send_lock:
            offset = 0
            while offset < len(view):
                window = await self._window()
                piece = bytes(view[offset : offset + min(window, _PIECE_BYTES)])
                with trio.fail_after(SEND_STALL_S):
                    await self._stream.write(piece)
                offset += len(piece)

    async def _window(self) -> int:
        """Return how many bytes the peer takes now, at least one. Left to wait for it, the library gives up after 5 s."""
        deadline = trio.current_time() + SEND_STALL_S
        while True:
            if self._closed or self._send_cut:
                raise PeerUnreachableError(f"The stream to {self._peer_id} was closed while sending.")
            if self._muxed.send_window > 0 or self._muxed.closed or self._muxed.send_closed:
                return max(self._muxed.send_window, 1)
            if trio.current_time() > deadline:
                raise PeerUnreachableError(f"{self._peer_id} took nothing for {SEND_STALL_S:.0f} s.")
            await trio.sleep(_WINDOW_POLL_S)

    async def _pump(self) -> None:
        """Hand over what arrives; after closing throw it away, until the peer closes its end too."""
        try:
            with self._pump_scope, translated(self._doing("receiving")):
                while data := await self._stream.read(_READ_BYTES):
                    try:
                        await self._arrived_send.send(data)
                    except trio.BrokenResourceError:
                        continue
        except P2pkvError as error:
            # libp2p reports the end of a stream and the loss of its connection alike.
            if self._muxed.conn.event_shutting_down.is_set():
                self._failure = f"The connection to {self._peer_id} was lost."
            elif self._muxed.reset_received:
                self._failure = f"{self._peer_id} reset the stream."
            elif not isinstance(error.__cause__, StreamEOF):
                self._failure = error.message
        except trio.Cancelled:
            self._failure = _NETWORK_CLOSED
            raise
        finally:
            self._arrived_send.close()
            self._pump_done.set()

    async def _finish(self) -> None:
        async with self._send_lock:
            await self._stream.close()

    async def _linger(self) -> None:
        with trio.move_on_after(CLOSE_LINGER_S) as patience:
            await self._pump_done.wait()
        if not patience.cancelled_caught:
            return
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            await self._stream.reset()
        self._pump_scope.cancel()
