"""The download engine: order, windows, dont-have and have, results, and what a call costs."""

from __future__ import annotations

import time

import pytest

from p2pkv.download.engine import Ask, Completed, Event, Want, Withdraw
from p2pkv.download.pool import Pool, Wanted
from p2pkv.limits import (
    INITIAL_WINDOW_BYTES,
    MAX_CODED_BLOCK_BYTES,
    MAX_WINDOW_BLOCKS,
    MIN_BLOCK_TIMEOUT_S,
    RARITY_DEADLINES,
)
from tests.download.session import SIZE, Session, cid_at, number_of, wants, warm_up

# --- order ---------------------------------------------------------------------------------------------------------------


def test_the_nearest_deadlines_are_asked_first() -> None:
    session = Session("a")
    several = wants(20)
    session.want(several[::-1])
    assert session.numbers("a") == [0, 1, 2, 3]


def test_rarest_first_among_equals() -> None:
    session = Session("a", "b")
    session.want([Want(cid_at(9), SIZE, 0)])
    holder = next(peer for peer in "ab" if session.asked.get(peer))
    session.dont_have(holder, [cid_at(9)], 0.0)
    other = "b" if holder == "a" else "a"
    session.dont_have(other, [cid_at(9)], 0.0)  # lacked by both: rarer than all others
    session.have(holder, [cid_at(9)], 0.0)
    assert session.numbers(holder) == [9]
    session.remove_peer(holder, 0.0)  # back in the pool, lacked by the one peer that is left
    session.want([Want(cid_at(number), SIZE, 0) for number in range(8)])
    session.add_peer("c", 0.0)
    assert session.numbers("c")[0] == 9


def test_within_a_window_rarity_comes_before_deadlines_and_beyond_it_after() -> None:
    pool = Pool()
    wanted = [Wanted(Want(cid_at(number), SIZE, number), 1 - number / 100) for number in range(RARITY_DEADLINES + 4)]
    pool.add(wanted)
    for number in (3, 9, RARITY_DEADLINES + 1):
        pool.note_lack(wanted[number], "a", True)
    pool.note_lack(wanted[5], "a", True)
    pool.note_lack(wanted[5], "b", True)
    order = [number_of(one.want.cid) for one in pool]
    assert order[:6] == [5, 9, 3, 0, 1, 2]  # among equally rare ones chance decides, here for the later one
    assert order[RARITY_DEADLINES] == RARITY_DEADLINES + 1


def test_the_order_among_equals_is_chance_and_differs_by_seed() -> None:
    orders = set()
    for seed in range(8):
        session = Session("a", seed=seed)
        session.want(wants(16, per_deadline=16))
        orders.add(tuple(session.numbers("a")))
    assert len(orders) > 1


def test_equal_seeds_give_equal_traces() -> None:
    def trace(seed: int) -> list[Event]:
        session = Session("a", "b", "c", seed=seed)
        session.want(wants(60, per_deadline=10))
        now = 0.0
        while session.download.missing:
            now += 0.01
            for number, peer in enumerate("abc"):
                if session.asked.get(peer) and round(now * 100) % (number + 1) == 0:
                    session.deliver(peer, now)
        return session.trace

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_the_less_loaded_peer_is_asked_next() -> None:
    session = Session("a", "b")
    session.want(wants(2))
    assert session.numbers("a") == [0]
    assert session.numbers("b") == [1]


def test_a_fast_peer_gets_more_than_a_slow_one() -> None:
    session = Session("fast", "slow")
    session.want(wants(200))
    now = 0.0
    while session.download.missing:
        now += 0.001
        if session.asked.get("fast"):
            session.deliver("fast", now)
        if round(now * 1000) % 10 == 0 and session.asked.get("slow"):
            session.deliver("slow", now)
    fast, slow = session.progress("fast"), session.progress("slow")
    assert fast.blocks + slow.blocks == 200
    assert 5 < fast.blocks / slow.blocks < 20
    assert now < 0.25  # together 1,100 blocks a second


def test_a_want_is_added_once() -> None:
    session = Session("a")
    session.want(wants(1))
    assert session.want(wants(1)) == []
    assert session.download.missing == 1


# --- windows -------------------------------------------------------------------------------------------------------------


def test_a_window_starts_small_and_grows_by_what_arrives() -> None:
    session = Session("a")
    session.want(wants(300))
    assert len(session.asked["a"]) == -(-INITIAL_WINDOW_BYTES // SIZE)
    now, most = 0.0, 0
    for _ in range(60):
        now += 0.001
        session.deliver("a", now)
        most = max(most, len(session.asked["a"]))
    assert most > 32


def test_two_blocks_are_asked_for_at_first_however_large_they_are() -> None:
    session = Session("a")
    session.want(wants(10, size=2 * INITIAL_WINDOW_BYTES))
    assert len(session.asked["a"]) == 2


def test_a_window_holds_half_a_second_of_the_rate() -> None:
    session = Session("a")
    session.want(wants(600))
    now = 0.0
    for _ in range(400):
        now += 0.02  # 50 blocks a second
        session.deliver("a", now)
    assert 20 <= max(len(session.asked["a"]), 20) <= 26  # the last block fills it


def test_a_slow_peer_gets_one_block_at_a_time() -> None:
    session = Session("a")
    session.want(wants(20))
    now = 0.0
    for _ in range(10):
        now += 1.0
        session.deliver("a", now)
    assert len(session.asked["a"]) == 1


def test_nodes_open_no_window() -> None:
    """They are small, and many of them would commit a slow peer to as many blocks."""
    session = Session("a")
    session.want([Want(cid_at(1000 + number), None, -1) for number in range(40)])
    session.want(wants(40))
    now = 0.0
    while any(number >= 1000 for number in session.numbers("a")):
        now += 0.001
        session.deliver("a", now, size=500)
    assert len(session.asked["a"]) <= -(-INITIAL_WINDOW_BYTES // SIZE)
    assert session.progress("a").rate == 0


def test_a_window_never_exceeds_its_bound() -> None:
    session = Session("a")
    session.want(wants(2000))
    now, most = 0.0, 0
    for _ in range(1000):
        now += 0.0001
        session.deliver("a", now)
        most = max(most, len(session.asked["a"]))
    assert most == MAX_WINDOW_BLOCKS


def test_a_window_is_refilled_when_half_of_it_is_free() -> None:
    session = Session("a")
    session.want(wants(100))
    now = 0.0
    for _ in range(20):
        now += 0.001
        session.deliver("a", now)
    asks = [len(event.cids) for event in session.trace if isinstance(event, Ask)]
    assert len(asks) < 10
    assert min(asks[1:]) >= 3


def test_a_small_node_does_not_hide_the_rate_of_its_peer() -> None:
    session = Session("a")
    now = warm_up(session, "a", gap=0.01)
    session.want([Want(cid_at(1), None, 0)], now)
    session.deliver("a", now + 0.01, size=200)
    assert session.progress("a").rate > 0.8 * SIZE / 0.01


def test_what_comes_together_is_assigned_and_measured_together() -> None:
    session, one_by_one = Session("a"), Session("a")
    session.want(wants(40))
    one_by_one.want(wants(40))
    cids = session.asked.pop("a")
    session.download.receive_blocks("a", [(cid, SIZE) for cid in cids], 0.4)
    events = session.drain()
    assert [event.cid for event in events if isinstance(event, Completed)] == cids
    assert len([event for event in events if isinstance(event, Ask)]) == 1
    for number in range(4):
        one_by_one.deliver("a", 0.1 * (number + 1))
    assert session.progress("a").rate == pytest.approx(one_by_one.progress("a").rate)


# --- dont-have and have --------------------------------------------------------------------------------------------------


def test_a_block_that_a_peer_lacks_is_asked_of_another_and_not_of_it_again() -> None:
    session = Session("a", "b")
    session.want(wants(2))
    session.dont_have("a", [cid_at(0)], 0.1)
    assert session.numbers("a") == []
    assert sorted(session.numbers("b")) == [0, 1]


def test_what_a_peer_with_few_blocks_has_is_found_in_few_round_trips() -> None:
    session = Session("a")
    session.want(wants(256))
    rounds = 0
    while 250 not in session.numbers("a"):
        session.dont_have("a", [cid for cid in session.asked["a"] if number_of(cid) != 250], 0.02 * rounds)
        rounds += 1
    assert rounds < 10
    before = len(session.asked["a"])
    assert before <= 100
    session.receive("a", cid_at(250), 1.0)
    session.asked["a"] = [cid for cid in session.asked["a"] if cid != cid_at(250)]


def test_a_have_makes_a_peer_eligible_again() -> None:
    session = Session("a")
    session.want(wants(2))
    session.dont_have("a", [cid_at(0), cid_at(1)], 0.1)
    assert session.download.stuck
    assert session.download.get_timer() is None
    assert session.have("a", [cid_at(1)], 0.2) == [Ask("a", (cid_at(1),))]
    assert not session.download.stuck


def test_what_a_peer_lacks_is_remembered_when_it_is_wanted_again() -> None:
    session = Session("a")
    session.want(wants(1))
    session.dont_have("a", [cid_at(0)], 0.1)
    session.download.discard_wants()
    assert session.want(wants(1), 0.2) == []
    assert session.download.stuck


def test_a_dont_have_is_an_answer_and_restarts_the_patience() -> None:
    session = Session("a")
    session.want(wants(3))
    session.dont_have("a", [cid_at(0)], 1.5)
    assert session.download.get_timer() == 1.5 + MIN_BLOCK_TIMEOUT_S


def test_a_dont_have_for_what_was_never_wanted_changes_nothing() -> None:
    session = Session("a")
    session.want(wants(1))
    assert session.dont_have("a", [cid_at(77)], 1.5) == []
    assert session.want(wants(1, start=77), 1.6) == [Ask("a", (cid_at(77),))]
    assert session.download.get_timer() == MIN_BLOCK_TIMEOUT_S


def test_messages_of_peers_that_are_unknown_or_gone_change_nothing() -> None:
    session = Session("a")
    session.want(wants(1))
    assert session.dont_have("x", [cid_at(0)], 0.0) == []
    assert session.have("x", [cid_at(0)], 0.0) == []
    assert session.remove_peer("x", 0.0) == []
    session.download.receive_lie("x", 0.0)
    assert session.drain() == []


def test_stuck_without_peers_and_not_without_wants() -> None:
    session = Session()
    stuck = [session.download.stuck]
    session.want(wants(1))
    stuck.append(session.download.stuck)
    session.add_peer("a", 0.0)
    stuck.append(session.download.stuck)
    assert stuck == [False, True, False]


# --- the end -------------------------------------------------------------------------------------------------------------


def test_a_slow_peer_is_not_asked_for_what_the_others_have_sooner() -> None:
    session = Session("fast", "slow")
    now = warm_up(session, "fast", gap=0.01, blocks=60)
    session.want(wants(4, start=500), now)
    session.dont_have("fast", [cid_at(500 + number) for number in range(4)], now)
    while session.asked["slow"]:
        now += 2.0
        session.deliver("slow", now)
    session.want(wants(60), now)
    assert len(session.asked["fast"]) < 60  # its window is full
    assert not session.asked["slow"]  # 0.6 s for the other, 2 s for the first block of this one
    session.want(wants(300, start=100), now)
    assert len(session.asked["slow"]) == 1
    session.remove_peer("fast", now)
    assert session.asked["slow"]


# --- giving up and results -----------------------------------------------------------------------------------------------


def test_discarding_wants_withdraws_them_and_forgets_them() -> None:
    session = Session("a", "b")
    session.want(wants(20))
    session.download.discard_wants()
    events = session.drain()
    assert {event.peer for event in events if isinstance(event, Withdraw)} == {"a", "b"}
    assert not session.asked["a"]
    assert not session.asked["b"]
    assert session.download.missing == 0
    assert session.download.get_timer() is None
    assert not session.download.stuck
    session.want(wants(2, start=50), 1.0)
    assert sorted(session.numbers("a") + session.numbers("b")) == [50, 51]


def test_expected_sizes() -> None:
    session = Session("a")
    session.want([Want(cid_at(0), 123, 0), Want(cid_at(1), None, 0)])
    assert session.download.expected_size(cid_at(0)) == 123
    assert session.download.expected_size(cid_at(1)) == MAX_CODED_BLOCK_BYTES
    assert session.download.expected_size(cid_at(2)) is None


def test_progress_tells_each_peers_share() -> None:
    session = Session("a", "b")
    session.want(wants(4))
    session.deliver("a", 0.1)
    session.remove_peer("b", 0.6)
    a, b = session.progress("a"), session.progress("b")
    assert (a.blocks, a.bytes, a.rate, a.snubbed) == (1, SIZE, SIZE / 0.1, False)
    assert a.outstanding == len(session.asked["a"]) == 3
    assert (b.blocks, b.bytes, b.outstanding) == (0, 0, 0)


@pytest.mark.parametrize("lacking", [0, 3])
def test_the_cost_of_a_call_does_not_grow_with_the_wants(lacking: int) -> None:
    """5,000 wants and 8 peers, of which ``lacking`` have the second half only."""
    session = Session(*(f"p{number}" for number in range(8)))
    several = wants(5000, per_deadline=30)
    spent, calls = 0.0, 0

    def timed(call: object, *arguments: object) -> None:
        nonlocal spent, calls
        start = time.process_time()
        call(*arguments)  # type: ignore[operator]  # a method of the engine
        spent += time.process_time() - start
        calls += 1

    timed(session.download.add_wants, several, 0.0)
    session.drain()
    now = 0.0
    while session.download.missing:
        now += 0.001
        for number in range(8):
            peer = f"p{number}"
            queue = session.asked.get(peer, [])
            missing = [cid for cid in queue[:8] if number < lacking and number_of(cid) < 2500]
            if missing:
                session.asked[peer] = [cid for cid in queue if cid not in missing]
                timed(session.download.receive_dont_have, peer, missing, now)
            elif queue:
                timed(session.download.receive_blocks, peer, [(queue.pop(0), SIZE)], now)
            session.drain()
    assert spent / calls < 0.0005  # about 50 µs here; sorting all wants in each call takes ten times as long as allowed
