"""Random sessions, which hold the invariants of the engine at every step."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pkv.download.engine import Ask, Completed, Dropped, Snubbed, Want, Withdraw
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_DUPLICATE_SHARE
from tests.download.session import SIZE, Session, cid_at, number_of

PEERS = ("p0", "p1", "p2", "p3")
peers = st.sampled_from(PEERS)
# A few small ones among them, so that second asks of these lie within the budget.
SIZES = {number: SIZE // 50 if number % 4 == 0 else SIZE for number in range(60)}
numbers = st.lists(st.integers(0, 59), min_size=1, max_size=30, unique=True)


class Sessions(RuleBasedStateMachine):
    """Peers come, go, deliver, deny, fall silent and wake up; time passes. Two engines with one seed hear the same."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session()
        self.now = 0.0
        self.wanted: set[int] = set()
        self.here: set[int] = set()
        self.present: set[str] = set()
        self.liars: set[str] = set()
        self.lacks: dict[str, set[int]] = {peer: set() for peer in PEERS}
        self.late: dict[str, list[Cid]] = {peer: [] for peer in PEERS}  # withdrawn, and perhaps on its way
        self.ever_asked: set[int] = set()
        self.second_asks = 0

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.session = Session(seed=seed)
        self.twin = Session(seed=seed)

    def call(self, method: str, *arguments: object) -> None:
        """Make the call on both engines, and follow what comes of it."""
        before = {peer: list(cids) for peer, cids in self.session.asked.items()}
        for session in (self.session, self.twin):
            getattr(session.download, method)(*arguments)
        events = self.session.drain()
        assert self.twin.drain() == events
        assert self.twin.download.get_timer() == self.session.download.get_timer()
        held = {peer: set(cids) for peer, cids in before.items() if peer in self.present}
        for event in events:
            match event:
                case Ask(peer, cids):
                    assert peer in self.present
                    for cid in cids:
                        number = number_of(cid)
                        assert number in self.wanted - self.here, "only what is missing is asked for"
                        assert number not in self.lacks[peer], "nothing is asked of a peer that lacks it"
                        holders = [other for other, of_other in held.items() if cid in of_other]
                        assert peer not in holders
                        assert len(holders) <= 1, "at most two in flight"
                        self.second_asks += len(holders) * SIZES[number]
                        held.setdefault(peer, set()).add(cid)
                        self.ever_asked.add(number)
                case Withdraw(peer, cids):
                    self.late[peer] += cids
                    held.setdefault(peer, set()).difference_update(cids)
                case Completed(cid, _):
                    number = number_of(cid)
                    assert number in self.wanted - self.here, "each block completes once"
                    self.here.add(number)
                    for of_peer in held.values():
                        of_peer.discard(cid)
                case Dropped() | Snubbed():
                    pass

    @rule(several=numbers, deadline=st.integers(0, 5))
    def want(self, several: list[int], deadline: int) -> None:
        new = [number for number in several if number not in self.here]
        self.wanted.update(new)
        self.call("add_wants", [Want(cid_at(number), SIZES[number], deadline + number // 20) for number in new], self.now)

    @rule(peer=peers)
    def join(self, peer: str) -> None:
        if peer not in self.liars:
            if peer not in self.present:
                self.lacks[peer] = set()
            self.present.add(peer)
        self.call("add_peer", peer, self.now)

    def forget(self, peer: str) -> None:
        self.late[peer] += self.session.asked.pop(peer, [])
        self.twin.asked.pop(peer, None)
        self.present.discard(peer)

    @rule(peer=peers)
    def leave(self, peer: str) -> None:
        self.forget(peer)
        self.call("remove_peer", peer, self.now)

    @rule(peer=peers)
    def lie(self, peer: str) -> None:
        self.liars.add(peer)
        self.forget(peer)
        self.call("receive_lie", peer, self.now)

    @rule(peer=peers, count=st.integers(1, 8))
    def deliver(self, peer: str, count: int) -> None:
        for _ in range(count):
            queue = self.session.asked.get(peer)
            if not queue:
                return
            cid = queue.pop(0)
            self.twin.asked[peer].remove(cid)
            self.now += 0.001
            self.call("receive_blocks", peer, [(cid, SIZES[number_of(cid)])], self.now)

    @rule(peer=peers)
    def deliver_late(self, peer: str) -> None:
        if self.late[peer]:
            cid = self.late[peer].pop(0)
            for session in (self.session, self.twin):  # it may have been asked for again meanwhile
                if cid in session.asked.get(peer, []):
                    session.asked[peer].remove(cid)
            self.call("receive_blocks", peer, [(cid, SIZES[number_of(cid)])], self.now)

    @rule(peer=peers, count=st.integers(1, 8))
    def deny(self, peer: str, count: int) -> None:
        cids = self.session.asked.get(peer, [])[:count]
        if peer in self.present and cids:
            for session in (self.session, self.twin):
                session.asked[peer] = session.asked[peer][count:]
            self.lacks[peer].update(map(number_of, cids))
            self.call("receive_dont_have", peer, cids, self.now)

    @rule(peer=peers, data=st.data())
    def gain(self, peer: str, data: st.DataObject) -> None:
        if self.lacks[peer] and peer in self.present:
            gained = data.draw(st.sets(st.sampled_from(sorted(self.lacks[peer])), min_size=1))
            self.lacks[peer] -= gained
            self.call("receive_have", peer, [cid_at(number) for number in sorted(gained)], self.now)

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.call("handle_timer", self.now)

    @precondition(lambda self: self.wanted != self.here)
    @rule()
    def give_up(self) -> None:
        self.wanted = set(self.here)
        self.call("discard_wants")
        assert not any(self.session.asked.get(peer) for peer in self.present)

    @invariant()
    def a_want_is_never_lost(self) -> None:
        assert self.session.download.missing == len(self.wanted - self.here)

    @invariant()
    def outstanding_is_what_was_asked(self) -> None:
        for progress in self.session.download.progress():
            expected = len(self.session.asked.get(progress.peer, [])) if progress.peer in self.present else 0
            assert progress.outstanding == expected

    @invariant()
    def what_an_idle_peer_could_be_asked_for_waits_for_a_busy_one_that_has_it(self) -> None:
        asked = {number_of(cid) for peer in self.present for cid in self.session.asked.get(peer, [])}
        busy = [peer for peer in self.present if self.session.asked.get(peer)]
        for peer in self.present.difference(busy):
            for number in self.wanted - self.here - asked - self.lacks[peer]:
                assert any(number not in self.lacks[other] for other in busy)

    @invariant()
    def stuck_means_that_nobody_can_be_asked(self) -> None:
        missing = self.wanted - self.here
        possible = any(missing - self.lacks[peer] for peer in self.present)
        assert self.session.download.stuck == (bool(missing) and not possible)

    @invariant()
    def duplicates_stay_within_the_budget(self) -> None:
        assert self.second_asks <= MAX_DUPLICATE_SHARE * sum(SIZES[number] for number in self.ever_asked)

    @invariant()
    def there_is_a_timer_while_something_is_outstanding(self) -> None:
        busy = any(self.session.asked.get(peer) for peer in self.present)
        assert (self.session.download.get_timer() is not None) == busy

    def teardown(self) -> None:
        """A peer that holds everything comes and stays: the session completes, whatever the others do."""
        if not hasattr(self, "twin"):
            return
        self.present.add("all")
        self.lacks["all"] = set()
        self.late["all"] = []
        self.call("add_peer", "all", self.now)
        for _ in range(1000):
            if not self.session.download.missing:
                break
            if self.session.asked.get("all"):
                self.deliver("all", 1)
            else:
                self.wait(3.0)
        assert self.session.download.missing == 0


TestSessions = Sessions.TestCase
TestSessions.settings = settings(deadline=None, max_examples=150, stateful_step_count=50)
