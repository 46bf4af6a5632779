"""Whose manifests are taken, and when: by default nobody's."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from p2pkv.errors import ExpiredError, Fault, UntrustedPublisherError
from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import MAX_INT
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import MAX_CLOCK_SKEW_S
from p2pkv.trust.policy import judge
from p2pkv.trust.rules import Action, Rule
from p2pkv.units import DAY
from tests.support.samples import CREATED, EXPIRES, OTHER_PUBLISHER, PUBLISHER, manifest

TRUSTED = {PUBLISHER}
CID = Cid.of_node(b"the envelope")
NOW = CREATED + DAY


def decide(judged: Manifest, trusted: Collection[str], now: float) -> None:
    """Decide with rules that accept all of ``trusted``, and raise what speaks against it."""
    judge(judged, CID, [Rule(Action.ACCEPT, did) for did in trusted], {}, now).require()


def test_a_trusted_publisher_is_accepted() -> None:
    decide(manifest(), TRUSTED, NOW)
    decide(manifest(), [OTHER_PUBLISHER, PUBLISHER], NOW)


@pytest.mark.parametrize("trusted", [set(), {OTHER_PUBLISHER}])
def test_nobody_else_is_and_the_error_says_what_would_trust_him(trusted: set[str]) -> None:
    with pytest.raises(UntrustedPublisherError) as caught:
        decide(manifest(), trusted, NOW)
    assert PUBLISHER in caught.value.message
    assert f"p2pkv trust add {PUBLISHER}" in caught.value.advice
    assert (caught.value.code, caught.value.fault) == ("trust.untrusted", Fault.POLICY)


def test_trust_is_asked_for_before_the_date() -> None:
    with pytest.raises(UntrustedPublisherError):
        decide(manifest(), (), EXPIRES + DAY)


@pytest.mark.parametrize("late", [0, MAX_CLOCK_SKEW_S - 1, MAX_CLOCK_SKEW_S])
def test_a_little_past_its_end_is_a_matter_of_clocks(late: int) -> None:
    decide(manifest(), TRUSTED, EXPIRES + late)


def test_an_expired_manifest_is_refused_with_its_date() -> None:
    with pytest.raises(ExpiredError, match=r"expired 1440 min 00 s ago, on 2027-01-01 00:00 UTC") as caught:
        decide(manifest(), TRUSTED, EXPIRES + DAY)
    assert caught.value.code == "trust.expired"
    with pytest.raises(ExpiredError):
        decide(manifest(), TRUSTED, EXPIRES + MAX_CLOCK_SKEW_S + 1)


def test_without_an_end_it_never_expires() -> None:
    decide(manifest(expires=None), TRUSTED, float(MAX_INT))


@pytest.mark.parametrize("early", [0, MAX_CLOCK_SKEW_S])
def test_a_little_before_its_making_is_a_matter_of_clocks(early: int) -> None:
    decide(manifest(), TRUSTED, CREATED - early)


def test_a_manifest_of_the_future_is_refused_and_points_at_the_clocks() -> None:
    with pytest.raises(ExpiredError, match=r"in the future, on 2026-01-01 00:00 UTC") as caught:
        decide(manifest(), TRUSTED, CREATED - MAX_CLOCK_SKEW_S - 1)
    assert "clock" in caught.value.advice


@pytest.mark.parametrize("seconds", [MAX_INT, 10**15])
def test_dates_beyond_any_calendar_are_told_as_seconds(seconds: int) -> None:
    with pytest.raises(ExpiredError, match=f"second {seconds}"):
        decide(manifest(created=seconds, expires=None), TRUSTED, NOW)
    decide(manifest(expires=seconds), TRUSTED, NOW)
