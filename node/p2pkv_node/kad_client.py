"""Asks single DHT peers: FIND_NODE, GET_PROVIDERS and ADD_PROVIDER of the Kademlia protocol of libp2p.

Requests to one peer that are under way together share one stream, in order: a py-libp2p node resets DHT streams beyond 12 at
once, and opening a stream costs more than a question. A stream that was reset is tried again, briefly.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Final

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import env_to_send_in_RPC
from multiaddr import Multiaddr

from p2pkv.errors import P2pkvError, PeerUnreachableError
from p2pkv.limits import (
    DHT_CLOSEST,
    DHT_REQUEST_TIMEOUT_S,
    MAX_ADDRESSES_PER_PEER,
    MAX_DHT_MESSAGE_BYTES,
    MAX_DHT_QUEUE_PER_PEER,
)
from p2pkv.ports import PeerAddress, PeerId
from p2pkv.units import KIB
from p2pkv_node.libp2p_errors import translated
from p2pkv_node.network import Libp2pNetwork

logger = logging.getLogger(__name__)

KAD_PROTOCOL: Final = TProtocol("/p2pkv/kad/1.0.0")

# A busy peer resets a stream at once and has room again some milliseconds later.
_RETRY_DELAYS_S: Final = (0.02, 0.05, 0.1)
_READ_BYTES: Final = 64 * KIB
# A peer id is a multihash: 38 bytes for an Ed25519 key, 34 for a hashed one.
_MAX_ID_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer said: who provides the key, and who is closer to it."""

    providers: tuple[PeerAddress, ...] = ()
    closer: tuple[PeerAddress, ...] = ()


@dataclass(slots=True)
class _Request:
    message: bytes
    done: trio.Event = field(default_factory=trio.Event)
    response: Message | None = None


class KadClient:
    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network
        self._queues: dict[ID, deque[_Request]] = {}

    async def find_node(self, peer_id: ID, key: bytes) -> Answer:
        """Ask for peers close to ``key``. Raises PeerUnreachableError."""
        # FIND_NODE is how a node joins, so this message carries our own addresses, signed.
        message = Message(type=Message.MessageType.FIND_NODE, key=key, senderRecord=self._own_record())
        return _answer(await self._ask(peer_id, message))

    async def get_providers(self, peer_id: ID, key: bytes) -> Answer:
        """Ask for providers of ``key`` and for peers close to it. Raises PeerUnreachableError."""
        return _answer(await self._ask(peer_id, Message(type=Message.MessageType.GET_PROVIDERS, key=key)))

    async def add_provider(self, peer_id: ID, key: bytes) -> None:
        """Tell a peer that we provide ``key``, and wait until it confirms. Raises PeerUnreachableError."""
        message = Message(type=Message.MessageType.ADD_PROVIDER, key=key, senderRecord=self._own_record())
        provider = message.providerPeers.add()
        provider.id = self._network.host.get_id().to_bytes()
        provider.addrs.extend(address.to_bytes() for address in self._network.host.get_addrs())
        provider.signedRecord = message.senderRecord
        await self._ask(peer_id, message)

    def _own_record(self) -> bytes:
        envelope, _ = env_to_send_in_RPC(self._network.host)
        return envelope

    async def _ask(self, peer_id: ID, message: Message) -> Message:
        request = _Request(message.SerializeToString())
        queue = self._queues.get(peer_id)
        if queue is None:
            if not self._network.detached.start(partial(self._serve_queue, peer_id)):
                raise PeerUnreachableError("The network was closed.")
            self._queues[peer_id] = deque([request])
        elif len(queue) >= MAX_DHT_QUEUE_PER_PEER:
            raise PeerUnreachableError(f"Too many requests wait for {peer_id}.")
        else:
            queue.append(request)
        await request.done.wait()
        if request.response is None or request.response.type != message.type:
            raise PeerUnreachableError(f"{peer_id} did not answer a DHT request.")
        return request.response

    async def _serve_queue(self, peer_id: ID) -> None:
        queue = self._queues[peer_id]
        try:
            for delay in (*_RETRY_DELAYS_S, None):
                try:
                    await self._exchange(peer_id, queue)
                    return
                except P2pkvError as error:
                    logger.debug("asking %s: %s", peer_id, error)
                    if delay is None or isinstance(error.__cause__, trio.TooSlowError) or not self._connected(peer_id):
                        return
                await trio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries, no secret
        finally:
            if self._queues.get(peer_id) is queue:
                del self._queues[peer_id]
            for request in queue:
                request.done.set()

    def _connected(self, peer_id: ID) -> bool:
        return peer_id in self._network.host.get_connected_peers()

    async def _exchange(self, peer_id: ID, queue: deque[_Request]) -> None:
        """Send what waits and read the answers, in order, until nothing waits. Answered requests leave the queue."""
        stream = await self._network.open_stream(peer_id, KAD_PROTOCOL)
        try:
            with translated(f"asking {peer_id}"):
                received = bytearray()
                while queue:
                    batch = list(queue)
                    with trio.fail_after(DHT_REQUEST_TIMEOUT_S):
                        await stream.write(b"".join(_frame(request.message) for request in batch))
                    for request in batch:
                        with trio.fail_after(DHT_REQUEST_TIMEOUT_S):
                            request.response = await _read_message(stream, received)
                        queue.popleft()
                        request.done.set()
            # A request that comes while this stream is being closed starts a queue of its own.
            del self._queues[peer_id]
        finally:
            with trio.move_on_after(DHT_REQUEST_TIMEOUT_S), translated(f"closing a stream to {peer_id}"):
                await stream.close()


def _frame(message: bytes) -> bytes:
    """Return ``message`` behind its length as an unsigned varint."""
    prefix, rest = bytearray(), len(message)
    while rest > 0x7F:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + message


async def _read_message(stream: INetStream, received: bytearray) -> Message:
    """Take one length-prefixed message off ``stream``; ``received`` keeps what came behind it."""
    while True:
        split = _split_frame(received)
        if split is not None:
            start, end = split
            message = _parse(bytes(received[start:end]))
            del received[:end]
            return message
        data = await stream.read(_READ_BYTES)
        if not data:
            raise PeerUnreachableError("The stream ended before the answer.")
        received += data


def _split_frame(received: bytearray) -> tuple[int, int] | None:
    """Return where the first frame's body starts and ends, ``None`` while it is incomplete. Raises PeerUnreachableError."""
    size = 0
    for index, byte in enumerate(received[:5]):
        size |= (byte & 0x7F) << (7 * index)
        if size > MAX_DHT_MESSAGE_BYTES:
            raise PeerUnreachableError(f"A DHT answer of more than {MAX_DHT_MESSAGE_BYTES} bytes was refused.")
        if not byte & 0x80:
            start = index + 1
            return (start, start + size) if len(received) >= start + size else None
    if len(received) >= 5:
        raise PeerUnreachableError("A DHT answer has no length.")
    return None


def _parse(data: bytes) -> Message:
    """Return the message that ``data`` is. Raises PeerUnreachableError."""
    message = Message()
    try:
        message.ParseFromString(data)
    except DecodeError as error:  # no ValueError, and no kin of libp2p's errors
        raise PeerUnreachableError("A DHT answer is no message.") from error
    return message


def _answer(message: Message) -> Answer:
    # Signed records in answers are passed over: a peer proves its id when it is dialled, and the library takes an older record
    # than the one that it knows for a forgery.
    return Answer(_peers(message.providerPeers), _peers(message.closerPeers))


def _peers(protos: Iterable[Message.Peer]) -> tuple[PeerAddress, ...]:
    peers = []
    for proto in islice(protos, DHT_CLOSEST):
        addresses = []
        for raw in proto.addrs[:MAX_ADDRESSES_PER_PEER]:
            text = _address_text(raw)
            if text is not None:
                addresses.append(text)
        if 0 < len(proto.id) <= _MAX_ID_BYTES:
            peers.append(PeerAddress(_peer_id_text(proto.id), tuple(dict.fromkeys(addresses))))
    return tuple(peers)


# The same few peers fill most answers, and base58 in Python is slow.
@lru_cache(maxsize=1024)
def _address_text(raw: bytes) -> str | None:
    try:
        with translated("reading an address"):
            return str(Multiaddr(raw)).partition("/p2p/")[0]
    except P2pkvError:
        return None


@lru_cache(maxsize=1024)
def _peer_id_text(raw: bytes) -> PeerId:
    return ID(raw).to_base58()
