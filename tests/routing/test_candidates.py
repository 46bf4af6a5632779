"""Which manifest is opened, when, and how often."""

from __future__ import annotations

import pytest

from p2pkv.artifact.match import Match
from p2pkv.formats.cid import Cid
from p2pkv.routing.candidates import GRACE_S, Candidate, Candidates

A, B, C = (Cid.of_node(bytes((number,))) for number in range(3))


def match(manifest: Cid, matched: int) -> Match:
    return Match(manifest, matched, 9, bytes(2))


def test_nothing_to_choose() -> None:
    candidates = Candidates(5)
    assert candidates.choose(0.0, searching=True) is None
    assert candidates.choose(0.0, searching=False) is None
    assert candidates.get_timer() is None
    assert not candidates


def test_the_best_that_is_possible_is_taken_at_once() -> None:
    candidates = Candidates(5)
    candidates.add("p", match(A, 5), 1.0)
    assert candidates.choose(1.0, searching=True) == Candidate(A, 5, 9, ["p"])


def test_a_shorter_match_waits_a_little_for_a_longer_one() -> None:
    candidates = Candidates(5)
    candidates.add("p", match(A, 3), 1.0)
    assert candidates.choose(1.0, searching=True) is None
    assert candidates.get_timer() == 1.0 + GRACE_S
    candidates.add("q", match(B, 4), 1.05)
    assert candidates.get_timer() == 1.0 + GRACE_S  # counted from the first
    assert candidates.choose(1.0 + GRACE_S, searching=True) == Candidate(B, 4, 9, ["q"])


def test_nothing_is_waited_for_when_nobody_searches_any_more() -> None:
    candidates = Candidates(5)
    candidates.add("p", match(A, 3), 1.0)
    assert candidates.choose(1.0, searching=False) == Candidate(A, 3, 9, ["p"])


def test_of_equal_matches_the_one_that_more_peers_offer() -> None:
    candidates = Candidates(5)
    candidates.add("p", match(A, 5), 1.0)
    candidates.add("p", match(B, 5), 1.0)
    candidates.add("q", match(B, 5), 1.0)
    candidates.add("q", match(B, 5), 1.0)  # said twice, counted once
    assert candidates.choose(1.0, searching=True) == Candidate(B, 5, 9, ["p", "q"])


def test_a_longer_match_wins_over_more_peers() -> None:
    candidates = Candidates(5)
    for peer in "pqr":
        candidates.add(peer, match(A, 3), 1.0)
    candidates.add("s", match(B, 4), 1.0)
    chosen = candidates.choose(2.0, searching=True)
    assert chosen is not None
    assert chosen.manifest == B


def test_where_peers_disagree_the_longest_is_believed() -> None:
    candidates = Candidates(5)
    candidates.add("p", match(A, 2), 1.0)
    candidates.add("q", match(A, 4), 1.0)
    candidates.add("r", match(A, 1), 1.0)
    assert candidates.choose(2.0, searching=True) == Candidate(A, 4, 9, ["p", "q", "r"])


def test_each_manifest_is_chosen_once_and_the_next_best_follows_without_another_wait() -> None:
    candidates = Candidates(5)
    for manifest, matched in ((A, 3), (B, 5), (C, 1)):
        candidates.add("p", match(manifest, matched), 1.0)
    order = []
    while (chosen := candidates.choose(1.0 + GRACE_S, searching=True)) is not None:
        order.append(chosen.manifest)
        candidates.add("q", match(chosen.manifest, 5), 2.0)
    assert order == [B, A, C]
    assert not candidates
    assert candidates.get_timer() is None


@pytest.mark.parametrize("matched", [1, 5])
def test_candidates_are_true_while_some_are_open(matched: int) -> None:
    candidates = Candidates(5)
    candidates.add("p", match(A, matched), 1.0)
    assert candidates
