"""Of several manifests of one text the last one that its publisher signed is taken, and the others are told or tried later."""

from __future__ import annotations

from typing import Any

import pytest

from p2pkv.artifact.match import Match
from p2pkv.formats.cid import Cid
from p2pkv.formats.manifest import Manifest
from p2pkv.routing.candidates import GRACE_S, Candidates
from p2pkv.routing.contest import Contest
from tests.support.samples import OTHER_PUBLISHER, manifest

A, B, C, D = (Cid.of_node(bytes((number,))) for number in range(4))
SEGMENTS = len(manifest().segments)


def signed(sequence: int, **changes: Any) -> Manifest:
    return manifest(sequence=sequence, **changes)


@pytest.fixture
def candidates() -> Candidates:
    return Candidates(5)


@pytest.fixture
def contest(candidates: Candidates) -> Contest:
    return Contest(candidates)


def offer(candidates: Candidates, *cids: Cid, matched: int = 5, segments: int = SEGMENTS) -> None:
    for cid in cids:
        candidates.add("p", Match(cid, matched, segments, bytes(1)), 0.0)


def choose(candidates: Candidates) -> Cid | None:
    chosen = candidates.choose(9.0, searching=False)
    return chosen.manifest if chosen is not None else None


def test_the_only_one_is_taken_at_once(contest: Contest) -> None:
    assert not contest.under_way
    assert contest.enter(A, signed(1), 0.0) == A
    assert not contest.under_way
    assert contest.get_timer() is None
    assert list(contest.superseded()) == []
    assert contest.enter(A, signed(1), 0.0) == A  # again, when its token ids are here


@pytest.mark.parametrize(("first", "second", "wins"), [(1, 2, B), (2, 1, A), (1, 1, A)])
def test_the_one_that_was_signed_last_is_taken_also_when_it_is_offered_second(
    contest: Contest, candidates: Candidates, first: int, second: int, wins: Cid
) -> None:
    offer(candidates, A, B)
    assert choose(candidates) == A
    assert contest.enter(A, signed(first), 1.0) == B
    assert contest.under_way
    assert contest.get_timer() == 1.0 + GRACE_S
    assert contest.enter(B, signed(second), 1.01) == wins
    told = [(cid, error.message) for cid, error in contest.superseded()]
    loser = B if wins == A else A
    message = "sequence 1 is older than 2, which its publisher signed for the same text"
    assert told == ([(loser, message)] if first != second else [])


@pytest.mark.parametrize("changes", [{"publisher": OTHER_PUBLISHER}, {"last_chain_key": bytes(32)}, {"model_id": bytes(32)}])
def test_another_text_or_publisher_is_no_newer_one(contest: Contest, candidates: Candidates, changes: dict[str, Any]) -> None:
    offer(candidates, A, B)
    choose(candidates)
    contest.enter(A, signed(1), 0.0)
    assert contest.enter(B, signed(2, **changes), 0.0) == A
    assert list(contest.superseded()) == []
    contest.refuse(A)
    assert choose(candidates) == B


def test_what_matches_less_may_be_the_same_text_and_what_has_other_segments_is_not(
    contest: Contest, candidates: Candidates
) -> None:
    """How far something matches is what a peer says; how many segments an older one has says its own manifest."""
    offer(candidates, A)
    choose(candidates)
    offer(candidates, B, matched=1)
    offer(candidates, C, matched=2)
    offer(candidates, D, segments=SEGMENTS + 1)
    assert contest.enter(A, signed(1), 0.0) == C
    assert contest.enter(C, signed(2), 0.0) == B
    assert contest.enter(B, signed(3), 0.0) == B
    assert choose(candidates) == D


def test_a_rival_that_does_not_come_is_not_waited_for(contest: Contest, candidates: Candidates) -> None:
    offer(candidates, A, B, C)
    choose(candidates)
    assert contest.enter(A, signed(1), 0.0) == B
    contest.leave(B)
    assert contest.next(GRACE_S) == A
    assert contest.enter(A, signed(1), GRACE_S) == A
    assert {choose(candidates), choose(candidates)} == {B, C}


def test_a_rival_that_is_refused_gives_way(contest: Contest, candidates: Candidates) -> None:
    offer(candidates, A, B, C)
    choose(candidates)
    assert contest.enter(A, signed(1), 0.0) == B
    contest.refuse(B)
    assert contest.under_way
    assert contest.next(0.0) == C
    assert contest.enter(C, signed(0), 0.0) == A
    assert [cid for cid, _ in contest.superseded()] == [C]


def test_where_the_newest_cannot_be_had_the_older_ones_are_tried(contest: Contest, candidates: Candidates) -> None:
    offer(candidates, A, B)
    choose(candidates)
    contest.enter(A, signed(1), 0.0)
    assert contest.enter(B, signed(2), 0.0) == B
    contest.refuse(B)
    assert not contest.under_way
    assert choose(candidates) == A
    assert contest.enter(A, signed(1), 5.0) == A
    assert list(contest.superseded()) == []
