"""Consumer and provider face to face: bytes of one are fed to the other, in plain functions."""

from __future__ import annotations

import pytest

from p2pkv.artifact.match import Match
from p2pkv.errors import IntegrityError, ProtocolError
from p2pkv.exchange.connection import BULK, FROM_CONSUMER, FROM_PROVIDER, ConsumerConnection, ProviderConnection
from p2pkv.exchange.messages import (
    AskStatements,
    Block,
    BulkClosed,
    BulkOffered,
    BulkRequest,
    Cancel,
    DontHave,
    ErrorMessage,
    Have,
    Hello,
    Matches,
    Message,
    MessageType,
    Query,
    Statements,
    WantBlocks,
    encode,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_STATEMENT_BYTES, MAX_STATEMENTS, MAX_UNSENT_BYTES, MAX_WANTS_PER_PEER

DATA = {Cid.of_block(bytes((number,))): bytes((number,)) for number in range(12)}
CIDS = list(DATA)
A, B, C = CIDS[:3]
OFFER = BulkOffered(4002, bytes(range(32)), bytes(32))


def block(cid: Cid) -> bytes:
    return encode(Block(cid, DATA[cid]))


class Pair:
    """Both ends, past their hello."""

    def __init__(self) -> None:
        self.consumer = ConsumerConnection("consumer", frozenset({BULK}))
        self.provider = ProviderConnection("provider", frozenset({BULK, "later"}))
        self.consumer.receive_data(self.provider.data_to_send())
        self.provider.receive_data(self.consumer.data_to_send())

    def to_provider(self) -> list[Message]:
        return self.provider.receive_data(self.consumer.data_to_send())

    def to_consumer(self) -> list[Message]:
        return self.consumer.receive_data(self.provider.data_to_send())


@pytest.fixture
def pair() -> Pair:
    return Pair()


# --- hello ---------------------------------------------------------------------------------------------------------------


def test_both_sides_say_hello_first_and_know_each_other_then() -> None:
    consumer, provider = ConsumerConnection("c", frozenset({BULK})), ProviderConnection("p")
    assert provider.receive_data(consumer.data_to_send()) == [Hello("c", frozenset({BULK}))]
    assert consumer.receive_data(provider.data_to_send()) == [Hello("p")]
    assert provider.remote == Hello("c", frozenset({BULK}))
    assert consumer.remote == Hello("p")
    assert consumer.data_to_send() == provider.data_to_send() == b""


def test_wants_may_follow_the_hello_in_one_breath() -> None:
    consumer, provider = ConsumerConnection("c"), ProviderConnection("p")
    consumer.want([A, B])
    messages = provider.receive_data(consumer.data_to_send())
    assert messages == [Hello("c"), WantBlocks((A, B))]


@pytest.mark.parametrize("message", [BulkRequest(), ErrorMessage("internal", ""), WantBlocks((A,))])
def test_anything_before_the_hello_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match="before hello"):
        ProviderConnection("p").receive_data(encode(message))


def test_a_second_hello_is_refused(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="second hello"):
        pair.provider.receive_data(encode(Hello("again")))


# --- who may send what ---------------------------------------------------------------------------------------------------

EXAMPLES: dict[MessageType, Message] = {
    MessageType.HELLO: Hello("x"),
    MessageType.QUERY: Query(1, ()),
    MessageType.MATCHES: Matches(1, ()),
    MessageType.ASK_STATEMENTS: AskStatements(1, bytes(32), ()),
    MessageType.STATEMENTS: Statements(2, ()),
    MessageType.WANT: WantBlocks((A,)),
    MessageType.BLOCK: Block(A, DATA[A]),
    MessageType.DONT_HAVE: DontHave((A,)),
    MessageType.HAVE: Have((A,)),
    MessageType.CANCEL: Cancel((A,)),
    MessageType.BULK_REQUEST: BulkRequest(),
    MessageType.BULK_OFFER: OFFER,
    MessageType.BULK_CLOSED: BulkClosed(),
    MessageType.ERROR: ErrorMessage("internal", ""),
}


def test_every_type_is_for_somebody() -> None:
    assert set(MessageType) == set(EXAMPLES) == FROM_CONSUMER | FROM_PROVIDER
    assert {MessageType.HELLO, MessageType.ERROR} == FROM_CONSUMER & FROM_PROVIDER


@pytest.mark.parametrize("kind", sorted(set(MessageType) - {MessageType.HELLO}))
def test_the_table_of_who_may_send_what(pair: Pair, kind: MessageType) -> None:
    pair.consumer.query([])
    pair.consumer.ask_statements(bytes(32), [])
    pair.consumer.want([A])
    pair.consumer.request_bulk()
    for connection, allowed in ((pair.consumer, FROM_PROVIDER), (pair.provider, FROM_CONSUMER)):
        frame = encode(EXAMPLES[kind])
        if kind in allowed:
            assert connection.receive_data(frame) == [EXAMPLES[kind]]
        else:
            with pytest.raises(ProtocolError, match="not for this side"):
                connection.receive_data(frame[:5])  # the header is enough


@pytest.mark.parametrize("answer", [Matches(1, ()), Statements(1, ()), Block(A, DATA[A]), DontHave((A,)), OFFER])
def test_an_answer_to_nothing_is_refused(pair: Pair, answer: Message) -> None:
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(encode(answer))


def test_after_a_broken_rule_the_stream_is_of_no_more_use(pair: Pair) -> None:
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(block(A))
    pair.consumer.want([A])
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(block(A))


def test_unknown_messages_are_skipped(pair: Pair) -> None:
    later = (3).to_bytes(4, "big") + b"\x70abc"
    pair.consumer.want([A])
    assert pair.consumer.receive_data(later + block(A) + later) == [Block(A, DATA[A])]
    assert pair.provider.receive_data(later) == []


# --- queries -------------------------------------------------------------------------------------------------------------


def test_a_query_and_its_answer(pair: Pair) -> None:
    keys = [bytes((number,)) * 32 for number in range(3)]
    request = pair.consumer.query(keys)
    assert pair.to_provider() == [Query(request, tuple(keys))]
    match = Match(A, 2, 9, bytes(2))
    pair.provider.answer(request, [match])
    assert pair.to_consumer() == [Matches(request, (match,))]


def test_queries_are_told_apart_and_answered_once_each(pair: Pair) -> None:
    first, second = pair.consumer.query([]), pair.consumer.query([])
    assert first != second
    pair.provider.answer(second, [])
    pair.provider.answer(first, [])
    assert pair.to_consumer() == [Matches(second, ()), Matches(first, ())]
    pair.provider.answer(first, [])
    with pytest.raises(ProtocolError, match="not asked"):
        pair.to_consumer()


def test_a_peer_that_asks_on_and_reads_nothing_is_cut_off(pair: Pair) -> None:
    matches = (Match(A, 1, 1, b"\x00"),) * 16
    size = len(encode(Matches(1000, matches)))
    for _ in range(MAX_UNSENT_BYTES // size):
        request = pair.consumer.query([])
        pair.to_provider()
        pair.provider.answer(request, matches)
    pair.provider.answer(0, matches)  # one more, and the bound is passed
    pair.consumer.query([])
    with pytest.raises(ProtocolError, match="not read"):
        pair.to_provider()


# --- statements ---------------------------------------------------------------------------------------------------------


def test_statements_are_asked_for_and_told_once(pair: Pair) -> None:
    request = pair.consumer.ask_statements(bytes(32), [A])
    assert pair.to_provider() == [AskStatements(request, bytes(32), (A,))]
    pair.provider.tell_statements(request, [b"one", b"two"])
    assert pair.to_consumer() == [Statements(request, (b"one", b"two"))]
    pair.provider.tell_statements(request, [])
    with pytest.raises(ProtocolError, match="not made"):
        pair.to_consumer()


def test_statements_are_no_answer_to_a_query(pair: Pair) -> None:
    pair.provider.tell_statements(pair.consumer.query([]), [])
    with pytest.raises(ProtocolError, match="not made"):
        pair.to_consumer()


def test_what_does_not_fit_one_answer_is_left_out(pair: Pair) -> None:
    large, small = bytes(MAX_STATEMENT_BYTES), b"small"
    request = pair.consumer.ask_statements(bytes(32), [])
    pair.provider.tell_statements(request, [small, large, large, large, small])
    assert pair.to_consumer() == [Statements(request, (small, large, small))]
    request = pair.consumer.ask_statements(bytes(32), [])
    most = bytes(MAX_STATEMENT_BYTES - 64)
    pair.provider.tell_statements(request, [most, most, *[b""] * 9])
    assert pair.to_consumer() == [Statements(request, (most, most, *[b""] * (MAX_STATEMENTS - 2)))]


def test_a_peer_that_asks_on_and_reads_no_statements_is_cut_off(pair: Pair) -> None:
    for _ in range(MAX_UNSENT_BYTES // MAX_STATEMENT_BYTES):
        request = pair.consumer.ask_statements(bytes(32), [])
        pair.to_provider()
        pair.provider.tell_statements(request, [bytes(MAX_STATEMENT_BYTES)])
    pair.consumer.ask_statements(bytes(32), [])
    with pytest.raises(ProtocolError, match="not read"):
        pair.to_provider()


# --- wants ---------------------------------------------------------------------------------------------------------------


def test_wants_and_cancels_come_out_in_the_order_they_were_said(pair: Pair) -> None:
    pair.consumer.want([B, A])
    pair.consumer.cancel([A])
    pair.consumer.want([C])
    assert pair.to_provider() == [WantBlocks((B, A)), Cancel((A,)), WantBlocks((C,))]


def test_a_peer_that_wants_on_and_reads_no_answer_is_refused(pair: Pair) -> None:
    cids = [Cid.of_block(number.to_bytes(4, "little")) for number in range(1000)]
    for _ in range(MAX_UNSENT_BYTES // (36 * len(cids)) + 1):
        pair.provider.receive_data(encode(WantBlocks(tuple(cids))))
        pair.provider.dont_have(cids)
    with pytest.raises(ProtocolError, match="not read"):
        pair.provider.receive_data(encode(WantBlocks(tuple(cids))))


def test_a_block_comes_once_for_each_time_it_was_asked(pair: Pair) -> None:
    pair.consumer.want([A])
    assert pair.consumer.receive_data(block(A)) == [Block(A, DATA[A])]
    pair.consumer.want([A])
    pair.consumer.receive_data(block(A))
    with pytest.raises(ProtocolError, match="not asked for"):
        pair.consumer.receive_data(block(A))


@pytest.mark.parametrize("answer", [block(A), encode(DontHave((A,)))])
def test_a_cancel_may_cross_one_answer_and_no_second_one(pair: Pair, answer: bytes) -> None:
    pair.consumer.want([A])
    pair.consumer.cancel([A])
    pair.consumer.receive_data(answer)
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(answer)


def test_asked_cancelled_and_asked_again_gives_up_to_two_answers(pair: Pair) -> None:
    pair.consumer.want([A])
    pair.consumer.cancel([A])
    pair.consumer.want([A])
    pair.consumer.receive_data(block(A) + block(A))
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(block(A))


def test_cancelling_what_was_not_asked_entitles_to_nothing(pair: Pair) -> None:
    pair.consumer.cancel([A])
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(block(A))


def test_what_a_broken_lane_swallowed_is_asked_again_and_may_come_twice(pair: Pair) -> None:
    pair.consumer.want([A])
    assert pair.to_provider() == [WantBlocks((A,))]  # the lane breaks now, and the provider turns to the stream
    pair.consumer.want([A])  # the consumer has seen the lane break, and nothing yet on the stream
    assert pair.to_provider() == [WantBlocks((A,))]
    pair.consumer.receive_data(block(A))
    pair.consumer.receive_data(block(A))


def test_the_memory_of_late_answers_is_bounded(pair: Pair) -> None:
    cids = [Cid.of_block(number.to_bytes(4, "little")) for number in range(MAX_WANTS_PER_PEER + 1)]
    for cid in cids:
        pair.consumer.want([cid])
        pair.consumer.cancel([cid])
    pair.consumer.receive_data(encode(DontHave((cids[1],))))
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(encode(DontHave((cids[0],))))


# --- dont-have and have --------------------------------------------------------------------------------------------------


def test_a_have_is_pushed_after_a_dont_have_once(pair: Pair) -> None:
    pair.consumer.want([A, B])
    pair.to_provider()
    pair.provider.dont_have([A, B])
    assert pair.to_consumer() == [DontHave((A, B))]
    pair.provider.gained([C, A, A])
    assert pair.to_consumer() == [Have((A,))]
    pair.provider.gained([A])
    assert pair.to_consumer() == []


def test_no_have_for_what_was_cancelled_or_asked_again(pair: Pair) -> None:
    pair.consumer.want([A, B])
    pair.to_provider()
    pair.provider.dont_have([A, B])
    pair.to_consumer()
    pair.consumer.cancel([A])
    pair.consumer.want([B])
    pair.to_provider()
    pair.provider.gained([A, B])
    assert pair.to_consumer() == []


def test_a_have_that_nobody_waits_for_is_harmless(pair: Pair) -> None:
    assert pair.consumer.receive_data(encode(Have((A,)))) == [Have((A,))]


def test_the_memory_of_what_is_lacking_is_bounded(pair: Pair) -> None:
    cids = [Cid.of_block(number.to_bytes(4, "little")) for number in range(MAX_WANTS_PER_PEER + 1)]
    for start in range(0, len(cids), 1000):
        pair.consumer.want(cids[start : start + 1000])
        pair.to_provider()
        pair.provider.dont_have(cids[start : start + 1000])
    pair.to_consumer()
    pair.provider.gained(cids)
    received = [cid for message in pair.to_consumer() if isinstance(message, Have) for cid in message.cids]
    assert received == cids[1:]


# --- bulk lane and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offer", [OFFER, None])
def test_one_request_gets_one_offer(pair: Pair, offer: BulkOffered | None) -> None:
    pair.consumer.request_bulk()
    assert pair.to_provider() == [BulkRequest()]
    pair.provider.offer_bulk(offer)
    assert pair.to_consumer() == [offer or BulkOffered(0, bytes(32), bytes(32))]
    pair.provider.offer_bulk(offer)
    with pytest.raises(ProtocolError, match="offer"):
        pair.to_consumer()


def test_a_block_that_came_over_the_lane_does_not_come_again(pair: Pair) -> None:
    pair.consumer.want([A])
    pair.consumer.take_bulk_block(A)
    with pytest.raises(ProtocolError):
        pair.consumer.receive_data(block(A))


def test_a_side_that_gives_up_says_why(pair: Pair) -> None:
    pair.provider.fail(IntegrityError("ä" * 5000))
    assert pair.to_consumer() == [ErrorMessage("integrity.hash", "ä" * 1024)]
    pair.consumer.fail(ProtocolError("enough"))
    assert pair.to_provider() == [ErrorMessage("wire.protocol", "enough")]
