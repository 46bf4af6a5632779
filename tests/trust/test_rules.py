"""Rules, records and the decision: who is accepted, for what, and what is said about it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, strategies as st

from p2pkv.errors import FormatError, RejectedError, RevokedError, UntrustedPublisherError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_CLOCK_SKEW_S
from p2pkv.trust.policy import Check, Decision, Step, judge
from p2pkv.trust.record import Record
from p2pkv.trust.rules import ANYBODY, Action, Namespace, Rule, trusted_publishers
from p2pkv.units import DAY
from tests.support.samples import CREATED, EXPIRES, KEY, MODEL_ID, OTHER_KEY, OTHER_PUBLISHER, PUBLISHER, envelope, manifest
from tests.support.statements import THIRD_KEY, did_of, revocations, succession

NOW = CREATED + DAY
CID = envelope().cid
ACCEPT = Rule(Action.ACCEPT, PUBLISHER)
OTHER_MODEL = bytes(32)


def decide(
    *rules: Rule, known: tuple[SignedStatement, ...] = (), now: float = NOW, newest: int | None = None, **changes: Any
) -> Decision:
    records: dict[str, Record] = {}
    for statement in known:
        did = statement.publisher
        records[did] = records.get(did, Record(did)).heard(statement)
    return judge(manifest(**changes), CID, rules, records, now, newest=newest)


def step(decision: Decision, check: Check) -> Step:
    (found,) = (step for step in decision.steps if step.check is check)
    return found


def test_by_default_nobody_is_trusted() -> None:
    assert not decide().accepted
    assert decide(ACCEPT).accepted


@pytest.mark.parametrize(
    ("scope", "fits"),
    [
        ({"model": MODEL_ID}, True),
        ({"model": OTHER_MODEL}, False),
        ({"licence": "CC0-1.0"}, True),
        ({"licence": "cc0-1.0"}, False),
        ({"licence": ""}, False),
        ({"namespace": Namespace.PUBLIC}, True),
        ({"namespace": Namespace.PRIVATE}, False),
        ({"model": MODEL_ID, "licence": "CC0-1.0", "namespace": Namespace.PUBLIC}, True),
        ({"model": MODEL_ID, "licence": "MIT"}, False),
        ({"model": OTHER_MODEL, "licence": "CC0-1.0"}, False),
    ],
)
def test_a_rule_holds_for_its_scope_alone(scope: dict[str, Any], fits: bool) -> None:
    assert decide(Rule(Action.ACCEPT, PUBLISHER, **scope)).accepted is fits
    assert decide(ACCEPT, Rule(Action.REJECT, PUBLISHER, **scope)).accepted is not fits
    assert decide(ACCEPT, Rule(Action.REJECT, ANYBODY, **scope)).accepted is not fits
    assert not decide(Rule(Action.ACCEPT, OTHER_PUBLISHER, **scope)).accepted
    assert decide(ACCEPT, Rule(Action.REJECT, OTHER_PUBLISHER, **scope)).accepted


def test_a_name_is_no_scope() -> None:
    """Whoever signs can call a model anything: its id alone counts."""
    scoped = Rule(Action.ACCEPT, PUBLISHER, model=MODEL_ID)
    assert decide(scoped, model_name="another name").accepted
    assert not decide(scoped, model_id=OTHER_MODEL, model_name="tiny").accepted


def test_private_artifacts_are_told_apart() -> None:
    private: dict[str, Any] = {"segment_keys": bytes(48)}
    assert decide(Rule(Action.ACCEPT, PUBLISHER, namespace=Namespace.PRIVATE), **private).accepted
    assert not decide(Rule(Action.ACCEPT, PUBLISHER, namespace=Namespace.PUBLIC), **private).accepted


@given(st.permutations([
    Rule(Action.ACCEPT, PUBLISHER),
    Rule(Action.ACCEPT, PUBLISHER, model=MODEL_ID),
    Rule(Action.ACCEPT, OTHER_PUBLISHER),
    Rule(Action.REJECT, ANYBODY, model=OTHER_MODEL),
    Rule(Action.REJECT, OTHER_PUBLISHER, licence="CC0-1.0"),
]))  # fmt: skip
def test_the_order_of_rules_means_nothing(rules: list[Rule]) -> None:
    assert decide(*rules).accepted
    assert not decide(*rules, publisher=OTHER_PUBLISHER).accepted
    assert not decide(*rules, model_id=OTHER_MODEL).accepted


def test_the_errors_say_what_would_change_the_decision() -> None:
    rejected = decide(ACCEPT, Rule(Action.REJECT, PUBLISHER, licence="CC0-1.0", note="not for us"))
    with pytest.raises(RejectedError, match="not for us") as caught:
        rejected.require()
    assert f"p2pkv trust remove {PUBLISHER}" in caught.value.advice
    with pytest.raises(UntrustedPublisherError, match="1 rules about it") as untrusted:
        decide(Rule(Action.ACCEPT, PUBLISHER, licence="MIT")).require()
    assert f"p2pkv trust add {PUBLISHER}" in untrusted.value.advice


def test_every_step_is_told_also_behind_one_that_fails() -> None:
    decision = decide(known=(revocations(1, 5),), now=EXPIRES + DAY)
    assert [step.check for step in decision.steps] == [*Check]
    assert [error.code for error in decision.errors] == ["trust.untrusted", "trust.revoked", "trust.expired"]
    assert all(step.text for step in decision.steps)


def test_who_is_no_publisher_is_no_rule() -> None:
    with pytest.raises(FormatError):
        Rule(Action.ACCEPT, "did:web:example.org")
    with pytest.raises(UsageError):
        Rule(Action.ACCEPT, ANYBODY)
    with pytest.raises(UsageError):
        Rule(Action.REJECT, PUBLISHER, model=bytes(31))
    rules = [ACCEPT, Rule(Action.REJECT, OTHER_PUBLISHER), Rule(Action.ACCEPT, PUBLISHER, model=MODEL_ID)]
    assert trusted_publishers(rules) == [PUBLISHER]


# --- revocations --------------------------------------------------------------------------------------------------------


def listed(*items: Revoked) -> SignedStatement:
    statement = Revocations(publisher=PUBLISHER, sequence=1, created=CREATED, items=items)
    return SignedStatement.sign(statement, KEY)


@pytest.mark.parametrize(
    "item",
    [
        Revoked(Scope.MANIFEST, CID, "wrong text"),
        Revoked(Scope.MODEL, MODEL_ID, "wrong text"),
        Revoked(Scope.BEFORE, 2, "wrong text"),
        Revoked(Scope.BEFORE, EVERYTHING, "wrong text"),
    ],
)
def test_what_was_taken_back_is_refused_with_the_reason(item: Revoked) -> None:
    with pytest.raises(RevokedError, match="wrong text"):
        decide(ACCEPT, known=(listed(item),)).require()


@pytest.mark.parametrize(
    "item",
    [Revoked(Scope.MANIFEST, Cid.of_node(b""), ""), Revoked(Scope.MODEL, OTHER_MODEL, ""), Revoked(Scope.BEFORE, 1, "")],
)
def test_what_was_not_is_accepted(item: Revoked) -> None:
    assert decide(ACCEPT, known=(listed(item),)).accepted


def test_nobody_takes_back_what_another_signed() -> None:
    assert decide(ACCEPT, known=(revocations(1, EVERYTHING, signer=OTHER_KEY),)).accepted


# --- successions --------------------------------------------------------------------------------------------------------


def test_trust_follows_the_key() -> None:
    known = (succession(KEY, OTHER_KEY), succession(OTHER_KEY, THIRD_KEY))
    assert decide(ACCEPT, known=known, publisher=OTHER_PUBLISHER).accepted
    decision = decide(ACCEPT, known=known, publisher=did_of(THIRD_KEY))
    assert decision.accepted
    assert "was replaced by" in step(decision, Check.RULES).text
    assert not decide(ACCEPT, publisher=OTHER_PUBLISHER).accepted
    scoped = Rule(Action.ACCEPT, PUBLISHER, licence="MIT")
    assert not decide(scoped, known=known, publisher=OTHER_PUBLISHER).accepted


def test_so_does_a_rule_that_rejects() -> None:
    rules = (Rule(Action.ACCEPT, OTHER_PUBLISHER), Rule(Action.REJECT, PUBLISHER))
    assert decide(*rules, publisher=OTHER_PUBLISHER).accepted
    assert not decide(*rules, known=(succession(KEY, OTHER_KEY),), publisher=OTHER_PUBLISHER).accepted


def test_the_old_key_signs_nothing_any_more() -> None:
    known = (succession(KEY, OTHER_KEY),)
    assert decide(ACCEPT, known=known, sequence=10).accepted
    with pytest.raises(UntrustedPublisherError, match="sequence 11, above its last one, 10"):
        decide(ACCEPT, known=known, sequence=11).require()


def test_of_two_successors_neither_is_followed() -> None:
    for known in permutations([succession(KEY, OTHER_KEY), succession(KEY, THIRD_KEY)]):
        with pytest.raises(UntrustedPublisherError, match="two hands"):
            decide(ACCEPT, known=known).require()
        for successor in (OTHER_KEY, THIRD_KEY):
            with pytest.raises(UntrustedPublisherError, match="not followed"):
                decide(ACCEPT, known=known, publisher=did_of(successor)).require()
        assert decide(Rule(Action.ACCEPT, OTHER_PUBLISHER), known=known, publisher=OTHER_PUBLISHER).accepted


def test_a_burnt_key_passes_no_trust_on() -> None:
    for known in permutations([succession(KEY, OTHER_KEY), revocations(1, EVERYTHING)]):
        assert not decide(ACCEPT, known=known).accepted
        assert not decide(ACCEPT, known=known, publisher=OTHER_PUBLISHER).accepted
    ended = (succession(KEY, OTHER_KEY), revocations(1, 11))
    assert not decide(ACCEPT, known=ended, sequence=10).accepted
    assert decide(ACCEPT, known=ended, publisher=OTHER_PUBLISHER).accepted


# --- clocks and sequences -----------------------------------------------------------------------------------------------


def test_a_skew_that_is_allowed_is_told() -> None:
    early = decide(ACCEPT, now=CREATED - 60)
    assert early.accepted
    assert "1 min 00 s in the future" in step(early, Check.CLOCK).text
    late = decide(ACCEPT, now=EXPIRES + MAX_CLOCK_SKEW_S)
    assert late.accepted
    assert "10 min 00 s" in step(late, Check.EXPIRY).text


def test_an_older_artifact_of_the_same_text_is_told_and_not_refused() -> None:
    older = decide(ACCEPT, sequence=3, newest=4)
    assert older.accepted
    assert "older than 4" in step(older, Check.SEQUENCE).text
    for newest in (None, 2, 3):
        assert "older" not in step(decide(ACCEPT, sequence=3, newest=newest), Check.SEQUENCE).text
