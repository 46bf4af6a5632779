"""Peers that leave, lie, fall silent or stall, and who takes over from them."""

from __future__ import annotations

from collections import Counter

import pytest

from p2pkv.download.engine import Ask, Completed, Dropped, Snubbed, Withdraw
from p2pkv.limits import (
    MAX_BLOCK_TIMEOUT_S,
    MAX_DUPLICATE_SHARE,
    MIN_BLOCK_TIMEOUT_S,
    MIN_STALL_S,
    TAIL_STALL_S,
)
from tests.download.session import SIZE, Session, cid_at, wants, warm_up

# --- peers that leave, lie or fall silent --------------------------------------------------------------------------------


def test_what_a_leaving_peer_was_asked_for_goes_to_others() -> None:
    session = Session("a", "b")
    session.want(wants(4))
    lost = session.numbers("a")
    session.remove_peer("a", 0.1)
    assert sorted(session.numbers("b")) == [0, 1, 2, 3]
    assert lost


def test_what_a_leaving_peer_lacked_is_no_rarer_for_it() -> None:
    session = Session("a", "b")
    session.want(wants(1))
    session.dont_have("a", [cid_at(0)], 0.0)
    session.dont_have("b", [cid_at(0)], 0.0)
    session.remove_peer("a", 0.1)
    assert session.download.stuck
    assert session.add_peer("a", 0.2) == [Ask("a", (cid_at(0),))]  # it may have it now


def test_a_peer_that_comes_back_keeps_what_it_has_delivered() -> None:
    session = Session("a")
    session.want(wants(1))
    session.deliver("a", 0.1)
    session.remove_peer("a", 0.2)
    assert session.progress("a").blocks == 1
    session.add_peer("a", 0.3)
    assert [(p.peer, p.blocks, p.bytes) for p in session.download.progress()] == [("a", 1, SIZE)]


def test_a_liar_is_out_and_stays_out() -> None:
    session = Session("a", "b")
    session.want(wants(4))
    session.asked.pop("a")
    session.download.receive_lie("a", 0.1)
    assert Dropped("a") in session.drain()
    assert sorted(session.numbers("b")) == [0, 1, 2, 3]
    assert session.add_peer("a", 0.2) == []
    session.want(wants(8, start=10), 0.2)
    assert session.numbers("a") == []


def test_a_silent_peer_is_snubbed_when_its_patience_has_run_out() -> None:
    session = Session("a")
    session.want(wants(6))
    assert session.download.get_timer() == MIN_BLOCK_TIMEOUT_S
    assert session.tick(MIN_BLOCK_TIMEOUT_S - 0.01) == []
    events = session.tick(MIN_BLOCK_TIMEOUT_S)
    assert events[:2] == [Snubbed("a", 4), Withdraw("a", tuple(cid_at(number) for number in range(4)))]
    assert session.numbers("a") == [0]  # one block at a time, and from the front while nobody else is there
    assert session.tick(MIN_BLOCK_TIMEOUT_S + 1) == []
    assert session.progress("a").snubbed


def test_patience_grows_with_the_pauses_of_a_peer_up_to_a_bound() -> None:
    session = Session("a")
    session.want(wants(40))
    now = 0.0
    for _ in range(10):
        now += 1.5
        session.deliver("a", now)
    patience = (session.download.get_timer() or 0.0) - now
    assert MIN_BLOCK_TIMEOUT_S <= patience < 10
    session = Session("b")
    session.want(wants(4))
    session.deliver("b", 100.0)  # the driver's timer came late
    assert session.download.get_timer() == 100.0 + MAX_BLOCK_TIMEOUT_S


def steady(*peers: str) -> tuple[Session, float]:
    """Peers that deliver a block every 0.02 s, in the middle of a long fetch."""
    session, now = Session(*peers), 0.0
    session.want(wants(1000))
    for _ in range(20):
        now += 0.02
        for peer in peers:
            session.deliver(peer, now)
    return session, now


def test_a_peer_that_stalls_while_others_deliver_loses_its_blocks_soon() -> None:
    session, stalled_at = steady("a", "b")
    held, now = set(session.asked["a"]), stalled_at
    while not session.progress("a").snubbed:
        now += 0.02
        session.deliver("b", now)
        timer = session.download.get_timer()
        if timer is not None and timer <= now:
            session.tick(now)
    assert MIN_STALL_S <= now - stalled_at < MIN_STALL_S + 0.05
    asked_before = len(session.trace)
    session.deliver("b", now, count=len(session.asked["b"]) // 2 + 1)
    again = {cid for event in session.trace[asked_before:] if isinstance(event, Ask) for cid in event.cids}
    assert held - set(session.asked["a"]) <= again | set(session.asked["b"])


def test_a_pause_of_all_peers_at_once_is_no_stall_of_one() -> None:
    session, now = steady("a", "b")
    assert session.download.get_timer() == pytest.approx(now + MIN_BLOCK_TIMEOUT_S)
    session.tick(now + MIN_BLOCK_TIMEOUT_S - 0.01)
    assert not any(isinstance(event, Snubbed) for event in session.trace)


def test_a_snubbed_peer_gets_the_block_that_is_needed_last() -> None:
    session = Session("a", "b")
    session.want(wants(40))
    for _ in range(3):
        session.deliver("b", 1.0)
    events = session.tick(MIN_BLOCK_TIMEOUT_S)
    assert any(isinstance(event, Snubbed) and event.peer == "a" for event in events)
    assert session.numbers("a") == [39]


def test_late_delivery_ends_the_snub_and_is_taken_from_whoever_was_asked_instead() -> None:
    session = Session("a", "b")
    session.want(wants(2))
    assert session.numbers("a") == [0]
    session.deliver("b", 1.0)
    session.tick(MIN_BLOCK_TIMEOUT_S)
    assert session.numbers("b") == [0]
    assert session.receive("a", cid_at(0), 2.5) == [Completed(cid_at(0), "a"), Withdraw("b", (cid_at(0),))]
    assert not session.progress("a").snubbed
    assert session.download.missing == 0
    assert session.download.duplicate_bytes == 0
    session.receive("b", cid_at(0), 2.6)  # the cancel came too late
    assert session.download.duplicate_bytes == SIZE
    assert (session.progress("a").bytes, session.progress("b").bytes) == (SIZE, SIZE)


def test_late_delivery_of_a_block_that_nobody_is_asked_for() -> None:
    session = Session("a")
    session.want(wants(6))
    session.tick(MIN_BLOCK_TIMEOUT_S)
    assert session.numbers("a") == [0]
    assert Completed(cid_at(2), "a") in session.receive("a", cid_at(2), 2.5)
    assert session.download.missing == 5
    assert 2 not in session.numbers("a")


def test_a_block_of_a_peer_that_is_gone_counts() -> None:
    session = Session("a")
    session.want(wants(1))
    session.remove_peer("a", 0.1)
    assert session.receive("a", cid_at(0), 0.2) == [Completed(cid_at(0), "a")]
    assert session.progress("a").bytes == SIZE


# --- the tail ------------------------------------------------------------------------------------------------------------


def tail(held: int) -> tuple[Session, float]:
    """A fast idle peer, a slow one that still holds ``held`` blocks, and a budget of some duplicates."""
    session = Session("fast", "slow")
    now = warm_up(session, "fast", gap=0.001, blocks=500)
    now = max(now, 1.0)
    session.want(wants(held), now)
    session.dont_have("fast", [cid_at(number) for number in range(held)], now)
    return session, now


def test_in_the_tail_an_idle_peer_helps_a_slow_one() -> None:
    session, now = tail(1)
    (last,) = session.asked["slow"]
    assert session.have("fast", [last], now) == [Ask("fast", (last,))]
    assert session.deliver("fast", now + 0.001) == [Completed(last, "fast"), Withdraw("slow", (last,))]


def test_a_block_has_at_most_two_holders() -> None:
    session = Session("a", "b", "slow")
    now = max(warm_up(session, "a", "b", gap=0.001, blocks=500), 1.0)
    session.want(wants(1), now)
    for peer in "ab":
        session.dont_have(peer, [cid_at(0)], now)
    assert session.numbers("slow") == [0]
    assert session.have("a", [cid_at(0)], now) == [Ask("a", (cid_at(0),))]
    assert session.have("b", [cid_at(0)], now) == []
    assert session.tick(now + 1.0) == []


def test_duplicates_stay_within_their_share() -> None:
    session = Session("fast", "slow")
    session.want(wants(400))
    now = 0.0
    asked_twice = 0
    while session.download.missing:
        now += 0.001
        if session.asked.get("fast"):
            session.deliver("fast", now)
        if round(now * 1000) % 200 == 0 and session.asked.get("slow"):
            session.deliver("slow", now)
        timer = session.download.get_timer()
        if timer is not None and timer <= now:
            session.tick(now)
        asked_twice = max(asked_twice, len(set(session.numbers("fast")) & set(session.numbers("slow"))))
    asked = Counter(cid for event in session.trace if isinstance(event, Ask) for cid in event.cids)
    assert 1 <= asked_twice <= 8
    assert sum(asked.values()) - 400 <= MAX_DUPLICATE_SHARE * 400


def test_a_small_fetch_has_no_budget_for_duplicates() -> None:
    session = Session("a", "b")
    now = warm_up(session, "a", gap=0.001)
    session.want(wants(1), now)
    session.dont_have("a", [cid_at(0)], now)
    assert session.have("a", [cid_at(0)], now) == []


def test_a_peer_that_stalls_in_the_tail_is_helped_before_its_patience_ends() -> None:
    session = Session("a", "b")
    now = warm_up(session, "a", "b", gap=0.002, blocks=200)
    session.want(wants(2), now)
    assert (session.numbers("a"), session.numbers("b")) == ([0], [1])
    session.deliver("a", now + 0.002)
    timer = session.download.get_timer()
    assert timer is not None
    assert timer == pytest.approx(now + TAIL_STALL_S)
    assert session.tick(timer - 0.001) == []
    assert session.tick(timer) == [Ask("a", (cid_at(1),))]
    assert session.deliver("a", timer + 0.002) == [Completed(cid_at(1), "a"), Withdraw("b", (cid_at(1),))]


def test_no_helper_while_it_may_be_asked_for_something_else() -> None:
    session, now = tail(4)
    session.want(wants(300, start=100), now)
    session.have("fast", [cid_at(number) for number in range(4)], now)
    assert not set(session.numbers("fast")) & set(session.numbers("slow"))


def test_nobody_helps_before_every_block_is_asked_for() -> None:
    session, now = tail(1)
    session.want(wants(1, start=500), now)
    session.dont_have("fast", [cid_at(500)], now)
    session.dont_have("slow", [cid_at(500)], now)  # left for whoever comes
    (first,) = session.asked["slow"]
    assert session.have("fast", [first], now) == []
    session.add_peer("new", now)
    assert session.tick(now) == [] or first in session.asked["fast"]
