"""Two honest ends under random orders: bytes under way in both directions, and a bulk lane that may break."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from p2pkv.exchange.connection import ConsumerConnection, ProviderConnection
from p2pkv.exchange.messages import Block, Cancel, DontHave, Have, Matches, Query, WantBlocks, block_header
from p2pkv.formats.cid import Cid

DATA = {Cid.of_block(bytes((number,))): bytes((number,)) for number in range(12)}
CIDS = list(DATA)

some_cids = st.lists(st.sampled_from(CIDS), min_size=1, max_size=5, unique=True)


class Ends(RuleBasedStateMachine):
    """Neither end may ever complain of the other, and in the end each want has an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer = ConsumerConnection("consumer")
        self.provider = ProviderConnection("provider")
        self.up = bytearray()
        self.down = bytearray()
        self.lane: list[Cid] = []
        self.held: set[Cid] = set()
        self.unanswered: set[Cid] = set()  # wanted, and neither cancelled nor answered
        self.denied: set[Cid] = set()
        self.queries: set[int] = set()
        self.asked_of_provider: list[int] = []
        self.queue: dict[Cid, None] = {}  # what the provider's driver has to serve

    def flush(self) -> None:
        self.up += self.consumer.data_to_send()
        self.down += self.provider.data_to_send()

    def take_down(self, count: int) -> None:
        self.flush()
        for message in self.consumer.receive_data(bytes(self.down[:count])):
            match message:
                case Block(cid, data):
                    assert data == DATA[cid]
                    self.unanswered.discard(cid)
                case DontHave(cids):
                    self.unanswered.difference_update(cids)
                    self.denied.update(cids)
                case Have(cids):
                    assert self.denied.issuperset(cids)
                case Matches(request, _):
                    self.queries.remove(request)
                case _:
                    pass
        del self.down[:count]

    def take_up(self, count: int) -> None:
        self.flush()
        for message in self.provider.receive_data(bytes(self.up[:count])):
            match message:
                case Query(request):
                    self.asked_of_provider.append(request)
                case WantBlocks(cids):
                    self.queue.update(dict.fromkeys(cids))
                case Cancel(cids):
                    for cid in cids:
                        self.queue.pop(cid, None)
                case _:
                    pass
        del self.up[:count]

    @rule(cids=some_cids)
    def want(self, cids: list[Cid]) -> None:
        self.consumer.want(cids)
        self.unanswered.update(cids)

    @rule(cids=some_cids)
    def cancel(self, cids: list[Cid]) -> None:
        self.consumer.cancel(cids)
        self.unanswered.difference_update(cids)

    @rule()
    def query(self) -> None:
        self.queries.add(self.consumer.query([bytes(32)]))

    @precondition(lambda self: self.asked_of_provider)
    @rule()
    def answer(self) -> None:
        self.provider.answer(self.asked_of_provider.pop(0), [])

    @rule(cids=some_cids)
    def gain(self, cids: list[Cid]) -> None:
        self.held.update(cids)
        self.provider.gained(cids)

    @rule(count=st.integers(1, 4), over_lane=st.booleans())
    def serve(self, count: int, over_lane: bool) -> None:
        for cid in list(self.queue)[:count]:
            del self.queue[cid]
            if cid not in self.held:
                self.provider.dont_have([cid])
            elif over_lane:
                self.lane.append(cid)
            else:
                self.flush()
                self.down += block_header(cid, len(DATA[cid])) + DATA[cid]

    @precondition(lambda self: self.lane)
    @rule()
    def lane_delivers(self) -> None:
        cid = self.lane.pop(0)
        self.consumer.take_bulk_block(cid)
        self.unanswered.discard(cid)

    @rule()
    def lane_breaks(self) -> None:
        self.lane.clear()
        if self.unanswered:
            self.consumer.want(sorted(self.unanswered, key=CIDS.index))

    @rule(count=st.integers(1, 400))
    def bytes_arrive_at_the_provider(self, count: int) -> None:
        self.take_up(count)

    @rule(count=st.integers(1, 400))
    def bytes_arrive_at_the_consumer(self, count: int) -> None:
        self.take_down(count)

    def teardown(self) -> None:
        self.lane_breaks()
        self.take_up(1 << 20)
        self.serve(1000, over_lane=False)
        while self.asked_of_provider:
            self.answer()
        self.take_down(1 << 20)
        assert not self.unanswered
        assert not self.queries


TestEnds = Ends.TestCase
TestEnds.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
