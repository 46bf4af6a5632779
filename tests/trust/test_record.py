"""What a node knows of a publisher only ever grows, and does not depend on who told it, or in which order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pkv.errors import FormatError, SignatureError, StatementError
from p2pkv.formats.cid import Cid
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement, StatementKind
from p2pkv.formats.succession import Succession
from p2pkv.limits import MAX_LISTS_PER_PUBLISHER, MAX_REVOCATIONS, MAX_SUCCESSIONS
from p2pkv.trust.record import Record, holder, record_from, succeeded
from tests.support.samples import CREATED, KEY, OTHER_KEY, OTHER_PUBLISHER, PUBLISHER
from tests.support.statements import THIRD_KEY, did_of, key, revocations, succession


def keys_of(record: Record) -> set[tuple[Scope, Cid | bytes | int]]:
    return {item.key for item in record.items}


def test_a_longer_list_takes_the_place_of_a_shorter_one() -> None:
    short, long = revocations(1, 5), revocations(2, 5, 6)
    record = Record(PUBLISHER).heard(short).heard(long)
    assert record.statements == (long,)
    assert record.sequence == 2
    assert record.heard(short) is record
    renewed = record.heard(revocations(3, 5, 6))
    assert renewed.statements == (revocations(3, 5, 6),)
    assert renewed.heard(long) is renewed
    assert record.heard(long) is record


def test_what_a_later_list_leaves_out_stays_taken_back() -> None:
    first, second = revocations(1, 5), revocations(2, 6)
    for order in permutations([first, second]):
        record = record_from(PUBLISHER, order)
        assert keys_of(record) == {(Scope.BEFORE, 5), (Scope.BEFORE, 6)}
        assert record.statements == (first, second)
        assert record.sequence == 2
    healed = record_from(PUBLISHER, [first, second, revocations(3, 5, 6, 7)])
    assert len(healed.lists) == 1


def test_the_next_list_has_all_of_the_ones_before() -> None:
    record = record_from(PUBLISHER, [revocations(1, 5), revocations(2, 6)])
    item = Revoked(Scope.BEFORE, 9, "more")
    longer = record.next_list(item, CREATED, sequence=3)
    assert (longer.sequence, longer.created) == (3, CREATED)
    assert [known.key for known in longer.items] == [(Scope.BEFORE, 5), (Scope.BEFORE, 6), (Scope.BEFORE, 9)]
    merged = record.heard(SignedStatement.sign(longer, KEY))
    assert len(merged.lists) == 1
    again = merged.next_list(Revoked(Scope.BEFORE, 9, "another reason"), CREATED, sequence=1000)
    assert (again.sequence, again.items) == (1000, longer.items)
    full = Record(PUBLISHER).heard(revocations(1, *range(1, MAX_REVOCATIONS + 1)))
    with pytest.raises(StatementError, match="--before"):
        full.next_list(Revoked(Scope.MODEL, bytes(32), ""), CREATED, sequence=1)


def test_lists_that_contradict_each_other_are_bounded() -> None:
    record = Record(PUBLISHER)
    for number in range(1, MAX_LISTS_PER_PUBLISHER + 1):
        record = record.heard(revocations(number, 100 + number))
    with pytest.raises(StatementError, match="contradict"):
        record.heard(revocations(9, 200))
    burnt = record.heard(revocations(9, EVERYTHING))
    assert burnt.burnt is not None
    assert burnt.statements == (revocations(9, EVERYTHING),)
    everything = [100 + number for number in range(1, MAX_LISTS_PER_PUBLISHER + 1)]
    assert len(record.heard(revocations(9, *everything, 200)).lists) == 1


@pytest.mark.parametrize(
    "statement",
    [
        SignedStatement.sign(Revocations(publisher=OTHER_PUBLISHER, sequence=1, created=0, items=()), OTHER_KEY),
        replace(revocations(1, 5), signature=bytes(64)),
        replace(revocations(1, 5), payload=revocations(2, 6).payload),
        replace(revocations(1, 5), kind=StatementKind.SUCCESSION),
        replace(revocations(1, 5), kind=StatementKind.GRANT),
        replace(succession(KEY, OTHER_KEY), signature=revocations(1, 5).signature),
    ],
    ids=["another publisher", "no signature", "another payload", "another kind", "a kind not kept", "another signature"],
)
def test_what_is_not_this_publishers_is_not_heard(statement: SignedStatement) -> None:
    with pytest.raises((SignatureError, FormatError)):
        Record(PUBLISHER).heard(statement)


# --- successions --------------------------------------------------------------------------------------------------------


def records(*statements: SignedStatement) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for statement in statements:
        did = statement.publisher
        found[did] = found.get(did, Record(did)).heard(statement)
    return found


def test_trust_follows_a_row_of_successions() -> None:
    known = records(succession(KEY, OTHER_KEY), succession(OTHER_KEY, THIRD_KEY))
    assert list(succeeded(PUBLISHER, known)) == [PUBLISHER, OTHER_PUBLISHER, did_of(THIRD_KEY)]
    assert list(succeeded(OTHER_PUBLISHER, known)) == [OTHER_PUBLISHER, did_of(THIRD_KEY)]
    assert list(succeeded(did_of(THIRD_KEY), known)) == [did_of(THIRD_KEY)]


def test_a_ring_of_successions_ends() -> None:
    known = records(succession(KEY, OTHER_KEY), succession(OTHER_KEY, KEY))
    assert list(succeeded(PUBLISHER, known)) == [PUBLISHER, OTHER_PUBLISHER]


def test_a_row_of_successions_is_bounded() -> None:
    row = [key(number) for number in range(100, 100 + MAX_SUCCESSIONS + 3)]
    known = records(*(succession(old, new) for old, new in pairwise(row)))
    assert len(list(succeeded(did_of(row[0]), known))) == MAX_SUCCESSIONS + 1


def test_two_successors_prove_that_the_key_is_in_two_hands() -> None:
    one, two = succession(KEY, OTHER_KEY), succession(KEY, THIRD_KEY)
    for order in permutations([one, two, succession(KEY, key(99))]):
        record = record_from(PUBLISHER, order)
        assert record.forked
        assert record.succession is None
        assert len(record.successions) == 2
    again = SignedStatement.sign(Succession.agreed(PUBLISHER, OTHER_KEY, last=99, created=1, reason="told again"), KEY)
    assert not record_from(PUBLISHER, [one, again]).forked


def test_a_burnt_key_has_no_successor_whichever_came_first() -> None:
    for order in permutations([succession(KEY, OTHER_KEY), revocations(1, EVERYTHING)]):
        record = record_from(PUBLISHER, order)
        assert record.burnt is not None
        assert record.succession is None
        assert list(succeeded(PUBLISHER, {PUBLISHER: record})) == [PUBLISHER]


def test_keys_in_a_row_have_one_holder_however_long_it_is() -> None:
    row = [key(number) for number in range(100, 100 + MAX_SUCCESSIONS + 3)]
    known = records(*(succession(old, new) for old, new in pairwise(row)))
    assert {holder(did_of(each), known) for each in row} == {did_of(row[-1])}
    assert holder(PUBLISHER, known) == PUBLISHER


def test_keys_in_a_ring_have_one_holder_and_so_has_who_leads_into_it() -> None:
    known = records(succession(KEY, OTHER_KEY), succession(OTHER_KEY, THIRD_KEY), succession(THIRD_KEY, OTHER_KEY))
    assert len({holder(did_of(each), known) for each in (KEY, OTHER_KEY, THIRD_KEY)}) == 1


def test_a_succession_that_is_not_followed_makes_nobody_one() -> None:
    forked = records(succession(KEY, OTHER_KEY), succession(KEY, THIRD_KEY))
    burnt = records(succession(KEY, OTHER_KEY), revocations(1, EVERYTHING))
    for known in (forked, burnt):
        assert len({holder(did_of(each), known) for each in (KEY, OTHER_KEY, THIRD_KEY)}) == 3


# --- any order ----------------------------------------------------------------------------------------------------------


class Hearing(RuleBasedStateMachine):
    """A node hears lists of three publishers: longer ones, replays, older ones, shrunk ones, forged ones."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Record] = {}
        self.heard: list[SignedStatement] = []
        self.obeyed: dict[str, set[tuple[Scope, Cid | bytes | int]]] = {}
        self.signed: dict[str, set[tuple[Scope, Cid | bytes | int]]] = {}

    def hear(self, statement: SignedStatement) -> None:
        did = statement.publisher
        before = self.known.get(did, Record(did))
        try:
            self.known[did] = before.heard(statement)
        except (SignatureError, FormatError):
            return

    @rule(who=st.sampled_from([KEY, OTHER_KEY, THIRD_KEY]), sequence=st.integers(1, 6), what=st.sets(st.integers(1, 5)))
    def a_list(self, who: object, sequence: int, what: set[int]) -> None:
        assert isinstance(who, type(KEY))
        statement = revocations(sequence, *sorted(what), signer=who)
        self.signed.setdefault(did_of(who), set()).update((Scope.BEFORE, number) for number in what)
        self.heard.append(statement)
        self.hear(statement)

    @rule(old=st.sampled_from([KEY, OTHER_KEY]), new=st.sampled_from([THIRD_KEY, key(50)]))
    def a_succession(self, old: object, new: object) -> None:
        assert isinstance(old, type(KEY))
        assert isinstance(new, type(KEY))
        self.heard.append(succession(old, new))
        self.hear(self.heard[-1])

    @rule(data=st.data())
    def a_replay(self, data: st.DataObject) -> None:
        if self.heard:
            self.hear(data.draw(st.sampled_from(self.heard)))

    @rule(data=st.data())
    def a_forgery(self, data: st.DataObject) -> None:
        if self.heard:
            statement = data.draw(st.sampled_from(self.heard))
            thief = data.draw(st.sampled_from([KEY, OTHER_KEY, THIRD_KEY]))
            self.hear(replace(statement, key=bytes(thief.verify_key)))
            self.hear(replace(statement, signature=thief.sign(statement.payload).signature))

    @invariant()
    def what_is_obeyed_only_grows(self) -> None:
        for did, record in self.known.items():
            obeyed = keys_of(record)
            assert self.obeyed.get(did, set()) <= obeyed
            self.obeyed[did] = obeyed

    @invariant()
    def nothing_is_obeyed_that_was_not_signed(self) -> None:
        for did, record in self.known.items():
            assert keys_of(record) <= self.signed.get(did, set())
            assert all(kept.opened.publisher == did for kept in record.lists)

    @invariant()
    def what_is_kept_proves_itself_to_others(self) -> None:
        for did, record in self.known.items():
            assert keys_of(record_from(did, reversed(record.statements))) == keys_of(record)
            assert record_from(did, record.statements).succession == record.succession


Hearing.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestHearing = Hearing.TestCase
