"""Provider records: kept in order, bounded in number and in time, and nobody's pushed out by whoever announces without end."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pkv.limits import DHT_CLOSEST, MAX_ADDRESSES_PER_PEER, PROVIDER_RECORD_S
from p2pkv.routing.records import ProviderRecords

OWN = "own"
LIMIT = 64


def key(number: int) -> bytes:
    return number.to_bytes(34, "big")


@pytest.fixture
def records() -> ProviderRecords:
    return ProviderRecords(OWN, limit=LIMIT)


def names(records: ProviderRecords, number: int, now: float = 0.0) -> list[str]:
    return list(records.get(key(number), now))


def test_a_key_has_all_its_providers_in_the_order_in_which_they_came(records: ProviderRecords) -> None:
    for name in "abc":
        records.add(key(1), name, [f"/dns4/{name}"], 0.0)
    records.add(key(2), "d", [], 0.0)
    assert records.get(key(1), 0.0) == {name: (f"/dns4/{name}",) for name in "abc"}
    assert (names(records, 2), names(records, 3), len(records)) == (["d"], [], 4)


def test_addresses_are_those_that_were_told_last_and_not_too_many(records: ProviderRecords) -> None:
    records.add(key(1), "a", ["/old"], 0.0)
    records.add(key(2), "a", [str(number) for number in range(2 * MAX_ADDRESSES_PER_PEER)], 0.0)
    assert records.get(key(1), 0.0) == {"a": tuple(map(str, range(MAX_ADDRESSES_PER_PEER)))}


def test_a_key_has_at_most_so_many_providers_and_the_node_itself(records: ProviderRecords) -> None:
    for number in range(DHT_CLOSEST + 2):
        records.add(key(1), f"{number}", [], 0.0)
    records.add(key(1), OWN, [], 0.0)
    assert names(records, 1) == [*map(str, range(DHT_CLOSEST)), OWN]


def test_a_record_ends_unless_it_comes_again(records: ProviderRecords) -> None:
    records.add(key(1), "a", [], 0.0)
    records.add(key(1), "b", [], 0.0)
    records.add(key(1), "b", [], 10.0)
    assert names(records, 1, PROVIDER_RECORD_S - 1) == ["a", "b"]
    assert names(records, 1, PROVIDER_RECORD_S) == ["b"]
    records.expire(PROVIDER_RECORD_S)
    assert len(records) == 1
    records.expire(PROVIDER_RECORD_S + 10)
    assert len(records) == 0


def test_what_is_discarded_is_gone_and_the_rest_stays(records: ProviderRecords) -> None:
    for name in "ab":
        records.add(key(1), name, [], 0.0)
    for _ in range(2):
        records.discard(key(1), "a")
    records.discard(key(9), "a")
    assert (names(records, 1), len(records)) == (["b"], 1)


def test_whoever_announces_without_end_pushes_out_his_own(records: ProviderRecords) -> None:
    for name in "abc":
        for number in range(4):
            records.add(key(number), name, [], 0.0)
    for number in range(10 * LIMIT):
        records.add(key(100 + number), "flood", [], 1.0)
    assert len(records) == LIMIT
    assert [names(records, number) for number in range(4)] == [["a", "b", "c"]] * 4
    kept = [number for number in range(10 * LIMIT) if names(records, 100 + number)]
    assert kept == list(range(10 * LIMIT))[-(LIMIT - 12) :], "the oldest go first"


def test_what_the_node_provides_itself_is_never_pushed_out(records: ProviderRecords) -> None:
    for number in range(2 * LIMIT):
        records.add(key(number), OWN, [], 0.0)
    for number in range(2 * LIMIT):
        records.add(key(number), f"other {number % 7}", [], 0.0)
    assert len(records) == 3 * LIMIT, "and counts against nobody"
    assert all(OWN in names(records, number) for number in range(2 * LIMIT))


class Machine(RuleBasedStateMachine):
    """Against a model without any thrift; few keys and peers, so that all of them meet."""

    def __init__(self) -> None:
        super().__init__()
        self.records = ProviderRecords(OWN, limit=6)
        self.model: dict[tuple[bytes, str], float] = {}
        self.now = 0.0

    @rule(number=st.integers(0, 5), name=st.sampled_from([OWN, "a", "b", "c"]))
    def add(self, number: int, name: str) -> None:
        before = len(self.records)
        foreign = sum(who != OWN for _, who in self.model)
        self.records.add(key(number), name, [], self.now)
        if name != OWN and (key(number), name) not in self.model and foreign >= 6:
            assert len(self.records) == before
            ((lost, who),) = (pair for pair in self.model if pair[1] not in self._held(pair[0]))
            times = {other: [at for (_, of), at in self.model.items() if of == other] for other in "abc"}
            assert len(times[who]) == max(map(len, times.values()))
            assert self.model.pop((lost, who)) == min(times[who])
        self.model[key(number), name] = self.now

    @rule(number=st.integers(0, 5), name=st.sampled_from([OWN, "a"]))
    def discard(self, number: int, name: str) -> None:
        self.records.discard(key(number), name)
        self.model.pop((key(number), name), None)

    @rule(share=st.floats(0.0, 0.7))
    def wait(self, share: float) -> None:
        self.now += share * PROVIDER_RECORD_S
        self.records.expire(self.now)
        self.model = {pair: at for pair, at in self.model.items() if self.now - at < PROVIDER_RECORD_S}

    @invariant()
    def as_the_model(self) -> None:
        assert len(self.records) == len(self.model)
        for number in range(6):
            assert self._held(key(number)) == {who for which, who in self.model if which == key(number)}

    def _held(self, which: bytes) -> set[str]:
        return set(self.records.get(which, self.now))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
