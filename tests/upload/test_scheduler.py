"""The fair queue of the provider, in plain calls: who is next, what is bounded, and when to ask again."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pkv.errors import ProtocolError
from p2pkv.formats.cid import Cid
from p2pkv.limits import (
    MAX_CODED_BLOCK_BYTES,
    MAX_CONNECTIONS,
    MAX_UPLOAD_BYTES,
    MAX_UPLOAD_BYTES_PER_PEER,
    MAX_WANTS_PER_PEER,
    NEWCOMER_S,
    UPLOAD_QUANTUM_BYTES,
)
from p2pkv.units import KIB, MIB
from p2pkv.upload.rates import RateMeter, TokenBucket
from p2pkv.upload.scheduler import Grant, Scheduler, Stream

CIDS = [Cid.of_block(number.to_bytes(2, "big")) for number in range(MAX_WANTS_PER_PEER + 1)]


class Uplink:
    """A scheduler and a line that sends what is granted, one block after another, at ``rate`` bytes per second."""

    def __init__(self, rate: float = math.inf, limit: float = math.inf, limit_per_peer: float = math.inf) -> None:
        self.now = 0.0
        self.rate = rate
        self.scheduler = Scheduler(0.0, limit=limit, limit_per_peer=limit_per_peer)
        self.queue: list[Grant] = []
        self.sent: Counter[str] = Counter()
        self.order: list[tuple[str, Cid]] = []

    def open(self, peer: str, wants: int = 0, size: int = MIB) -> Stream:
        stream = self.scheduler.open(peer, self.now)
        self.want(stream, wants, size)
        return stream

    def want(self, stream: Stream, wants: int, size: int = MIB) -> None:
        self.scheduler.want(stream, [(cid, size) for cid in CIDS[:wants]], self.now)

    def step(self) -> bool:
        """Send one block, or wait for the timer; tell whether there was either."""
        self.queue += self.scheduler.grant(self.now)
        if self.queue:
            grant = self.queue.pop(0)
            self.now += grant.size / self.rate
            self.scheduler.sent(grant.stream, grant.size, self.now)
            self.sent[grant.stream.peer.name] += grant.size
            self.order.append((grant.stream.peer.name, grant.cid))
            return True
        timer = self.scheduler.get_timer()
        if timer is None:
            return False
        assert timer > self.now
        self.now = timer
        return True

    def run(self, until: float = math.inf) -> None:
        while self.now < until and self.step():
            pass


def test_wants_of_a_stream_are_served_in_order() -> None:
    uplink = Uplink()
    uplink.open("a", 5)
    uplink.run()
    assert uplink.order == [("a", cid) for cid in CIDS[:5]]


def test_a_want_that_waits_keeps_its_place_and_is_served_once() -> None:
    uplink = Uplink()
    stream = uplink.open("a", 5)
    uplink.want(stream, 3)
    uplink.run()
    assert [cid for _, cid in uplink.order] == CIDS[:5]
    uplink.want(stream, 1)  # wanted again after it was served
    uplink.run()
    assert [cid for _, cid in uplink.order] == [*CIDS[:5], CIDS[0]]


def test_what_is_cancelled_is_not_sent_unless_it_is_granted_already() -> None:
    scheduler = Scheduler(0.0)
    stream = scheduler.open("a", 0.0)
    at_once = MAX_UPLOAD_BYTES_PER_PEER // MIB
    scheduler.want(stream, [(cid, MIB) for cid in CIDS[: at_once + 3]], 0.0)
    assert [grant.cid for grant in scheduler.grant(0.0)] == CIDS[:at_once]
    scheduler.cancel(stream, CIDS[1 : at_once + 2])
    scheduler.sent(stream, at_once * MIB, 0.0)
    assert [grant.cid for grant in scheduler.grant(0.0)] == [CIDS[at_once + 2]]
    scheduler.cancel(stream, CIDS)
    scheduler.sent(stream, MIB, 0.0)
    assert scheduler.grant(0.0) == []
    assert scheduler.outstanding == 0


@pytest.mark.parametrize("sizes", [(MIB, MIB), (MIB, 10 * KIB), (192 * KIB, MAX_CODED_BLOCK_BYTES)])
def test_peers_share_by_bytes_whatever_the_size_of_their_blocks(sizes: tuple[int, int]) -> None:
    uplink = Uplink(rate=10 * MIB, limit=10 * MIB)
    uplink.open("a", 4000, sizes[0])
    uplink.open("b", 4000, sizes[1])
    uplink.run(until=3.0)
    assert abs(uplink.sent["a"] - uplink.sent["b"]) <= 2 * UPLOAD_QUANTUM_BYTES


def test_more_streams_are_not_more_share() -> None:
    uplink = Uplink(rate=10 * MIB, limit=10 * MIB)
    for _ in range(8):
        uplink.open("many", 500)
    uplink.open("one", 500)
    uplink.run(until=10.0)
    assert abs(uplink.sent["many"] - uplink.sent["one"]) <= 2 * UPLOAD_QUANTUM_BYTES


def test_streams_of_one_peer_take_turns() -> None:
    uplink = Uplink()
    first, second = uplink.open("a"), uplink.open("a")
    uplink.want(first, 3)
    uplink.want(second, 3)
    uplink.run()
    assert [cid for _, cid in uplink.order] == [cid for cid in CIDS[:3] for _ in range(2)]


@pytest.mark.parametrize("limited", [False, True])
def test_a_newcomer_is_served_within_a_second_behind_a_hundred_greedy_peers(limited: bool) -> None:
    rate = 4 * MIB  # some 34 Mbit/s
    # Where no limit is set it is the network that shares the line: then all that counts is that it is granted at once.
    uplink = Uplink(rate=rate, limit=rate) if limited else Uplink(rate=rate)
    for number in range(100):
        uplink.open(f"greedy {number}", 1000)
    uplink.run(until=60.0)
    before, start = len(uplink.order), uplink.now
    stream = uplink.open("newcomer", 1)
    if not limited:
        assert "newcomer" in [grant.stream.peer.name for grant in uplink.scheduler.grant(uplink.now)]
        return
    while not uplink.sent["newcomer"]:
        assert uplink.step()
    assert uplink.now - start < 1.0
    assert len(uplink.order) - before <= 3  # one on the line, one that is the others' due, and its own
    # With its first block it has had its quantum: its next one waits for the others, and for one block of each at most.
    uplink.want(stream, 1)
    before = len(uplink.order)
    while uplink.sent["newcomer"] < 2 * MIB:
        assert uplink.step()
    assert len(uplink.order) - before <= 102  # one more was on the line


def test_what_a_fetch_begins_with_stays_ahead_until_a_quantum_is_used_up() -> None:
    uplink = Uplink(rate=MIB, limit=MIB)
    for number in range(50):
        uplink.open(f"greedy {number}", 1000)
    uplink.run(until=100.0)  # all of them had theirs
    stream = uplink.open("newcomer")
    for _ in range(4):  # an envelope, nodes: each asked for when the one before is here
        uplink.want(stream, 1, 100 * KIB)
        before = len(uplink.order)
        while uplink.order[-1][0] != "newcomer":
            assert uplink.step()
        assert len(uplink.order) - before <= 3
        uplink.step()  # one more of somebody else's


def test_newcomers_without_end_do_not_starve_the_others() -> None:
    uplink = Uplink(rate=MIB, limit=MIB)
    uplink.open("patient", 1000)
    uplink.run(until=5.0)
    before = uplink.sent["patient"]
    for number in range(300):
        uplink.open(f"new {number}", 1)
        uplink.open(f"newer {number}", 1)  # more than can be served
        uplink.step()
        uplink.step()
    assert uplink.sent["patient"] - before >= 250 * MIB


def test_leaving_and_coming_back_is_no_way_to_the_front() -> None:
    uplink = Uplink(rate=MIB, limit=MIB)
    for number in range(20):
        uplink.open(f"patient {number}", 1000)
    uplink.run(until=50.0)
    stream = uplink.open("hopper", 1)
    while not uplink.sent["hopper"]:
        uplink.step()
    uplink.scheduler.close(stream, uplink.now)
    before = len(uplink.order)
    stream = uplink.open("hopper", 1)
    while uplink.sent["hopper"] < 2 * MIB:
        uplink.step()
    assert len(uplink.order) - before > 15
    uplink.scheduler.close(stream, uplink.now)
    uplink.run(until=uplink.now + NEWCOMER_S)  # after a while it is a newcomer like any other
    before = len(uplink.order)
    uplink.open("hopper", 1)
    while uplink.sent["hopper"] < 3 * MIB:
        uplink.step()
    assert len(uplink.order) - before <= 3


def test_a_peer_that_takes_nothing_has_little_outstanding_and_delays_nobody() -> None:
    scheduler = Scheduler(0.0)
    stuck = scheduler.open("stuck", 0.0)
    scheduler.want(stuck, [(cid, MIB) for cid in CIDS[:100]], 0.0)
    scheduler.grant(0.0)
    assert scheduler.outstanding_by_peer() == {"stuck": MAX_UPLOAD_BYTES_PER_PEER // MIB * MIB}
    stream = scheduler.open("fast", 0.0)
    scheduler.want(stream, [(cid, MIB) for cid in CIDS[:1000]], 0.0)
    for _ in range(1000):
        for grant in scheduler.grant(0.0):
            assert grant.stream is stream
            scheduler.sent(stream, grant.size, 0.0)
    assert not stream.wants
    assert scheduler.outstanding_by_peer() == {"stuck": MAX_UPLOAD_BYTES_PER_PEER // MIB * MIB}
    scheduler.close(stuck, 0.0)
    assert scheduler.outstanding == 0


def test_any_number_of_peers_that_take_nothing_leave_room_for_one_more() -> None:
    scheduler = Scheduler(0.0)
    for number in range(MAX_CONNECTIONS - 1):
        stream = scheduler.open(f"stuck {number}", 0.0)
        scheduler.want(stream, [(cid, MAX_CODED_BLOCK_BYTES) for cid in CIDS[:10]], 0.0)
        scheduler.grant(0.0)
    assert scheduler.outstanding <= MAX_UPLOAD_BYTES + MAX_CONNECTIONS * MAX_CODED_BLOCK_BYTES
    stream = scheduler.open("one more", 0.0)
    scheduler.want(stream, [(cid, MIB) for cid in CIDS[:10]], 0.0)
    for cid in CIDS[:10]:
        (grant,) = scheduler.grant(0.0)
        assert (grant.stream, grant.cid) == (stream, cid)
        scheduler.sent(stream, grant.size, 0.0)


def test_wants_of_one_peer_are_bounded_over_all_its_streams() -> None:
    scheduler = Scheduler(0.0)
    first, second = scheduler.open("a", 0.0), scheduler.open("a", 0.0)
    scheduler.want(first, [(cid, 1) for cid in CIDS[:-1]], 0.0)
    with pytest.raises(ProtocolError, match="4096"):
        scheduler.want(second, [(CIDS[0], 1)], 0.0)
    scheduler.close(second, 0.0)
    scheduler.cancel(first, CIDS[:1])
    third = scheduler.open("a", 0.0)
    scheduler.want(third, [(CIDS[0], 1)], 0.0)
    scheduler.want(scheduler.open("b", 0.0), [(CIDS[0], 1)], 0.0)


def test_a_limit_per_peer_holds_for_each_and_leaves_the_rest_to_others() -> None:
    uplink = Uplink(limit=10 * MIB, limit_per_peer=2 * MIB)
    for name in ("a", "b"):
        uplink.open(name, 1000)
    uplink.run(until=10.0)
    for name in ("a", "b"):
        assert 19 * MIB <= uplink.sent[name] <= 20 * MIB + 2 * MAX_CODED_BLOCK_BYTES


def test_after_a_pause_no_more_than_a_burst_goes_at_once() -> None:
    uplink = Uplink(limit=100 * MIB)
    stream = uplink.open("a", 1)
    uplink.run()
    uplink.now = 1000.0
    uplink.want(stream, 100)
    uplink.run(until=1001.0)
    assert uplink.sent["a"] <= 112 * MIB
    assert uplink.sent["a"] >= 100 * MIB


@pytest.mark.parametrize("rate", [1.0, 1e5, 1e9])
def test_a_bucket_lets_the_largest_block_through_at_any_rate(rate: float) -> None:
    bucket = TokenBucket(rate, 0.0)
    bucket.take(MAX_CODED_BLOCK_BYTES, 0.0)
    due = bucket.ready_at(MAX_CODED_BLOCK_BYTES, 0.0)
    assert due == pytest.approx(max(0.0, (2 * MAX_CODED_BLOCK_BYTES - bucket.burst) / rate))
    bucket.take(MAX_CODED_BLOCK_BYTES, due)
    assert bucket.ready_at(0, due) == due


def test_the_meter_shows_a_steady_rate_and_forgets_it() -> None:
    meter = RateMeter()
    assert meter.rate(0.0) == 0.0
    for tick in range(1000):
        meter.add(MIB, tick / 10)
    assert meter.rate(100.0) == pytest.approx(10 * MIB, rel=0.05)
    assert meter.rate(200.0) < 1


NAMES = ("a", "b", "c")
sizes = st.sampled_from([1, 10 * KIB, 192 * KIB, MIB, MAX_CODED_BLOCK_BYTES])


class Uploads(RuleBasedStateMachine):
    """Peers come, want, cancel, read, stall and go; time passes. Two schedulers hear the same."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.streams: list[tuple[Stream, Stream]] = []
        self.granted: list[tuple[Grant, Grant]] = []  # and not yet sent
        self.wanted: dict[Stream, dict[Cid, int]] = {}
        self.log: list[tuple[float, str, int]] = []
        self.limit = self.limit_per_peer = math.inf

    @initialize(limit=st.sampled_from([math.inf, 5e5, 2e7]), limit_per_peer=st.sampled_from([math.inf, 3e5, 1e7]))
    def begin(self, limit: float, limit_per_peer: float) -> None:
        self.limit, self.limit_per_peer = limit, limit_per_peer
        self.scheduler, self.twin = (Scheduler(0.0, limit=limit, limit_per_peer=limit_per_peer) for _ in range(2))

    def grant(self) -> None:
        ours, theirs = self.scheduler.grant(self.now), self.twin.grant(self.now)
        assert [(g.stream.peer.name, g.cid, g.size) for g in ours] == [(g.stream.peer.name, g.cid, g.size) for g in theirs]
        assert self.scheduler.get_timer() == self.twin.get_timer()
        for grant, twin in zip(ours, theirs, strict=True):
            assert next(iter(self.wanted[grant.stream].items())) == (grant.cid, grant.size)  # in the order wanted
            del self.wanted[grant.stream][grant.cid]
            self.granted.append((grant, twin))
            self.log.append((self.now, grant.stream.peer.name, grant.size))

    @rule(name=st.sampled_from(NAMES))
    def open(self, name: str) -> None:
        if len(self.streams) < 6:
            pair = (self.scheduler.open(name, self.now), self.twin.open(name, self.now))
            self.streams.append(pair)
            self.wanted[pair[0]] = {}

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), number=st.integers(0, 90), count=st.integers(1, 9), size=sizes)
    def want(self, data: st.DataObject, number: int, count: int, size: int) -> None:
        ours, theirs = data.draw(st.sampled_from(self.streams))
        wants = [(cid, size) for cid in CIDS[number : number + count]]
        for cid, _ in wants:
            self.wanted[ours].setdefault(cid, size)
        self.scheduler.want(ours, wants, self.now)
        self.twin.want(theirs, wants, self.now)
        self.grant()

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), number=st.integers(0, 90), count=st.integers(1, 50))
    def cancel(self, data: st.DataObject, number: int, count: int) -> None:
        ours, theirs = data.draw(st.sampled_from(self.streams))
        for cid in CIDS[number : number + count]:
            self.wanted[ours].pop(cid, None)
        self.scheduler.cancel(ours, CIDS[number : number + count])
        self.twin.cancel(theirs, CIDS[number : number + count])
        self.grant()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), count=st.integers(1, 5))
    def sent(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.granted))):
            ours, theirs = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
            self.scheduler.sent(ours.stream, ours.size, self.now)
            self.twin.sent(theirs.stream, theirs.size, self.now)
        self.grant()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        ours, theirs = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        self.scheduler.close(ours, self.now)
        self.twin.close(theirs, self.now)
        del self.wanted[ours]
        self.granted = [(grant, twin) for grant, twin in self.granted if grant.stream is not ours]
        self.grant()

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.grant()

    @precondition(lambda self: self.scheduler.get_timer() is not None)
    @rule()
    def wait_for_the_timer(self) -> None:
        timer = self.scheduler.get_timer()
        assert timer is not None
        assert timer > self.now
        self.now = timer
        self.grant()

    @invariant()
    def what_is_outstanding_is_bounded(self) -> None:
        per_peer: Counter[str] = Counter()
        for grant, _ in self.granted:
            per_peer[grant.stream.peer.name] += grant.size
        assert self.scheduler.outstanding_by_peer() == per_peer
        assert self.scheduler.outstanding == per_peer.total()
        assert all(outstanding <= MAX_UPLOAD_BYTES_PER_PEER for outstanding in per_peer.values())

    @invariant()
    def no_rate_is_above_its_limit_plus_one_burst(self) -> None:
        for names, limit in ((NAMES, self.limit), *(((name,), self.limit_per_peer) for name in NAMES)):
            if limit == math.inf:
                continue
            burst, mine = TokenBucket(limit, 0.0).burst, [(at, size) for at, name, size in self.log if name in names]
            tokens, before = burst, 0.0
            for at, size in mine:
                tokens = min(burst, tokens + (at - before) * limit) - size
                before = at
                assert tokens >= -1.0  # a byte for the rounding of times

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        """Whoever wants something has something outstanding, or there is a timer after which it is looked at again."""
        idle = {stream.peer.name for stream, wants in self.wanted.items() if wants}
        idle -= set(self.scheduler.outstanding_by_peer())
        if self.limit == self.limit_per_peer == math.inf:
            assert not idle
        elif idle:
            assert self.scheduler.get_timer() is not None

    def teardown(self) -> None:
        """Everybody reads, and all wants are served in the end."""
        for _ in range(10_000):
            if not any(self.wanted.values()):
                return
            for ours, theirs in self.granted:
                self.scheduler.sent(ours.stream, ours.size, self.now)
                self.twin.sent(theirs.stream, theirs.size, self.now)
            self.granted.clear()
            self.now = max(self.now, self.scheduler.get_timer() or 0.0)
            self.grant()
        raise AssertionError("somebody starves")


TestUploads = Uploads.TestCase
TestUploads.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
