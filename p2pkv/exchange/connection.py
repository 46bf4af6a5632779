"""The two ends of one exchange stream.

Both ends say hello first. After it, :data:`ALLOWED` is the whole law of who may send what; anything else is a
:class:`~p2pkv.errors.ProtocolError`, after which the stream is of no more use. Any other exception that a peer's bytes
cause is a bug.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from p2pkv.artifact.match import Match
from p2pkv.errors import P2pkvError, ProtocolError
from p2pkv.exchange.messages import (
    Block,
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
    Query,
    WantBlocks,
    encode,
    encode_cid_lists,
)
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_WANTS_PER_PEER
from p2pkv.ports import BulkOffer

BULK: Final = "bulk"
"""Feature name of a side that can use the bulk lane."""

# Receiver's role -> messages that it accepts after the hello.
_FROM_PROVIDER: Final = (Matches, Block, DontHave, Have, BulkOffered, ErrorMessage)
_FROM_CONSUMER: Final = (Query, WantBlocks, Cancel, BulkRequest, ErrorMessage)


class _Connection:
    """What both ends share: framing, the hello, and the bytes that wait to be sent."""

    _accepted: tuple[type[Message], ...]

    def __init__(self, agent: str, features: frozenset[str]) -> None:
        self._decoder = FrameDecoder()
        self._outgoing = bytearray(encode(Hello(agent, features)))
        self.remote: Hello | None = None

    def data_to_send(self) -> bytes:
        """Return the bytes that wait to be sent, and forget them."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def fail(self, error: P2pkvError) -> None:
        """Tell the peer why this side gives up."""
        self._send(ErrorMessage(error.code, error.message[:1024]))

    def _receive(self, data: bytes) -> list[Message]:
        """Return the legal messages in ``data``; the first hello is kept and returned as well."""
        messages = self._decoder.feed(data)
        for message in messages:
            if self.remote is None:
                if not isinstance(message, Hello):
                    raise ProtocolError(f"{type(message).__name__} before hello")
                self.remote = message
            elif not isinstance(message, self._accepted):
                raise ProtocolError(f"{type(message).__name__} is not for this side to receive")
        return messages

    def _send(self, message: Message) -> None:
        self._outgoing += encode(message)


class ConsumerConnection(_Connection):
    """The end that wants blocks. Calls queue bytes; :meth:`receive_data` returns what the provider said, checked."""

    _accepted = _FROM_PROVIDER

    def __init__(self, agent: str, features: frozenset[str] = frozenset()) -> None:
        super().__init__(agent, features)
        self._requests = 0
        self._open_queries: set[int] = set()
        self._wanted: set[Cid] = set()
        # A block may cross our cancel on the wire: these are taken without complaint, and the oldest are forgotten.
        self._cancelled: OrderedDict[Cid, None] = OrderedDict()

    def query(self, keys: Sequence[bytes]) -> int:
        """Ask for manifests that match; return the request's number."""
        self._requests += 1
        self._open_queries.add(self._requests)
        self._send(Query(self._requests, tuple(keys)))
        return self._requests

    def want(self, cids: Sequence[Cid]) -> None:
        self._wanted.update(cids)
        self._outgoing += encode_cid_lists(WantBlocks, cids)

    def cancel(self, cids: Sequence[Cid]) -> None:
        for cid in cids:
            self._wanted.discard(cid)
            self._cancelled[cid] = None
        while len(self._cancelled) > MAX_WANTS_PER_PEER:
            self._cancelled.popitem(last=False)
        self._outgoing += encode_cid_lists(Cancel, cids)

    def request_bulk(self) -> None:
        self._send(BulkRequest())

    def take_bulk_block(self, cid: Cid) -> None:
        """Note that ``cid`` has come over the bulk lane."""
        self._wanted.discard(cid)

    def receive_data(self, data: bytes) -> list[Message]:
        """Return the provider's messages. Raises ProtocolError for anything that was not asked for."""
        messages = self._receive(data)
        for message in messages:
            match message:
                case Block(cid):
                    if cid not in self._wanted and cid not in self._cancelled:
                        raise ProtocolError(f"block {cid} was not asked for")
                    self._wanted.discard(cid)
                case DontHave(cids):
                    self._wanted.difference_update(cids)
                case Matches(request, _):
                    if request not in self._open_queries:
                        raise ProtocolError(f"an answer to query {request}, which was not asked")
                    self._open_queries.discard(request)
                case _:
                    pass
        return messages


class ProviderConnection(_Connection):
    """The end that serves. Wants queue up in order until the driver takes them with :meth:`take_wants`."""

    _accepted = _FROM_CONSUMER

    def __init__(self, agent: str, features: frozenset[str] = frozenset()) -> None:
        super().__init__(agent, features)
        self._wants: OrderedDict[Cid, None] = OrderedDict()
        self._lacking: OrderedDict[Cid, None] = OrderedDict()

    def receive_data(self, data: bytes) -> list[Message]:
        """Return the consumer's messages; wants and cancels are worked into the queue. Raises ProtocolError."""
        messages = self._receive(data)
        for message in messages:
            match message:
                case WantBlocks(cids):
                    for cid in cids:
                        self._wants[cid] = None
                    if len(self._wants) > MAX_WANTS_PER_PEER:
                        raise ProtocolError(f"more than {MAX_WANTS_PER_PEER} wants outstanding")
                case Cancel(cids):
                    for cid in cids:
                        self._wants.pop(cid, None)
                        self._lacking.pop(cid, None)
                case _:
                    pass
        return messages

    @property
    def wants(self) -> int:
        """How many wants wait to be served."""
        return len(self._wants)

    def take_wants(self, count: int) -> list[Cid]:
        """Take up to ``count`` wants in the order they were asked."""
        taken: list[Cid] = []
        while self._wants and len(taken) < count:
            cid, _ = self._wants.popitem(last=False)
            taken.append(cid)
        return taken

    def answer(self, request: int, matches: Sequence[Match]) -> None:
        self._send(Matches(request, tuple(matches)))

    def dont_have(self, cids: Sequence[Cid]) -> None:
        """Say that ``cids`` are not here, and remember to push a have when they come."""
        for cid in cids:
            self._lacking[cid] = None
        while len(self._lacking) > MAX_WANTS_PER_PEER:
            self._lacking.popitem(last=False)
        self._outgoing += encode_cid_lists(DontHave, cids)

    def gained(self, cids: Iterable[Cid]) -> None:
        """Push a have for those of ``cids`` that this peer asked for in vain."""
        news = [cid for cid in cids if self._lacking.pop(cid, self) is None]
        self._outgoing += encode_cid_lists(Have, news)

    def offer_bulk(self, offer: BulkOffer | None) -> None:
        """Answer a bulk request; ``None`` says that there is no lane here."""
        if offer is None:
            self._send(BulkOffered(0, bytes(32), bytes(32)))
        else:
            self._send(BulkOffered(offer.port, offer.token, offer.fingerprint))
