"""Programs that use a node in every way at once, until it is gone: each in a thread, by the control API."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx

from bench.artifacts import control
from p2pkv.client.sync import Client
from p2pkv.errors import DaemonUnreachableError, FetchIncompleteError, NotFoundError, UsageError
from p2pkv.formats.cid import Cid
from tests.crash.ledger import Ledger
from tests.support.texts import BlockReader, Text

_PATIENCE_S: Final = 3.0
_PINS: Final = "crash"

_GONE: Final = (DaemonUnreachableError, httpx.TransportError)
# What a program may hear whose artifact was removed or collected, or whose provider was killed.
_REFUSED: Final = (NotFoundError, FetchIncompleteError, UsageError)


class Load:
    """A publisher, a fetcher and a keeper at work on the node of ``home``; what it owes then stands in ``ledger``.

    ``ours`` are published, ``theirs`` fetched from others.
    """

    def __init__(self, home: Path, ledger: Ledger, ours: Mapping[Cid, Text], theirs: Mapping[Cid, Text], seed: int) -> None:
        self._home = home
        self._ledger = ledger
        self._ours = ours
        self._theirs = theirs
        self.done: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.damaged: list[Cid] = []
        self._seed = seed
        self._threads = ThreadPoolExecutor(3)
        self._running: list[Future[None]] = []

    def start(self) -> None:
        for number, work in enumerate((self._publish, self._fetch, self._keep)):
            self._running.append(self._threads.submit(self._repeat, work, random.Random(self._seed + number)))

    def wait_done(self, count: int, at_most_s: float) -> None:
        """Wait until so many things were done, or for ``at_most_s`` seconds."""
        deadline = time.monotonic() + at_most_s
        while self._total() < count and time.monotonic() < deadline:
            time.sleep(0.002)

    def _total(self) -> int:
        with self._counting:
            return self.done.total()

    def _count(self, what: str) -> None:
        with self._counting:
            self.done[what] += 1

    def join(self) -> None:
        """Wait until everybody has noticed that the node is gone. Raises what nobody foresaw."""
        self._threads.shutdown()
        for thread in self._running:
            thread.result()

    def _repeat(self, work: Callable[[random.Random, Client, httpx.Client], None], rng: random.Random) -> None:
        with suppress(*_GONE), Client(self._home) as client, control(self._home) as http:
            while True:
                with suppress(*_REFUSED), self._noting_the_end(work.__name__):
                    work(rng, client, http)
                time.sleep(0.001)

    @contextmanager
    def _noting_the_end(self, name: str) -> Iterator[None]:
        try:
            yield
        except _GONE:
            self._count(f"{name.strip('_')} cut off")
            raise

    def _publish(self, rng: random.Random, _: Client, http: httpx.Client) -> None:
        text = rng.choice([*self._ours.values()])
        with self._ledger.turn(text.cid) as mine:
            if mine:
                text.publish(http, self._home)
                self._ledger.committed.add(text.cid)
                self._count("publications")

    def _fetch(self, rng: random.Random, client: Client, _: httpx.Client) -> None:
        cid = rng.choice([*self._theirs, *self._ours])
        with self._ledger.turn(cid) as mine:
            if mine:
                reader = BlockReader(self._home)
                some = rng.choice((None, None, 1))
                report = client.fetch(cid, segments=some, patience_s=_PATIENCE_S, on_event=reader.hear)
                self.damaged += reader.damaged
                self._count("fetches")
                if report.get("complete"):
                    self._ledger.committed.add(cid)
                    self._ledger.leased.add(cid)

    def _keep(self, rng: random.Random, client: Client, _: httpx.Client) -> None:
        """Pin, unpin, remove and collect, as an operator does."""
        here = [*self._ledger.committed]
        action = rng.choice(("pin", "pin", "unpin", "remove", "collect", "collect"))
        if action == "collect":
            client.collect()
            self._count("collections")
        elif here:
            cid = rng.choice(here)
            with self._ledger.turn(cid) as mine:
                if mine:
                    self._change(action, cid, client)

    def _change(self, action: str, cid: Cid, client: Client) -> None:
        ledger = self._ledger
        if action == "pin":
            client.pin(_PINS, cid)
            ledger.pinned.add(cid)
        elif action == "unpin":
            ledger.pinned.discard(cid)
            client.unpin(_PINS, cid)
        elif cid not in ledger.pinned:
            ledger.committed.discard(cid)
            ledger.leased.discard(cid)
            client.remove(cid)
