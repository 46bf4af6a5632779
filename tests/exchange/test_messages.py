"""Frames: what is written is read again however it is cut, and whatever else comes is refused before it costs anything."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.artifact.match import Match
from p2pkv.errors import ProtocolError
from p2pkv.exchange.messages import (
    HEADER_BYTES,
    AskStatements,
    Block,
    BulkClosed,
    BulkOffered,
    BulkRequest,
    Cancel,
    DontHave,
    ErrorMessage,
    FrameDecoder,
    Have,
    Hello,
    Matches,
    Message,
    MessageType,
    Query,
    Statements,
    WantBlocks,
    block_header,
    encode,
    encode_cid_lists,
)
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.limits import (
    MAX_CODED_BLOCK_BYTES,
    MAX_CONTROL_BYTES,
    MAX_FRAME_BYTES,
    MAX_QUERY_KEYS,
    MAX_QUERY_MATCHES,
    MAX_SEGMENTS,
    MAX_WANTS_PER_MESSAGE,
)
from p2pkv.units import KIB, MIB
from tests.support import samples, vectors
from tests.support.strategies import cids, digests, texts

VECTORS = {name: vector.data for name, vector in vectors.load("exchange.json").items() if not name.startswith("bulk lane")}
SKIPPED = {entry["name"]: bytes.fromhex(entry["hex"]) for entry in vectors.document("exchange.json")["skipped"]}
TOLERATED = {entry["name"]: entry for entry in vectors.document("exchange.json")["tolerated"]}
STATEMENTS = vectors.load("statements.json")
CIDS = tuple(Cid.of_block(block) for block in samples.BLOCKS)
MANIFEST = samples.envelope().cid
CHAIN_KEY = samples.manifest().last_chain_key
BULK_TOKEN = bytes(range(32))

# The messages of the golden vectors.
MESSAGES: dict[str, Message] = {
    "hello": Hello("p2pkv/1", frozenset({"bulk"})),
    "hello without features": Hello(""),
    "query": Query(1, (CHAIN_KEY,)),
    "matches": Matches(1, (Match(MANIFEST, 1, 1, b"\x01"),)),
    "no matches": Matches(2**31 - 1, ()),
    "ask-statements": AskStatements(3, bytes(samples.KEY.verify_key), (Cid.of_node(STATEMENTS["revocations"].data),)),
    "statements": Statements(3, (STATEMENTS["succession"].data,)),
    "no statements": Statements(0, ()),
    "want": WantBlocks(CIDS),
    "empty want": WantBlocks(()),
    "block": Block(CIDS[0], samples.BLOCKS[0]),
    "dont-have": DontHave(CIDS[1:]),
    "have": Have(CIDS[1:]),
    "cancel": Cancel(CIDS[1:]),
    "bulk-request": BulkRequest(),
    "bulk-offer": BulkOffered(4002, BULK_TOKEN, bytes(range(32, 64))),
    "no bulk lane": BulkOffered(0, bytes(32), bytes(32)),
    "bulk-closed": BulkClosed(),
    "error": ErrorMessage("wire.protocol", "hello twice"),
}

request_ids = st.integers(0, 2**31 - 1)
cid_tuples = st.lists(cids, max_size=5).map(tuple)
names = texts.filter(lambda text: len(text.encode()) <= 256)


@st.composite
def matches(draw: st.DrawFn) -> Match:
    segments = draw(st.integers(1, 40) | st.integers(1, MAX_SEGMENTS))
    size = -(-segments // 8)
    return Match(draw(cids), draw(st.integers(1, segments)), segments, draw(st.binary(min_size=size, max_size=size)))


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, names, st.frozensets(names, max_size=5)),
    st.builds(Query, request_ids, st.lists(digests, max_size=5).map(tuple)),
    st.builds(Matches, request_ids, st.lists(matches(), max_size=3).map(tuple)),
    st.builds(AskStatements, request_ids, digests, cid_tuples),
    st.builds(Statements, request_ids, st.lists(st.binary(max_size=50), max_size=6).map(tuple)),
    st.builds(WantBlocks, cid_tuples),
    st.builds(Block, cids, st.binary(max_size=200)),
    st.builds(DontHave, cid_tuples),
    st.builds(Have, cid_tuples),
    st.builds(Cancel, cid_tuples),
    st.builds(BulkRequest),
    st.builds(BulkClosed),
    st.builds(BulkOffered, st.integers(0, 65_535), digests, digests),
    st.builds(ErrorMessage, names, texts),
)


def feed_in_pieces(decoder: FrameDecoder, data: bytes, cuts: list[int]) -> list[Message]:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [message for start, end in pairwise(bounds) for message in decoder.feed(data[start:end])]


# --- round trips ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(messages, max_size=4), st.lists(st.integers(0, 2000), max_size=6))
def test_what_is_written_is_read_again_however_it_is_cut(sent: list[Message], cuts: list[int]) -> None:
    data = b"".join(map(encode, sent))
    decoder = FrameDecoder()
    assert feed_in_pieces(decoder, data, cuts) == sent
    assert not decoder.incomplete


@pytest.mark.parametrize("name", MESSAGES)
def test_the_three_feeds(name: str) -> None:
    data, message = VECTORS[name], MESSAGES[name]
    assert FrameDecoder().feed(data) == [message]

    decoder = FrameDecoder()
    received = [decoder.feed(data[at : at + 1]) for at in range(len(data))]
    assert received == [[]] * (len(data) - 1) + [[message]]

    with pytest.raises(ProtocolError):
        FrameDecoder().feed(data + b"\xff" * HEADER_BYTES)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_frame_that_is_cut_off_is_incomplete(name: str) -> None:
    data = VECTORS[name]
    for end in range(1, len(data)):
        decoder = FrameDecoder()
        assert decoder.feed(data[:end]) == []
        assert decoder.incomplete


def test_the_largest_messages_fit() -> None:
    key, cid = bytes(32), CIDS[0]
    bitmap = bytes(MAX_SEGMENTS // 8)
    largest: list[Message] = [
        Query(2**31 - 1, (key,) * MAX_QUERY_KEYS),
        Matches(2**31 - 1, (Match(cid, MAX_SEGMENTS, MAX_SEGMENTS, bitmap),) * MAX_QUERY_MATCHES),
        WantBlocks((cid,) * MAX_WANTS_PER_MESSAGE),
        Block(cid, bytes(MAX_CODED_BLOCK_BYTES)),
        Hello("a" * 256, frozenset(f"{number:0256}" for number in range(64))),
        ErrorMessage("a" * 256, "a" * 4096),
    ]
    assert FrameDecoder().feed(b"".join(map(encode, largest))) == largest


def test_a_block_header_stands_before_its_payload() -> None:
    message = Block(CIDS[0], b"payload")
    assert block_header(message.cid, len(message.data)) + message.data == encode(message)


@pytest.mark.parametrize(("count", "frames"), [(0, 0), (1, 1), (1024, 1), (1025, 2), (3000, 3)])
def test_long_lists_travel_in_several_frames(count: int, frames: int) -> None:
    sent = [Cid.of_block(number.to_bytes(4, "little")) for number in range(count)]
    received = FrameDecoder().feed(encode_cid_lists(WantBlocks, sent))
    assert len(received) == frames
    assert [cid for message in received if isinstance(message, WantBlocks) for cid in message.cids] == sent


# --- golden vectors ------------------------------------------------------------------------------------------------------


def test_every_vector_has_its_message() -> None:
    assert set(VECTORS) == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_written_as_its_vector(name: str) -> None:
    assert encode(MESSAGES[name]) == VECTORS[name]


@pytest.mark.parametrize("name", vectors.refused("exchange.json"))
def test_a_frame_that_has_to_be_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(bytes.fromhex(vectors.refused("exchange.json")[name]["hex"]))


@pytest.mark.parametrize("name", SKIPPED)
def test_an_unknown_type_is_skipped_between_two_messages(name: str) -> None:
    data = VECTORS["want"] + SKIPPED[name] + VECTORS["have"]
    expected = [MESSAGES["want"], MESSAGES["have"]]
    assert FrameDecoder().feed(data) == expected
    assert feed_in_pieces(FrameDecoder(), data, list(range(len(data)))) == expected


@pytest.mark.parametrize("name", TOLERATED)
def test_a_field_of_a_later_version_changes_nothing(name: str) -> None:
    entry = TOLERATED[name]
    assert FrameDecoder().feed(bytes.fromhex(entry["hex"])) == [MESSAGES[entry["vector"]]]


# --- bounds --------------------------------------------------------------------------------------------------------------


def frame_header(code: int, length: int) -> bytes:
    return length.to_bytes(4, "big") + bytes((code,))


@pytest.mark.parametrize("kind", MessageType)
def test_a_length_beyond_the_bound_is_refused_by_the_header_alone(kind: MessageType) -> None:
    lists = (MessageType.WANT, MessageType.DONT_HAVE, MessageType.HAVE, MessageType.CANCEL)
    bound = MAX_FRAME_BYTES if kind is MessageType.BLOCK else MAX_CONTROL_BYTES
    bound = CID_BYTES * MAX_WANTS_PER_MESSAGE if kind in lists else bound
    assert FrameDecoder().feed(frame_header(kind, bound)) == []
    with pytest.raises(ProtocolError, match="announces"):
        FrameDecoder().feed(frame_header(kind, bound + 1))


def test_an_unknown_type_may_be_as_large_as_a_block_and_is_not_kept() -> None:
    with pytest.raises(ProtocolError, match="announces"):
        FrameDecoder().feed(frame_header(0x70, MAX_FRAME_BYTES + 1))
    decoder = FrameDecoder()
    piece = bytes(16 * KIB)
    tracemalloc.start()
    try:
        decoder.feed(frame_header(0x70, MAX_FRAME_BYTES))
        for _ in range(MAX_FRAME_BYTES // len(piece)):
            assert decoder.feed(piece) == []
        assert decoder.incomplete
        assert decoder.feed(bytes(MAX_FRAME_BYTES % len(piece)) + VECTORS["have"]) == [MESSAGES["have"]]
        assert tracemalloc.get_traced_memory()[1] < 128 * KIB
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_one_frame_however_many_come() -> None:
    frame = encode(Block(CIDS[0], bytes(256 * KIB)))
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        for _ in range(32):
            for at in range(0, len(frame), 32 * KIB):
                decoder.feed(frame[at : at + 32 * KIB])
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


def test_a_type_that_this_side_does_not_take_is_refused_by_its_header() -> None:
    decoder = FrameDecoder({MessageType.HELLO, MessageType.WANT})
    assert decoder.feed(VECTORS["want"]) == [MESSAGES["want"]]
    with pytest.raises(ProtocolError, match="block message is not for this side"):
        decoder.feed(frame_header(MessageType.BLOCK, MAX_FRAME_BYTES))


def test_after_a_broken_rule_nothing_is_taken_any_more() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(VECTORS["want"] + b"\xff" * HEADER_BYTES)
    for _ in range(2):
        with pytest.raises(ProtocolError):
            decoder.feed(VECTORS["want"])


# --- garbage -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_garbage_raises_nothing_but_a_protocol_error(data: bytes) -> None:
    try:
        FrameDecoder().feed(data)
    except ProtocolError:
        return


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(MessageType), st.binary(max_size=120))
def test_a_garbled_body_raises_nothing_but_a_protocol_error(kind: MessageType, body: bytes) -> None:
    try:
        FrameDecoder().feed(frame_header(kind, len(body)) + body)
    except ProtocolError:
        return


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(VECTORS.values())), st.data())
def test_a_flipped_bit_gives_another_message_or_a_protocol_error(frame: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(frame) * 8 - 1))
    flipped = bytearray(frame)
    flipped[at // 8] ^= 1 << at % 8
    try:
        received = FrameDecoder().feed(bytes(flipped))
    except ProtocolError:
        return
    assert received != FrameDecoder().feed(frame)
