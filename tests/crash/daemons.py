"""Kills of a real daemon while others use it, by its API and over the network.

Three nodes: the *victim*; the *source*, which has what the victim fetches; and the *neighbour*, which fetches from the victim.
Only the victim is killed: at its start, some of them with a home of the first version, or while it publishes, fetches, serves
and collects. After each kill it has to start again on the same home, list and serve whole what it owes, and must not have
anything that it lists fetched anew. The neighbour counts blocks with a wrong hash.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.artifacts import control
from p2pkv.client.sync import Client
from p2pkv.errors import FetchIncompleteError, NotFoundError
from p2pkv.formats.cid import Cid
from p2pkv.limits import SHUTDOWN_GRACE_S
from p2pkv.store.home import HomeLayout
from p2pkv.units import MIB
from tests.crash.ledger import Ledger
from tests.crash.load import Load
from tests.support.forked_nodes import READY_TIMEOUT_S, ForkedNode, forked_node, start_node
from tests.support.homes import expire_leases, make_older, trust_publisher
from tests.support.texts import BlockReader, Text, make_text

_START_S: Final = 0.5  # within which a kill strikes at the start, as long as it is not known how long a start takes
_MIGRATION_S: Final = 0.02  # from the opening of an older index to a kill
_MOST_DONE: Final = 6  # by the load before a kill, or none of it within so many seconds
_LONGEST_LOAD_S: Final = 1.5
_LONGEST_PAUSE_S: Final = 0.1  # and then to the kill
_PATIENCE_S: Final = 5.0
_NEIGHBOUR_PATIENCE_S: Final = 1.0
_QUOTAS: Final = (0, 0, 2 * MIB, 4 * MIB)  # of some 10 MiB in all
_SECOND_SIGNAL_S: Final = 0.02


class DaemonCrashes:
    """The nodes, and what became of the victim's home. A context manager."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._home = folder / "victim"
        self._rng = random.Random(seed)
        self._ledger = Ledger()
        self._ours = _texts(1, 2)
        self._theirs = _texts(3, 4)
        self._stack = ExitStack()
        self.kills = 0
        self.lost: list[str] = []
        self.damaged_served: list[str] = []
        self.slow_stops: list[float] = []
        self.starts: list[float] = []
        self.stops: list[float] = []
        self.done: Counter[str] = Counter()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._source = stack.enter_context(self._node("source"))
            with control(self._source.home) as http:
                for text in self._theirs.values():
                    text.publish(http, self._source.home)
            self._neighbour = stack.enter_context(
                self._node("neighbour", bootstrap=[self._source.address], options=["--web", "127.0.0.1:0", "--no-mirror"])
            )
            self._threads = stack.enter_context(ThreadPoolExecutor(1))
            trust_publisher(self._home)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            refused = self._refused_blocks() if kind is None else 0
            if refused:
                self.damaged_served.append(f"the neighbour refused {refused} blocks of the victim")

    @contextmanager
    def _node(self, name: str, bootstrap: list[str] | None = None, options: list[str] | None = None) -> Iterator[ForkedNode]:
        trust_publisher(self._folder / name)
        with forked_node(self._folder / name, bootstrap=bootstrap or [], options=options or []) as node:
            yield node

    # --- one life ------------------------------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Let the victim live until it is killed once; some lives before that one end by a signal that asks."""
        while not self._live():
            pass
        self.kills += 1

    def _live(self) -> bool:
        """Return whether the life ended by a kill."""
        older = self._between_lives()
        quota = self._rng.choice(_QUOTAS)
        lane = self._rng.random() < 0.5
        options = ["--quota", str(quota), *([] if lane else ["--no-bulk"])]
        addresses = [self._source.address, self._neighbour.address]
        self._ledger.collected |= quota > 0
        victim = start_node(self._home, bootstrap=addresses, options=options)
        try:
            if self._rng.random() < (0.75 if older else 0.25):
                if older:
                    self._wait_opened()
                    time.sleep(self._rng.uniform(0, _MIGRATION_S))
                else:
                    time.sleep(self._rng.uniform(0, median(self.starts) if self.starts else _START_S))
                victim.kill()
                self.done["kills at the start"] += 1
                return True
            return self._use(victim, quota)
        finally:
            if victim.process.exitcode is None:
                victim.kill()

    def _wait_opened(self) -> None:
        """Wait until the victim has opened an index that was closed in order before."""
        index = HomeLayout(self._home).index
        shared_memory = index.with_name(f"{index.name}-shm")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not shared_memory.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _between_lives(self) -> bool:
        """Let time pass for the home; return whether it is that of an older version now."""
        if self._rng.random() < 0.15 and make_older(self._home):
            self._ledger.pinned.clear()
            self._ledger.leased.clear()
            self.done["migrations"] += 1
            return True
        if self._rng.random() < 0.5:
            self._ledger.leased.clear()
            expire_leases(self._home)
        return False

    def _use(self, victim: ForkedNode, quota: int) -> bool:
        """Look at it, use it, and end it; return whether by a kill."""
        self.starts.append(victim.wait_ready())
        with Client(self._home) as client:
            self._look(client, quota)
        load = Load(self._home, self._ledger, self._ours, self._theirs, self._rng.randrange(1 << 30))
        load.start()
        neighbour = self._threads.submit(self._let_the_neighbour_fetch, self._rng.choice([*self._ours]))
        load.wait_done(self._rng.randint(0, _MOST_DONE), _LONGEST_LOAD_S)
        time.sleep(self._rng.uniform(0, _LONGEST_PAUSE_S))
        killed = self._rng.random() < 0.85
        if killed:
            victim.kill()
        else:
            self._stop(victim)
        load.join()
        neighbour.result()
        self.done += load.done
        self.damaged_served += (f"kill {self.kills}: {cid}" for cid in load.damaged)
        return killed

    def _stop(self, victim: ForkedNode) -> None:
        """End it by one signal, within the time that is promised, or by two, at once."""
        signals = self._rng.choice((1, 2))
        seconds = victim.stop(signals=signals, pause_s=_SECOND_SIGNAL_S)
        self.stops.append(seconds)
        if seconds > SHUTDOWN_GRACE_S:
            self.slow_stops.append(seconds)

    # --- looking -------------------------------------------------------------------------------------------------------

    def _look(self, client: Client, quota: int) -> None:
        """Hold the victim to what it owes, and to what it lists."""
        listed = {Cid.parse(row["manifest_cid"]) for row in client.artifacts() if row["complete"]}
        owed = self._ledger.owed()
        self.lost += (f"kill {self.kills}: {cid} is not listed" for cid in owed - listed)
        self._ledger.settle(listed)
        self._ledger.collected = quota > 0
        whole = (owed if quota else listed) & listed  # under a quota others may go while they are read
        for cid in whole:
            self._read(client, cid)
        ours = [cid for cid in whole if cid in self._ours]
        if ours:
            self._read_over_the_network(self._rng.choice(ours))

    def _read(self, client: Client, cid: Cid) -> None:
        """Have the node check an artifact, and read every block where it says that it lies."""
        reader = BlockReader(self._home)
        try:
            report = client.fetch(cid, patience_s=_PATIENCE_S, on_event=reader.hear)
        except (NotFoundError, FetchIncompleteError) as error:
            self.lost.append(f"kill {self.kills}: {cid}: {error}")
            return
        self._ledger.leased.add(cid)
        self.damaged_served += (f"kill {self.kills}: {damaged}" for damaged in reader.damaged)
        missing = {*self._text_cids(cid)} - reader.found
        if missing or report["bytes_by_peer"]:
            fetched = sum(report["bytes_by_peer"].values())
            self.lost.append(f"kill {self.kills}: {cid} lacks {len(missing)} blocks, {fetched} bytes came from peers")

    def _read_over_the_network(self, cid: Cid) -> None:
        if not self._let_the_neighbour_fetch(cid, _PATIENCE_S):
            self.lost.append(f"kill {self.kills}: the neighbour could not fetch {cid}")

    def _let_the_neighbour_fetch(self, cid: Cid, patience_s: float = _NEIGHBOUR_PATIENCE_S) -> bool:
        """Have the neighbour fetch an artifact of which it then has nothing any more; return whether all of it came."""
        reader = BlockReader(self._neighbour.home)
        with Client(self._neighbour.home) as client, suppress(NotFoundError, FetchIncompleteError):
            client.fetch(cid, patience_s=patience_s, on_event=reader.hear)
            self.damaged_served += (f"kill {self.kills}: {damaged} at the neighbour" for damaged in reader.damaged)
            client.remove(cid)
            expire_leases(self._neighbour.home)
            client.collect()
            self.done["fetches of the neighbour"] += 1
            return {*self._text_cids(cid)} <= reader.found
        return False

    def _text_cids(self, cid: Cid) -> list[Cid]:
        return [*(self._ours | self._theirs)[cid].published.cids]

    def _refused_blocks(self) -> int:
        text = httpx.get(f"{self._neighbour.web}/metrics").text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return int(next(sample.value for sample in samples if sample.name == "p2pkv_refused_blocks_total"))

    def summary(self) -> str:
        """Return a line for people: what was done to the victim, and how long it took to start and to stop."""
        done = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        starts = f"starts: {median(self.starts):.2f} s, at most {max(self.starts):.2f} s" if self.starts else "no start"
        stops = f"; stops: at most {max(self.stops):.2f} s" if self.stops else ""
        return f"real daemon: {done}; {starts}{stops}"


def _texts(*numbers: int) -> dict[Cid, Text]:
    """Return two artifacts for each number, of 1 and 2.5 MiB, the longer of which begins as the shorter does."""
    texts = [make_text(number, segments) for number in numbers for segments in (2, 5)]
    return {text.cid: text for text in texts}
