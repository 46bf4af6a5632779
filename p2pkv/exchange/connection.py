"""The two ends of one exchange stream.

Both ends say hello first. After it, :data:`FROM_CONSUMER` and :data:`FROM_PROVIDER` are the law of who may send what, and a
provider answers only what it was asked. Anything else is a :class:`~p2pkv.errors.ProtocolError`, after which the stream is of
no more use. Any other exception that a peer's bytes cause is a bug.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from p2pkv.artifact.match import Match
from p2pkv.errors import P2pkvError, ProtocolError
from p2pkv.exchange.messages import (
    TOKEN_BYTES,
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
    encode,
    encode_cid_lists,
)
from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.limits import MAX_CONTROL_BYTES, MAX_STATEMENTS, MAX_UNSENT_BYTES, MAX_WANTS_PER_PEER

BULK: Final = "bulk"
"""Feature name of a side that can use the bulk lane."""

# Of an answer with statements, what is not statements: the fields, and a head of five bytes for each.
_ANSWER_OVERHEAD_BYTES: Final = 128

FROM_PROVIDER: Final = frozenset(
    {
        MessageType.HELLO,
        MessageType.MATCHES,
        MessageType.STATEMENTS,
        MessageType.BLOCK,
        MessageType.DONT_HAVE,
        MessageType.HAVE,
        MessageType.BULK_OFFER,
        MessageType.ERROR,
    }
)
FROM_CONSUMER: Final = frozenset(
    {
        MessageType.HELLO,
        MessageType.QUERY,
        MessageType.ASK_STATEMENTS,
        MessageType.WANT,
        MessageType.CANCEL,
        MessageType.BULK_REQUEST,
        MessageType.BULK_CLOSED,
        MessageType.ERROR,
    }
)


class _Connection:
    """What both ends share: framing, the hello, and the bytes that wait to be sent."""

    def __init__(self, agent: str, features: frozenset[str], accepted: frozenset[MessageType]) -> None:
        self._decoder = FrameDecoder(accepted)
        self._outgoing = bytearray(encode(Hello(agent, features)))
        self._broken = ""
        self.remote: Hello | None = None

    def data_to_send(self) -> bytes:
        """Return the bytes that wait to be sent, and forget them."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def fail(self, error: P2pkvError) -> None:
        """Tell the peer why this side gives up."""
        self._send(ErrorMessage(error.code, error.message[:1024]))  # characters, of up to four bytes each

    def receive_data(self, data: bytes) -> list[Message]:
        """Return the messages that are now whole, the hello among them, all of them legal. Raises ProtocolError."""
        if self._broken:
            raise ProtocolError(self._broken)
        try:
            messages = self._decoder.feed(data)
            for message in messages:
                if self.remote is None:
                    if not isinstance(message, Hello):
                        raise ProtocolError(f"{type(message).__name__} before hello")
                    self.remote = message
                elif isinstance(message, Hello):
                    raise ProtocolError("a second hello")
                else:
                    self._take(message)
        except ProtocolError as error:
            self._broken = error.message
            raise
        return messages

    def _take(self, message: Message) -> None:
        """Work one message of the other side into the state. Raises ProtocolError."""
        raise AssertionError("each end has its own")

    def _send(self, message: Message) -> None:
        self._outgoing += encode(message)


class ConsumerConnection(_Connection):
    """The end that wants blocks. Calls queue bytes; :meth:`receive_data` returns what the provider said, checked."""

    def __init__(self, agent: str, features: frozenset[str] = frozenset()) -> None:
        super().__init__(agent, features, FROM_PROVIDER)
        self._requests = 0
        self._open_queries: set[int] = set()
        self._open_asks: set[int] = set()
        self._open_bulk_requests = 0
        self._wanted: set[Cid] = set()
        # Each want entitles the provider to one answer. What was cancelled, or asked again after a lane broke, may have been
        # answered already: so many more answers are taken without complaint. The oldest are forgotten.
        self._late: OrderedDict[Cid, int] = OrderedDict()

    def query(self, keys: Sequence[bytes]) -> int:
        """Ask for manifests that match; return the request's number."""
        self._requests += 1
        self._open_queries.add(self._requests)
        self._send(Query(self._requests, tuple(keys)))
        return self._requests

    def ask_statements(self, publisher: bytes, known: Sequence[Cid]) -> int:
        """Ask what the publisher with this 32-byte key says beyond ``known``; return the request's number."""
        self._requests += 1
        self._open_asks.add(self._requests)
        self._send(AskStatements(self._requests, publisher, tuple(known[:MAX_STATEMENTS])))
        return self._requests

    def want(self, cids: Sequence[Cid]) -> None:
        """Ask for ``cids``, also for those that were asked for before."""
        for cid in cids:
            if cid in self._wanted:
                self._expect_late(cid)
            self._wanted.add(cid)
        self._outgoing += encode_cid_lists(WantBlocks, cids)

    def cancel(self, cids: Sequence[Cid]) -> None:
        """Give ``cids`` up; an answer may cross this on its way."""
        for cid in cids:
            if cid in self._wanted:
                self._wanted.discard(cid)
                self._expect_late(cid)
        self._outgoing += encode_cid_lists(Cancel, cids)

    def request_bulk(self) -> None:
        self._open_bulk_requests += 1
        self._send(BulkRequest())

    def close_bulk(self) -> None:
        """Say that no lane is read any more, ahead of the wants that shall come over the stream."""
        self._send(BulkClosed())

    def take_bulk_block(self, cid: Cid) -> None:
        """Note that ``cid`` has come over the bulk lane, which itself takes only what was asked."""
        self._settle(cid)

    def _take(self, message: Message) -> None:
        match message:
            case Block(cid):
                if not self._settle(cid):
                    raise ProtocolError(f"block {cid} was not asked for")
            case DontHave(cids):
                for cid in cids:
                    if not self._settle(cid):
                        raise ProtocolError(f"{cid} is denied, but was not asked for")
            case Matches(request, _):
                if request not in self._open_queries:
                    raise ProtocolError(f"an answer to query {request}, which was not asked")
                self._open_queries.discard(request)
            case Statements(request, _):
                if request not in self._open_asks:
                    raise ProtocolError(f"statements for request {request}, which was not made")
                self._open_asks.discard(request)
            case BulkOffered():
                if not self._open_bulk_requests:
                    raise ProtocolError("an offer of a bulk lane, which was not asked for")
                self._open_bulk_requests -= 1
            case _:
                pass

    def _settle(self, cid: Cid) -> bool:
        """Take note of one answer to a want; tell whether one may come."""
        if cid in self._wanted:
            self._wanted.discard(cid)
            return True
        late = self._late.get(cid, 0)
        if late > 1:
            self._late[cid] = late - 1
        elif late:
            del self._late[cid]
        return late > 0

    def _expect_late(self, cid: Cid) -> None:
        self._late[cid] = self._late.pop(cid, 0) + 1
        while len(self._late) > MAX_WANTS_PER_PEER:
            self._late.popitem(last=False)


class ProviderConnection(_Connection):
    """The end that serves. Wants and cancels come out of :meth:`receive_data`; the driver answers each want once."""

    def __init__(self, agent: str, features: frozenset[str] = frozenset()) -> None:
        super().__init__(agent, features, FROM_CONSUMER)
        self._lacking: OrderedDict[Cid, None] = OrderedDict()

    def _take(self, message: Message) -> None:
        match message:
            case WantBlocks(cids):
                self._check_unsent()
                for cid in cids:
                    self._lacking.pop(cid, None)
            case Cancel(cids):
                for cid in cids:
                    self._lacking.pop(cid, None)
            case Query() | AskStatements() | BulkRequest():
                self._check_unsent()
            case _:
                pass

    def _check_unsent(self) -> None:
        if len(self._outgoing) > MAX_UNSENT_BYTES:
            raise ProtocolError(f"more questions, while {MAX_UNSENT_BYTES} bytes of answers are not read")

    def answer(self, request: int, matches: Sequence[Match]) -> None:
        self._send(Matches(request, tuple(matches)))

    def tell_statements(self, request: int, statements: Sequence[bytes]) -> None:
        """Answer with as many of ``statements`` as one message holds; who knows these can ask for the rest."""
        fitting: list[bytes] = []
        room = MAX_CONTROL_BYTES - _ANSWER_OVERHEAD_BYTES
        for data in statements[:MAX_STATEMENTS]:
            if len(data) <= room:
                room -= len(data)
                fitting.append(data)
        self._send(Statements(request, tuple(fitting)))

    def dont_have(self, cids: Sequence[Cid]) -> None:
        """Say that ``cids`` are not here, and remember to push a have when they come."""
        for cid in cids:
            self._lacking[cid] = None
        while len(self._lacking) > MAX_WANTS_PER_PEER:
            self._lacking.popitem(last=False)
        self._outgoing += encode_cid_lists(DontHave, cids)

    def gained(self, cids: Iterable[Cid]) -> None:
        """Push a have for those of ``cids`` that this peer asked for in vain."""
        news = [cid for cid in dict.fromkeys(cids) if cid in self._lacking]
        for cid in news:
            del self._lacking[cid]
        self._outgoing += encode_cid_lists(Have, news)

    def offer_bulk(self, offer: BulkOffered | None) -> None:
        """Answer a bulk request; ``None`` says that there is no lane here."""
        self._send(offer or BulkOffered(0, bytes(TOKEN_BYTES), bytes(DIGEST_BYTES)))
