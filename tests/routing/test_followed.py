"""When publishers are looked up: at once, once a period, sooner where it matters, and never in a storm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from p2pkv.limits import MAX_FOLLOWED_PUBLISHERS, MAX_STATEMENT_LOOKUPS, STATEMENTS_PERIOD_S, STATEMENTS_RETRY_S
from p2pkv.routing.followed import FollowedPublishers


@pytest.fixture
def engine() -> FollowedPublishers:
    return FollowedPublishers(random.Random(0))


def test_a_new_publisher_is_looked_up_at_once_and_then_once_a_period(engine: FollowedPublishers) -> None:
    assert (engine.next_due(0.0), engine.get_timer()) == (None, None)
    engine.follow(["a"], 5.0)
    assert engine.get_timer() == 5.0
    assert engine.next_due(5.0) == "a"
    engine.conclude("a", True, 6.0)
    due = engine.get_timer()
    assert due is not None
    assert 6.0 + 0.9 * STATEMENTS_PERIOD_S <= due <= 6.0 + STATEMENTS_PERIOD_S
    assert engine.next_due(due - 0.1) is None
    engine.follow(["a"], 7.0)
    assert engine.get_timer() == due
    assert engine.next_due(due) == "a"
    assert engine.get_timer() is None


def test_where_nobody_answered_it_is_tried_again_sooner(engine: FollowedPublishers) -> None:
    engine.follow(["a"], 0.0)
    assert engine.next_due(0.0) == "a"
    engine.conclude("a", False, 1.0)
    due = engine.get_timer()
    assert due is not None
    assert 1.0 + 0.9 * STATEMENTS_RETRY_S <= due <= 1.0 + STATEMENTS_RETRY_S


def test_whom_nobody_follows_any_more_is_forgotten(engine: FollowedPublishers) -> None:
    engine.follow(["a", "b"], 0.0)
    engine.follow(["b"], 0.0)
    assert engine.next_due(0.0) == "b"
    assert engine.next_due(0.0) is None
    engine.follow([], 0.0)
    assert engine.get_timer() is None
    engine.conclude("b", True, 1.0)
    engine.hasten("b", 1.0)
    assert engine.get_timer() is None


def test_so_many_look_ups_are_under_way_at_once(engine: FollowedPublishers) -> None:
    engine.follow((str(number) for number in range(100)), 0.0)
    under_way = [engine.next_due(1000.0) for _ in range(MAX_STATEMENT_LOOKUPS)]
    assert len(set(under_way)) == MAX_STATEMENT_LOOKUPS
    assert (engine.next_due(1000.0), engine.get_timer()) == (None, None)
    engine.conclude("0", True, 1000.0)
    assert engine.next_due(1000.0) == str(MAX_STATEMENT_LOOKUPS)


def test_a_fetch_hastens_the_look_up_and_many_do_not_repeat_it(engine: FollowedPublishers) -> None:
    engine.follow(["a"], 0.0)
    assert engine.next_due(0.0) == "a"
    engine.conclude("a", True, 0.0)
    engine.hasten("a", 10.0)
    assert engine.get_timer() == STATEMENTS_RETRY_S
    engine.hasten("a", 2 * STATEMENTS_RETRY_S)
    assert engine.get_timer() == STATEMENTS_RETRY_S
    assert engine.next_due(2 * STATEMENTS_RETRY_S) == "a"
    engine.conclude("a", True, 2 * STATEMENTS_RETRY_S)
    engine.hasten("a", 3 * STATEMENTS_RETRY_S + 1)
    assert engine.next_due(3 * STATEMENTS_RETRY_S + 1) == "a"


def test_many_publishers_are_bounded_and_spread(engine: FollowedPublishers) -> None:
    engine.follow((str(number) for number in range(2 * MAX_FOLLOWED_PUBLISHERS)), 0.0)
    seen = []
    now = 0.0
    at_start = 0
    while (timer := engine.get_timer()) is not None and timer <= 60.0:
        now = max(now, timer)
        publisher = engine.next_due(now)
        assert publisher is not None
        seen.append(publisher)
        at_start += now == 0.0
        engine.conclude(publisher, True, now)
    assert seen == [str(number) for number in range(MAX_FOLLOWED_PUBLISHERS)]
    assert at_start <= 8


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 4000)), max_size=30))
def test_everybody_is_looked_up_within_a_period(steps: list[tuple[str, bool, float]]) -> None:
    """Whatever is hastened and answered, nobody waits longer than a period for the next look-up."""
    engine, now = FollowedPublishers(random.Random(1)), 0.0
    engine.follow("abc", now)
    last = dict.fromkeys("abc", 0.0)
    for hastened, answered, wait in steps:
        end = now + wait
        engine.hasten(hastened, now)
        while (timer := engine.get_timer()) is not None and timer <= end:
            now = max(now, timer)
            publisher = engine.next_due(now)
            assert publisher is not None
            assert now - last[publisher] <= STATEMENTS_PERIOD_S
            last[publisher] = now
            engine.conclude(publisher, answered, now)
        now = end
