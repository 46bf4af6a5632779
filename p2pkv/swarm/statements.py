"""What publishers say of themselves, between nodes: looked up, kept, told to others, announced (``docs/trust.md``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import trio

from p2pkv.errors import FormatError, P2pkvError, PeerUnreachableError, ProtocolError, SignatureError
from p2pkv.exchange.connection import ConsumerConnection
from p2pkv.exchange.messages import Statements
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import decode_did, encode_did
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import publisher_key
from p2pkv.limits import MAX_STATEMENT_PROVIDERS, MAX_STATEMENTS, STATEMENTS_SCAN_S, STATEMENTS_TIMEOUT_S
from p2pkv.ports import PeerAddress
from p2pkv.routing.followed import FollowedPublishers
from p2pkv.swarm.announce import AnnounceTask
from p2pkv.swarm.context import Context
from p2pkv.trust.record import Record

logger = logging.getLogger(__name__)


class RecordStore(Protocol):
    """The records of publishers, kept. Synchronous and safe to call from any thread.

    All methods raise StoreError, and UnknownVersionError where a newer p2pkv kept something.
    """

    def get(self, publisher: str, /) -> Record | None: ...

    def publishers(self) -> Iterable[str]:
        """Return all publishers of whom something is known."""

    def hear(self, signed: SignedStatement) -> bool:
        """Verify and keep a statement; return whether it tells anything new. Raises SignatureError, FormatError too."""

    def note_answers(self, answers: Mapping[str, float], /) -> None:
        """Keep when publishers were looked up and somebody answered last, in seconds since the epoch."""


def statements_of(records: RecordStore, public_key: bytes, known: Sequence[Cid]) -> list[bytes]:
    """Return what this node tells a peer about the publisher with ``public_key``, without what the peer knows. Blocking."""
    try:
        record = records.get(encode_did(public_key))
    except P2pkvError as error:  # a file that is damaged, or of a newer version
        logger.warning("%s", error)
        return []
    statements = record.statements if record is not None else ()
    # A succession is short, and the latest list says most.
    latest_first = reversed(statements)
    return [statement.encode() for statement in latest_first if statement.cid not in known]


class StatementTask:
    """Looks up what publishers say. :meth:`run` never returns by itself.

    ``followed`` names whom this node trusts, successors included, and may block; ``heard`` is called after anything that is
    known has changed.
    """

    def __init__(
        self,
        context: Context,
        records: RecordStore,
        announcer: AnnounceTask,
        *,
        followed: Callable[[], Iterable[str]],
        heard: Callable[[], Awaitable[None]],
    ) -> None:
        self._context = context
        self._records = records
        self._announcer = announcer
        self._whom = followed
        self._heard = heard
        self._engine = FollowedPublishers(context.rng)
        self._known: dict[str, Record | None] = {}
        self._answers: dict[str, float] = {}  # since the last scan
        self._complaint = ""
        self._changed = trio.Event()

    def hasten(self, publisher: str) -> None:
        """An artifact of ``publisher`` is about to be used: look soon whether it was taken back."""
        self._engine.hasten(publisher, trio.current_time())
        self._changed.set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_scanning)
            while True:
                publisher = self._engine.next_due(trio.current_time())
                if publisher is not None:
                    nursery.start_soon(self._look_up, publisher)
                    continue
                timer = self._engine.get_timer()
                with trio.move_on_at(math.inf if timer is None else timer):
                    await self._changed.wait()
                self._changed = trio.Event()

    async def _keep_scanning(self) -> None:
        while True:
            await self._scan()
            await self._keep_answers()
            await trio.sleep(STATEMENTS_SCAN_S)

    async def _scan(self) -> None:
        """See what the home says by now, which other programs may have changed too."""

        def read() -> tuple[list[str], dict[str, Record | None]]:
            return [*self._whom()], {publisher: self._get(publisher) for publisher in self._records.publishers()}

        try:
            followed, known = await self._context.offload(read)
        except P2pkvError as error:
            self._complain(error)
            return
        self._engine.follow(followed, trio.current_time())
        self._changed.set()
        if known != self._known:
            news = [publisher for publisher in known if publisher not in self._known]
            self._announcer.add(publisher_key(decode_did(publisher)) for publisher in news)
            self._known = known
            await self._heard()
            for hear in tuple(self._context.reconsider):
                hear()

    async def _keep_answers(self) -> None:
        answers, self._answers = self._answers, {}
        if answers:
            try:
                await self._context.offload(partial(self._records.note_answers, answers))
            except P2pkvError as error:  # nothing but what people are told depends on it
                self._complain(error)

    def _get(self, publisher: str) -> Record | None:
        """Return what is known of a publisher; ``None`` where it cannot be read: then nothing of the publisher is used."""
        try:
            return self._records.get(publisher)
        except P2pkvError as error:
            self._complain(error)
            return None

    def _complain(self, error: P2pkvError) -> None:
        """Log an error of our own disk, once until there is another."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("%s", error)

    async def _look_up(self, publisher: str) -> None:
        """Ask those who are found what ``publisher`` says."""
        answers = 0

        async def ask(peer: PeerAddress) -> None:
            nonlocal answers
            try:
                with trio.fail_after(STATEMENTS_TIMEOUT_S):
                    await self._ask(peer, publisher)
                answers += 1
            except (trio.TooSlowError, PeerUnreachableError, ProtocolError) as error:
                logger.info("%s did not tell what %s says: %s", peer.peer_id, publisher, error)
            except P2pkvError as error:
                self._complain(error)

        async with trio.open_nursery() as nursery:
            asked = 0
            async with self._context.routing.find_providers(publisher_key(decode_did(publisher))) as providers:
                async for peer in providers:
                    nursery.start_soon(ask, peer)
                    asked += 1
                    if asked >= MAX_STATEMENT_PROVIDERS:
                        break
        if answers:
            self._answers[publisher] = self._context.wall_clock()
        self._engine.conclude(publisher, answers > 0, trio.current_time())
        self._changed.set()

    async def _ask(self, peer: PeerAddress, publisher: str) -> None:
        """Hear all that one peer has to tell. Raises PeerUnreachableError, ProtocolError, StoreError."""
        channel = await self._context.network.open_channel(peer)
        connection = ConsumerConnection(self._context.agent)
        try:
            # An answer may leave out what does not fit; each one that tells something may be followed by another.
            for _ in range(MAX_STATEMENTS):
                record = await self._context.offload(partial(self._records.get, publisher))
                known = [statement.cid for statement in record.statements] if record is not None else []
                connection.ask_statements(decode_did(publisher), known)
                await channel.send(connection.data_to_send())
                told: Statements | None = None
                while told is None:
                    data = await channel.receive()
                    if not data:
                        raise PeerUnreachableError(f"{peer.peer_id} closed the stream")
                    for message in connection.receive_data(data):
                        if isinstance(message, Statements):
                            told = message
                if not await self._hear(peer, told, publisher):
                    return
        finally:
            await channel.aclose()

    async def _hear(self, peer: PeerAddress, told: Statements, publisher: str) -> bool:
        """Keep what is good of an answer, and return whether anything was news. Raises StoreError."""

        def hear() -> bool:
            news = False
            for data in told.statements:
                try:
                    signed = SignedStatement.decode(data)
                    if signed.publisher == publisher:
                        news |= self._records.hear(signed)
                except (FormatError, SignatureError) as error:
                    logger.info("%s told a statement that is none: %s", peer.peer_id, error)
            return news

        news = await self._context.offload(hear)
        if news:
            logger.info("news of what %s says, from %s", publisher, peer.peer_id)
        return news
