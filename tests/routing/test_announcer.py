"""Announcements in virtual time: paced, repeated, retried, each key by itself."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pkv.limits import ANNOUNCE_BURST, ANNOUNCE_PERIOD_S, ANNOUNCE_WINDOW_S
from p2pkv.routing.announcer import Announcer, AnnouncerStatistics
from p2pkv.units import HOUR

# What a receiver takes: py-libp2p drops more than 10 records of one peer within 10 s.
RECEIVER_MESSAGES, RECEIVER_WINDOW_S = 10, 10.0
RECORD_LIFE_S = 48 * HOUR


class Node:
    """Drives an announcer as a node does: one announcement after the other, each ``takes_s`` long."""

    def __init__(self, *, takes_s: float = 0.05, seed: int = 0) -> None:
        self.announcer = Announcer(random.Random(seed))
        self.now = 1000.0
        self.reachable = True
        self.takes_s = takes_s
        self.sent: list[tuple[float, bytes]] = []

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            key = self.announcer.next_due(self.now)
            if key is not None:
                self.now += self.takes_s
                self.sent.append((self.now, key))
                self.announcer.confirm(key, self.reachable, self.now)
                continue
            timer = self.announcer.get_timer(self.now)
            assert timer is None or timer > self.now, "a timer that is due without anything to do would spin"
            self.now = min(end, timer if timer is not None else math.inf)

    def times(self, key: bytes) -> list[float]:
        return [at for at, sent in self.sent if sent == key]


def test_a_key_is_repeated_when_asked_for_and_then_as_always() -> None:
    node = Node()
    (key,) = keys(1)
    node.announcer.repeat(key, node.now)  # also one that is new
    node.run(1.0)
    node.run(HOUR)
    assert len(node.times(key)) == 1
    node.announcer.repeat(key, node.now)
    node.run(1.0)
    assert len(node.times(key)) == 2
    node.run(ANNOUNCE_PERIOD_S)
    assert len(node.times(key)) == 3


def test_a_key_under_way_is_not_repeated() -> None:
    announcer = Announcer(random.Random(0))
    (key,) = keys(1)
    announcer.add(key, 0.0)
    assert announcer.next_due(0.0) == key
    announcer.repeat(key, 0.0)
    assert announcer.next_due(0.0) is None
    announcer.confirm(key, True, 1.0)
    assert announcer.next_due(1.0) is None
    assert announcer.statistics(1.0) == AnnouncerStatistics(1, 1, 0.0)


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(34, "big") for number in range(count)]


def most_within(times: list[float], seconds: float) -> int:
    """Return the most that lie within any window of this length, both ends included."""
    most, start = 0, 0
    for at, moment in enumerate(times):
        while moment - times[start] > seconds:
            start += 1
        most = max(most, at - start + 1)
    return most


@pytest.mark.parametrize("takes_s", [0.0, 0.05, 3.0])
def test_the_pace_stays_below_what_receivers_take_over_days_and_200_keys(takes_s: float) -> None:
    node = Node(takes_s=takes_s)
    for key in keys(200):
        node.announcer.add(key, node.now)
    node.run(5 * 24 * HOUR)
    times = [at for at, _ in node.sent]
    assert most_within(times, RECEIVER_WINDOW_S) < RECEIVER_MESSAGES
    assert most_within(times, RECEIVER_WINDOW_S) <= ANNOUNCE_BURST
    assert len(times) >= 5 * 200
    assert node.announcer.statistics(node.now).announced == 200


def test_a_message_that_was_long_on_its_way_does_not_meet_the_next_burst() -> None:
    announcer = Announcer(random.Random(0))
    for key in keys(2 * ANNOUNCE_BURST):
        announcer.add(key, 0.0)
    first = [announcer.next_due(0.0) for _ in range(ANNOUNCE_BURST)]
    assert announcer.next_due(60.0) is None  # all of the burst is still on its way
    assert announcer.get_timer(60.0) is None
    for sent in first:
        assert sent is not None
        announcer.confirm(sent, True, 60.0)
    assert announcer.get_timer(60.0) == 60.0 + ANNOUNCE_WINDOW_S
    assert announcer.next_due(60.0 + ANNOUNCE_WINDOW_S - 0.001) is None
    assert announcer.next_due(60.0 + ANNOUNCE_WINDOW_S) is not None


def test_an_artifact_goes_out_at_once_in_the_order_given() -> None:
    node = Node(takes_s=0.0)
    for key in keys(ANNOUNCE_BURST):
        node.announcer.add(key, node.now)
    node.run(0.001)
    assert [key for _, key in node.sent] == keys(ANNOUNCE_BURST)


def test_200_keys_are_out_as_fast_as_the_pace_allows() -> None:
    node = Node(takes_s=0.0)
    for key in keys(200):
        node.announcer.add(key, node.now)
    node.run(200 / ANNOUNCE_BURST * ANNOUNCE_WINDOW_S)
    assert [key for _, key in node.sent] == keys(200)


def test_every_key_is_repeated_each_period_before_its_record_expires() -> None:
    node = Node()
    for key in keys(200):
        node.announcer.add(key, node.now)
    node.run(10 * ANNOUNCE_PERIOD_S)
    for key in keys(200):
        gaps = [later - earlier for earlier, later in zip(node.times(key), node.times(key)[1:], strict=False)]
        assert len(gaps) >= 9
        assert max(gaps) < ANNOUNCE_PERIOD_S + 300 < RECORD_LIFE_S
        assert min(gaps) > 0.85 * ANNOUNCE_PERIOD_S


def test_repeats_spread_out() -> None:
    node = Node()
    for key in keys(50):
        node.announcer.add(key, node.now)
    node.run(3 * ANNOUNCE_PERIOD_S)
    last = [node.times(key)[-1] for key in keys(50)]
    assert max(last) - min(last) > HOUR


def test_what_reached_nobody_is_tried_again_soon() -> None:
    node = Node()
    node.reachable = False
    (key,) = keys(1)
    node.announcer.add(key, node.now)
    node.run(100.0)
    assert 3 <= len(node.sent) <= 4
    assert node.announcer.statistics(node.now).announced == 0
    node.reachable = True
    node.run(40.0)
    count = len(node.sent)
    assert node.announcer.statistics(node.now).announced == 1
    node.run(HOUR)
    assert len(node.sent) == count


def test_failures_keep_the_pace_and_do_not_shut_out_new_keys() -> None:
    node = Node(takes_s=0.0)
    node.reachable = False
    for key in keys(200):
        node.announcer.add(key, node.now)
    node.run(600.0)
    new = b"\xff" * 34
    node.announcer.add(new, node.now)
    node.run(300.0)
    assert node.times(new)
    assert most_within([at for at, _ in node.sent], RECEIVER_WINDOW_S) <= ANNOUNCE_BURST


def test_a_key_that_is_known_stays_as_scheduled() -> None:
    node = Node()
    (key,) = keys(1)
    node.announcer.add(key, node.now)
    node.run(10.0)
    node.announcer.add(key, node.now)
    node.run(HOUR)
    assert len(node.sent) == 1


def test_a_discarded_key_is_announced_no_more() -> None:
    node = Node()
    first, second = keys(2)
    node.announcer.add(first, node.now)
    node.announcer.add(second, node.now)
    node.announcer.discard(first)
    node.run(3 * ANNOUNCE_PERIOD_S)
    assert not node.times(first)
    assert node.announcer.statistics(node.now).keys == 1
    node.announcer.discard(second)
    assert node.announcer.get_timer(node.now) is None


def test_a_key_that_is_discarded_and_added_again_is_announced_once_a_period() -> None:
    node = Node()
    (key,) = keys(1)
    for _ in range(3):
        node.announcer.add(key, node.now)
        node.announcer.discard(key)
    node.announcer.add(key, node.now)
    node.run(10.0)
    node.announcer.discard(key)
    node.announcer.add(key, node.now)
    node.run(5 * ANNOUNCE_PERIOD_S - 60)
    assert 2 + 4 <= len(node.sent) <= 2 + 5


def test_a_key_that_is_discarded_while_it_is_announced() -> None:
    announcer = Announcer(random.Random(0))
    (key,) = keys(1)
    announcer.add(key, 0.0)
    assert announcer.next_due(0.0) == key
    announcer.discard(key)
    announcer.add(key, 0.0)  # and added again, before the answer is there
    announcer.confirm(key, True, 1.0)
    assert announcer.statistics(1.0) == AnnouncerStatistics(keys=1, announced=1, late_s=0.0)
    timer = announcer.get_timer(1.0)
    assert timer is not None
    assert timer > 0.85 * ANNOUNCE_PERIOD_S
    announcer.discard(key)
    announcer.confirm(key, True, 2.0)
    assert announcer.get_timer(2.0) is None


def test_statistics_tell_how_late_the_latest_is() -> None:
    announcer = Announcer(random.Random(0))
    for key in keys(3):
        announcer.add(key, 100.0)
    assert announcer.statistics(100.0) == AnnouncerStatistics(keys=3, announced=0, late_s=0.0)
    assert announcer.statistics(130.0) == AnnouncerStatistics(keys=3, announced=0, late_s=30.0)
    for _ in range(3):
        due = announcer.next_due(130.0)
        assert due is not None
        announcer.confirm(due, True, 131.0)
    assert announcer.statistics(140.0) == AnnouncerStatistics(keys=3, announced=3, late_s=0.0)


def test_equal_seeds_give_equal_schedules() -> None:
    def sent(seed: int) -> list[tuple[float, bytes]]:
        node = Node(seed=seed)
        for key in keys(20):
            node.announcer.add(key, node.now)
        node.run(2 * ANNOUNCE_PERIOD_S)
        return node.sent

    assert sent(1) == sent(1)
    assert sent(1) != sent(2)


some_keys = st.sampled_from(keys(6))


class Announcements(RuleBasedStateMachine):
    """Keys come and go, several announcements are under way at once, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.announcer = Announcer(random.Random(0))
        self.now = 0.0
        self.known: set[bytes] = set()
        self.under_way: list[bytes] = []
        self.times: list[float] = []

    @rule(key=some_keys)
    def add(self, key: bytes) -> None:
        self.known.add(key)
        self.announcer.add(key, self.now)

    @rule(key=some_keys)
    def discard(self, key: bytes) -> None:
        self.known.discard(key)
        self.announcer.discard(key)

    @rule()
    def start(self) -> None:
        timer = self.announcer.get_timer(self.now)
        key = self.announcer.next_due(self.now)
        assert (key is not None) == (timer is not None and timer <= self.now)
        if key is not None:
            assert key in self.known
            self.under_way.append(key)

    @rule(reached=st.booleans())
    def end(self, reached: bool) -> None:
        if self.under_way:
            self.times.append(self.now)
            self.announcer.confirm(self.under_way.pop(0), reached, self.now)

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0, ANNOUNCE_PERIOD_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def statistics_count_what_is_known(self) -> None:
        assert self.announcer.statistics(self.now).keys == len(self.known)

    @invariant()
    def no_more_than_a_burst_is_under_way(self) -> None:
        assert len(self.under_way) <= ANNOUNCE_BURST

    def teardown(self) -> None:
        """In the next period every known key is announced, and none twice."""
        while self.under_way:
            self.end(True)
        counts: Counter[bytes] = Counter()
        self.now += ANNOUNCE_PERIOD_S
        end = self.now + ANNOUNCE_PERIOD_S / 2
        while self.now < end:
            key = self.announcer.next_due(self.now)
            if key is not None:
                counts[key] += 1
                self.announcer.confirm(key, True, self.now)
            else:
                self.now = min(end, self.announcer.get_timer(self.now) or end)
        assert counts == Counter(self.known)


TestAnnouncements = Announcements.TestCase
TestAnnouncements.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
