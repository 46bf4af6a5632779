"""Attacks by peers on the exchange: frames that claim, lie, repeat, answer what was not asked, or never end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from p2pkv.errors import P2pkvError, ProtocolError
from p2pkv.exchange.connection import ConsumerConnection, ProviderConnection
from p2pkv.exchange.messages import (
    Block,
    BulkOffered,
    Cancel,
    DontHave,
    FrameDecoder,
    Hello,
    Matches,
    MessageType,
    Query,
    Statements,
    WantBlocks,
    encode,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.limits import (
    MAX_FRAME_BYTES,
    MAX_QUERY_KEYS,
    MAX_QUERY_MATCHES,
    MAX_SEGMENTS,
    MAX_STATEMENT_BYTES,
    MAX_STATEMENTS,
    MAX_WANTS_PER_MESSAGE,
)
from p2pkv.units import KIB, MIB
from tests.hostile.attack import Attack, assert_refused, given

HELLO = encode(Hello("stranger"))
A, B = Cid.of_block(b"a"), Cid.of_block(b"b")
MANY = tuple(Cid.of_block(number.to_bytes(4, "big")) for number in range(MAX_WANTS_PER_MESSAGE))
KEY = bytes(32)
# What a driver reads at once.
PIECE = 64 * KIB


def frame(kind: int, body: bytes, *, says: int | None = None) -> bytes:
    return (len(body) if says is None else says).to_bytes(4, "big") + bytes((kind,)) + body


def node(kind: MessageType, value: dagcbor.Value) -> bytes:
    return frame(kind, dagcbor.encode(value))


def match(**changes: dagcbor.Value) -> bytes:
    fields: dict[str, dagcbor.Value] = {
        "manifest": Cid.of_node(b"\xa0"),
        "matched": 1,
        "segments": 1,
        "held": b"\x01",
        **changes,
    }
    return node(MessageType.MATCHES, {"request": 1, "matches": [fields]})


def offer(**changes: dagcbor.Value) -> bytes:
    return node(MessageType.BULK_OFFER, {"port": 4002, "token": KEY, "fingerprint": KEY, **changes})


OF_FRAMES: dict[str, bytes] = {
    **{f"a {kind.name} of gigabytes": frame(kind, b"", says=2**32 - 1) for kind in MessageType},
    "an unknown frame of gigabytes": frame(0x70, b"", says=2**32 - 1),
    "an unknown frame larger than any": frame(0x70, b"", says=MAX_FRAME_BYTES + 1),
    "a block without a CID": frame(MessageType.BLOCK, b""),
    "a block with half a CID": frame(MessageType.BLOCK, A.binary[:20]),
    "a list of a CID and a half": frame(MessageType.WANT, A.binary + A.binary[:18]),
    "a list of more CIDs than any": frame(MessageType.WANT, A.binary * (MAX_WANTS_PER_MESSAGE + 1)),
    "a hello that is empty": frame(MessageType.HELLO, b""),
    "a hello that is a list": node(MessageType.HELLO, []),
    "a hello of another version": node(MessageType.HELLO, {"version": 2, "agent": "", "features": []}),
    "a hello of a version that is true": node(MessageType.HELLO, {"version": True, "agent": "", "features": []}),
    "a hello with a long name": node(MessageType.HELLO, {"version": 1, "agent": "a" * 257, "features": []}),
    "a hello with too many features": node(MessageType.HELLO, {"version": 1, "agent": "", "features": [""] * 65}),
    "a hello with a feature that is bytes": node(MessageType.HELLO, {"version": 1, "agent": "", "features": [b""]}),
    "a hello that is deep": frame(MessageType.HELLO, b"\x81" * 200_000),
    "a hello of many items": frame(MessageType.HELLO, b"\x9a\x00\x03\x00\x00" + bytes(0x30000)),
    "a hello with a float": frame(MessageType.HELLO, bytes.fromhex("a36561676e740067766572fb3ff0000000000000")),
    "a query without keys": node(MessageType.QUERY, {"request": 1}),
    "a query with a short key": node(MessageType.QUERY, {"request": 1, "keys": [bytes(31)]}),
    "a query with too many keys": node(MessageType.QUERY, {"request": 1, "keys": [KEY] * (MAX_QUERY_KEYS + 1)}),
    "a query of number -1": node(MessageType.QUERY, {"request": -1, "keys": []}),
    "a query of number 2^31": node(MessageType.QUERY, {"request": 2**31, "keys": []}),
    "matches beyond any": node(MessageType.MATCHES, {"request": 1, "matches": [{}] * (MAX_QUERY_MATCHES + 1)}),
    "a match of no segments": match(segments=0, held=b""),
    "a match of more segments than any": match(segments=MAX_SEGMENTS + 1, held=bytes(MAX_SEGMENTS // 8 + 1)),
    "a match of 2^63 - 1 segments": match(segments=2**63 - 1),
    "a match of more than it has": match(matched=2),
    "a match of nothing": match(matched=0),
    "a match whose bits are too few": match(held=b""),
    "a match whose bits are too many": match(held=bytes(100)),
    "a match that names no manifest": match(manifest=KEY),
    "statements beyond any": node(MessageType.STATEMENTS, {"request": 1, "statements": [b""] * (MAX_STATEMENTS + 1)}),
    "a statement larger than any": node(
        MessageType.STATEMENTS, {"request": 1, "statements": [bytes(MAX_STATEMENT_BYTES + 1)]}
    ),
    "a statement that is a map": node(MessageType.STATEMENTS, {"request": 1, "statements": [{}]}),
    "an offer at port 65536": offer(port=65_536),
    "an offer at port -1": offer(port=-1),
    "an offer with a short token": offer(token=bytes(31)),
    "an offer with a long fingerprint": offer(fingerprint=bytes(33)),
    "an error of a long code": node(MessageType.ERROR, {"code": "a" * 257, "message": ""}),
    "an error of a long text": node(MessageType.ERROR, {"code": "", "message": "a" * 4097}),
    "garbage": b"\xff" * 100,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("16030102000100 01fc0303") + bytes(32),
}


def to_consumer(frames: bytes) -> None:
    """A consumer that has asked for one block, one answer, the statements of one publisher and no lane."""
    connection = ConsumerConnection("victim")
    connection.query([KEY])
    connection.ask_statements(KEY, ())
    connection.want([A])
    connection.receive_data(HELLO)
    feed(connection.receive_data, frames)


def to_provider(frames: bytes) -> None:
    """A provider whose peer reads nothing of what it is answered."""
    connection = ProviderConnection("victim")
    connection.receive_data(HELLO)

    def receive(piece: bytes) -> None:
        for message in connection.receive_data(piece):
            if isinstance(message, WantBlocks):
                connection.dont_have(message.cids)
            elif isinstance(message, Query):
                connection.answer(message.request, ())

    feed(receive, frames)


def feed(receive: Callable[[bytes], object], frames: bytes) -> None:
    for at in range(0, len(frames), PIECE):
        receive(frames[at : at + PIECE])


def joined(frames: Iterable[bytes]) -> bytes:
    return b"".join(frames)


ATTACKS = [
    *(Attack(name, lambda data: FrameDecoder().feed(data), ProtocolError, given(data)) for name, data in OF_FRAMES.items()),
    *(
        Attack(f"to a consumer: {name}", to_consumer, ProtocolError, given(data))
        for name, data in {
            "a second hello": HELLO,
            "a want": encode(WantBlocks((A,))),
            "a block that was not asked for": encode(Block(B, b"b")),
            "a block twice": encode(Block(A, b"a")) * 2,
            "a refusal of what was not asked for": encode(DontHave((B,))),
            "a refusal and then a block": encode(DontHave((A,))) + encode(Block(A, b"a")),
            "a refusal of one thing twice": encode(DontHave((A, A))),
            "an answer to nothing": encode(Matches(3, ())),
            "an answer twice": encode(Matches(1, ())) * 2,
            "statements twice": encode(Statements(2, ())) * 2,
            "statements for a query": encode(Statements(1, ())),
            "matches for statements": encode(Matches(2, ())),
            "statements of nobody": encode(Statements(3, ())),
            "an offer that was not asked for": encode(BulkOffered(1, KEY, KEY)),
            "unknown frames and then a lie": frame(0x70, bytes(MIB)) * 32 + encode(Block(B, b"b")),
            "pushes of what nobody lacked, and then a lie": frame(MessageType.HAVE, A.binary) * 1_000 + HELLO,
        }.items()
    ),
    *(
        Attack(f"to a provider: {name}", to_provider, ProtocolError, given(data))
        for name, data in {
            "a second hello": HELLO,
            "a block": encode(Block(A, b"a")),
            "an answer": encode(Matches(1, ())),
            "statements": encode(Statements(1, ())),
            "wants without end": encode(WantBlocks(MANY)) * 32,
            "small wants and queries without end": (encode(WantBlocks(MANY[:64])) + encode(Query(1, ()))) * 600,
            "wants that are cancelled, without end": (encode(WantBlocks(MANY)) + encode(Cancel(MANY))) * 32,
        }.items()
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


@pytest.mark.parametrize("kind", MessageType)
def test_a_frame_that_never_ends_takes_no_more_than_its_bound(kind: MessageType) -> None:
    """It is awaited, byte by byte; what it takes is what it may take, and what follows it is refused."""

    def drip() -> None:
        decoder = FrameDecoder()
        decoder.feed(frame(kind, b"", says=CID_BYTES))
        for byte in A.binary[:-1]:
            assert decoder.feed(bytes((byte,))) == []
        decoder.feed(b"\xff" * PIECE)

    assert_refused(Attack("", drip, ProtocolError))


def test_whoever_lied_is_not_heard_again() -> None:
    connection = ProviderConnection("victim")
    for data in (HELLO + HELLO, encode(WantBlocks((A,))), b""):
        with pytest.raises(P2pkvError) as caught:
            connection.receive_data(data)
        assert caught.value.code == "wire.protocol"


def test_what_the_attacks_change_is_good() -> None:
    assert len(FrameDecoder().feed(match() + offer())) == 2
    to_consumer(encode(Block(A, b"a")) + encode(Matches(1, ())))
    to_provider(encode(WantBlocks(MANY)))
