"""The interfaces between the drivers (``swarm``) and the shells (``node``, ``sims``), owned by the drivers that use them.

Each port has one contract suite under ``tests/contract/`` that the real part and its fake both pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from p2pkv.formats.cid import Cid

PeerId: TypeAlias = str
"""A libp2p peer id in its base58 text form."""

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and the multiaddrs (as text, without the ``/p2p/`` part) at which it may be dialled."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()


class Channel(Protocol):
    """One authenticated, ordered byte stream to a peer that speaks ``/p2pkv/exchange/1.0.0``."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def remote_host(self) -> str | None:
        """The IP address at the other end, where the peer is reached directly; ``None`` through a relay."""

    async def send(self, data: Buffer) -> None:
        """Send all of ``data``, waiting while the peer is slow. Raises PeerUnreachableError."""

    async def receive(self) -> bytes:
        """Return the next bytes, at least one; ``b""`` at the end of the stream. Raises PeerUnreachableError."""

    async def aclose(self) -> None:
        """Close at once; never raises for a stream that is gone already."""


class Network(Protocol):
    """Opens exchange channels to peers, and hands over those that peers open to us."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def connected_peers(self) -> Sequence[PeerId]:
        """The peers that a channel can be opened to without dialling."""

    async def open_channel(self, peer: PeerAddress) -> Channel:
        """Dial where needed and open a channel. Raises PeerUnreachableError."""

    def set_channel_handler(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        """Run ``handler`` in a task of its own for each channel that a peer opens; the channel closes when it returns."""


class Routing(Protocol):
    """Finds who provides a key, and tells others what we provide."""

    async def announce(self, key: bytes) -> bool:
        """Tell the network that we provide ``key`` (a multihash); ``False`` when nobody could be told."""

    def withdraw(self, key: bytes) -> None:
        """Answer others no longer that we provide ``key``. Whom we have told goes on saying so until the record runs out."""

    def find_providers(self, key: bytes) -> AbstractAsyncContextManager[AsyncIterator[PeerAddress]]:
        """Look ``key`` up and hand over each provider as soon as it is known: each once, ourselves never. Raises nothing.

        ::

            async with routing.find_providers(key) as providers:
                async for peer in providers: ...

        The iterator ends when all peers near the key have answered, after MAX_PROVIDERS_PER_LOOKUP, or LOOKUP_TIMEOUT_S after
        the start; leaving the block earlier ends the look-up. It is a context manager around an iterator, and no plain list,
        because the first answer is there long before the slowest, and no async generator, because a generator that its user
        leaves half-way is closed at an unknown time.
        """


@dataclass(frozen=True, slots=True)
class BulkOffer:
    """What a provider sends over its authenticated channel so that the consumer may open a bulk lane."""

    port: int
    token: bytes  # 32 random bytes; valid once, for this peer, for BULK_TOKEN_SECONDS
    fingerprint: bytes  # SHA-256 of the provider's TLS certificate (DER)


class BulkSender(Protocol):
    """The provider's end of one open bulk lane."""

    def send_blocks(self, cids: Sequence[Cid]) -> None:
        """Queue blocks, which the lane reads from its source one by one as the peer takes them; never waits, raises nothing.

        How much is queued is the caller's business. A closed lane drops what it is given: a consumer asks again.
        """

    def close(self) -> None:
        """End the lane at once; what is queued is not sent. Safe from any thread, and twice."""


class BulkSource(Protocol):
    """Where a bulk lane of the provider takes blocks from, and whom it tells. Raises nothing."""

    def read_block(self, cid: Cid, buffer: memoryview) -> int:
        """Read a verified block into the front of ``buffer`` and return its size in bytes; 0 where it is not here.

        Called from the lane's own thread, when the peer has taken the block before.
        """

    def blocks_sent(self, sizes: Sequence[int]) -> None:
        """The next ``len(sizes)`` blocks, in the order queued, have gone out with so many bytes; 0: it was not here.

        Called on the event loop, for several blocks at once where they are small. That a block has gone out does not mean
        that it has arrived.
        """

    def lane_closed(self) -> None:
        """The lane ended, whoever ended it, and what was queued is lost. Called once, as the last, on the event loop."""


class BulkSink(Protocol):
    """Where a bulk lane of the consumer puts what arrives. Raises nothing."""

    def expected_size(self, cid: Cid) -> int | None:
        """Return the exact size of a block that was asked of this peer; ``None`` refuses it and ends the lane.

        A block that was cancelled meanwhile may be on its way already, so its size is still given. Called from the thread
        that receives.
        """

    def receive_block(self, cid: Cid, data: memoryview) -> None:
        """Take a whole block, unverified: hashing and writing happen here, off the event loop.

        Other lanes wait meanwhile. ``data`` is memory that the lane uses again: its content is good during the call only.
        """

    def lane_closed(self) -> None:
        """The lane ended, whoever ended it. Called once, on the event loop, after the last ``receive_block`` has returned."""


class BulkReceiver(Protocol):
    """The consumer's end of one open bulk lane."""

    def close(self) -> None:
        """End the lane at once. Safe from any thread, the sink's calls included, and twice."""


class BulkLane(Protocol):
    """Direct TLS 1.3 connections beside the libp2p stream, for blocks only."""

    def offer(self, peer_id: PeerId, source: BulkSource, *, want_sender: Callable[[BulkSender], None]) -> BulkOffer | None:
        """Make a one-time offer that ``peer_id`` alone can take up; ``want_sender`` is called on the event loop when it has.

        That may be after the caller has lost interest: it then closes the sender. ``None`` when this node keeps no bulk
        port, has too many lanes or offers open already, or cannot tell that peer from others.
        """

    async def connect(self, host: str, offer: BulkOffer, sink: BulkSink) -> BulkReceiver:
        """Open the lane that ``offer`` describes at ``host``, an IP address; it is open when this returns.

        Raises PeerUnreachableError, and then never calls ``sink``.
        """


class BlockReader(Protocol):
    """Blocks as others may read them. Synchronous and safe to call from any thread."""

    def has(self, cid: Cid) -> bool:
        """Return whether the block is here, at once: a look-up in memory. Only reading tells whether it is intact."""

    def size(self, cid: Cid) -> int:
        """Return the bytes of a block, at once, as :meth:`has` does. Raises NotFoundError."""

    def read_into(self, cid: Cid, buffer: memoryview) -> int:
        """Read a block into the front of ``buffer`` to send it, and return its size in bytes.

        It is verified there, unless it was lately and its file is unchanged since: who gets it verifies it. Raises
        NotFoundError, IntegrityError, StoreError; UsageError where the buffer is too short.
        """

    def read(self, cid: Cid) -> bytes:
        """Return the verified bytes. Raises NotFoundError, IntegrityError, StoreError."""


class BlockStore(BlockReader, Protocol):
    """Blocks that can be added to. Synchronous and safe to call from any thread."""

    def write(self, cid: Cid, data: Buffer) -> None:
        """Store bytes that the caller has verified against ``cid``. Raises DiskFullError, StoreError."""
