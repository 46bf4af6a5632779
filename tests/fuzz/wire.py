"""Targets: what peers send. Streams are fed in pieces as well, and have to say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from libp2p.kad_dht.pb.kademlia_pb2 import Message as KadMessage
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from nacl.signing import SigningKey

from p2pkv.errors import PeerUnreachableError, ProtocolError
from p2pkv.exchange.connection import ConsumerConnection, ProviderConnection
from p2pkv.exchange.messages import FrameDecoder, Message, encode
from p2pkv.formats.cid import Cid
from p2pkv.ports import BulkOffer
from p2pkv_node import bulk_greeting, kad_client
from p2pkv_node.bulk_wire import COMMAND_BYTES, EVENT_BYTES, Command, Event, Kind, Order
from tests.fuzz.formats import pieces, seeds_of
from tests.fuzz.target import Target, hold
from tests.support import samples, vectors

Feed = Callable[[bytes], list[Message]]


def _hear(feed: Feed, parts: list[bytes]) -> tuple[list[Message], str]:
    """Return what was said before the peer broke a rule, and which."""
    said: list[Message] = []
    try:
        for part in parts:
            said += feed(part)
    except ProtocolError as error:
        return said, error.message
    return said, ""


def _hear_twice(make: Callable[[], Feed], data: bytes) -> list[Message]:
    said, broken = _hear(make(), pieces(data))
    whole, broken_whole = _hear(make(), [data])
    if broken:
        # Whole, what comes before a fault is not said, since the stream is over; and of two faults a frame's is told first.
        hold((whole, bool(broken_whole)), ([], True))
        raise ProtocolError(broken)
    hold((whole, broken_whole), (said, ""))
    return said


def frames(data: bytes) -> None:
    said = _hear_twice(lambda: FrameDecoder().feed, data)
    hold(FrameDecoder().feed(b"".join(map(encode, said))), said)


_CIDS: Final = tuple(map(Cid.of_block, samples.BLOCKS))
_CHAIN_KEY: Final = samples.manifest().last_chain_key


def consumer(data: bytes) -> None:
    """A provider talks to a consumer that asked for what the golden vectors answer."""

    def make() -> Feed:
        connection = ConsumerConnection("fuzz")
        connection.query([_CHAIN_KEY])
        connection.ask_statements(bytes(samples.KEY.verify_key), ())
        connection.want(_CIDS)
        connection.request_bulk()
        return connection.receive_data

    _hear_twice(make, data)


def provider(data: bytes) -> None:
    _hear_twice(lambda: ProviderConnection("fuzz").receive_data, data)


def kad_frame(data: bytes) -> None:
    """The first frame is the same however much of it is here, and what is read of it is an answer."""
    received = bytearray(data)
    found = kad_client._split_frame(received)
    for end in range(min(len(data), 8)):
        hold(kad_client._split_frame(bytearray(data[:end])) in (None, found), True)
    if found is not None:
        start, end = found
        kad_answer(data[start:end])


def kad_answer(data: bytes) -> None:
    answer = kad_client._answer(kad_client._parse(data))
    for peer in (*answer.providers, *answer.closer):
        hold(kad_client._peer_id_text(ID.from_base58(peer.peer_id).to_bytes()), peer.peer_id)


def _kad_message() -> bytes:
    message = KadMessage(type=KadMessage.MessageType.GET_PROVIDERS, key=b"\x1e\x20" + bytes(32))
    for peers in (message.providerPeers, message.closerPeers):
        peer = peers.add()
        peer.id = bytes.fromhex("002408011220") + bytes(32)
        for address in ("/ip4/127.0.0.1/tcp/4101", "/ip6/::1/tcp/4101", "/dns4/example.org/tcp/4101"):
            peer.addrs.append(Multiaddr(address).to_bytes())
    return message.SerializeToString()


_OFFER: Final = BulkOffer(4002, bytes(32), bytes(range(32)))
_PEER: Final = SigningKey(bytes(range(32)))
_GREETING: Final = bulk_greeting.make_greeting(_OFFER, lambda message: _PEER.sign(message).signature)


def greeting(data: bytes) -> None:
    """What a stranger says on the bulk port: nothing but the one greeting takes the offer up."""
    said = data[: bulk_greeting.GREETING_BYTES].ljust(bulk_greeting.GREETING_BYTES, b"\0")
    bulk_greeting.token_of(said)
    hold(bulk_greeting.takes_up(said, _OFFER, _PEER.verify_key), said == _GREETING)


def event(data: bytes) -> None:
    hold(Event.decode(data).encode(), data)


def command(data: bytes) -> None:
    decoded = Command.decode(data)
    hold(Command.decode(decoded.encode()), decoded)


_FRAMES: Final = tuple(
    bytes.fromhex(entry["hex"]) if "hex" in entry else bytes.fromhex("".join(piece["hex"] for piece in entry["pieces"]))
    for kind in ("vectors", "refused", "skipped", "tolerated")
    for entry in vectors.document("exchange.json")[kind]
    if not entry["name"].startswith("bulk lane")
)
_VECTORS: Final = {name: vector.data for name, vector in vectors.load("exchange.json").items()}
_HELLO: Final = _VECTORS["hello"]
_KAD: Final = _kad_message()

TARGETS: Final = (
    Target("frames", frames, (*_FRAMES, b"".join(_FRAMES[:4])), (ProtocolError,)),
    Target("consumer", consumer, tuple(_HELLO + frame for frame in _FRAMES), (ProtocolError,)),
    Target("provider", provider, tuple(_HELLO + frame for frame in _FRAMES), (ProtocolError,)),
    Target("kad-frame", kad_frame, (kad_client._frame(_KAD), *seeds_of("did-key.json")), (PeerUnreachableError,)),
    Target("kad-answer", kad_answer, (_KAD,), (PeerUnreachableError,)),
    Target("greeting", greeting, (_GREETING,), ()),
    Target("bulk-event", event, (Event(Kind.BLOCK, 7, 3, header=bytes(40)).encode(), bytes(EVENT_BYTES)), (ProtocolError,)),
    Target(
        "bulk-command",
        command,
        (Command(Order.OPEN, 7, 3, 4002, "127.0.0.1", bytes(32), _GREETING).encode(), bytes(COMMAND_BYTES)),
        (ProtocolError,),
    ),
)
