"""The mixed load of a soak: publishers, programs, operators and peers, each a thread that repeats what it does until the end.

All of it goes on much faster than in real use. Two nodes run throughout: the *publisher's*, and the *consumer's*, which
fetches from it and from peers that come and go. Leases end within seconds, so that what is stored turns over all the time.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx

from bench.artifacts import control
from bench.processes import NodeProcess
from p2pkv.client import calls
from p2pkv.client.sync import Client
from p2pkv.errors import FetchIncompleteError, NotFoundError, UsageError
from p2pkv.limits import READ_LEASE_S
from tests.support.forked_nodes import start_node
from tests.support.homes import expire_leases, trust_publisher
from tests.support.texts import BlockReader, Text, make_text

_LATELY: Final = 10  # texts that are fetched: those published last
_FILLING: Final = 24  # texts of 1.5 MiB on average
_PATIENCE_S: Final = 5.0
_ANNOUNCED_S: Final = 30.0
_MISS_PATIENCE_S: Final = 1.0
_PEER_LIVES_S: Final = 3.0
_READING_S: Final = 5.0
_PAGES: Final = ("/", "/page.js", "/page.css", "/status.json", "/metrics", "/readyz", "/healthz")
_PINS: Final = "soak"

# What a program may hear whose artifact was removed or collected meanwhile, or whose provider was killed.
_REFUSED: Final = (NotFoundError, FetchIncompleteError, UsageError)

Work = Callable[[random.Random], None]


class MixedLoad:
    """Load on two nodes. ``done`` counts what was done, and ``refused`` what came to nothing for a reason that is no fault."""

    def __init__(self, publisher: NodeProcess, consumer: NodeProcess, folder: Path, seed: int) -> None:
        self._publisher = publisher
        self._consumer = consumer
        self._folder = folder
        self._seed = seed
        self._texts: deque[Text] = deque(maxlen=_LATELY)
        self._numbers = iter(range(1, 1 << 30))
        self._stopping = threading.Event()
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(32)
        self._running: list[Future[None]] = []
        self.done: Counter[str] = Counter()
        self.damaged = 0

    def start(self) -> None:
        """Begin when both nodes have about as much as they may keep."""
        rng = random.Random(self._seed)
        for _ in range(_FILLING):
            self._publish(rng)
            self._fetch_new(self._texts[-1], rng)
        works: Sequence[tuple[Work, float]] = (
            (self._publish, 0.4),
            (self._fetch, 0.05),
            (self._fetch, 0.1),
            (self._fetch_prompt, 0.1),
            (self._fetch_nothing, 0.5),
            (self._cancel, 0.1),
            (self._keep, 0.3),
            (self._let_leases_end, 2.0),
            (self._look, 0.3),
            (self._come_and_go, 0.5),
        )
        for number, (work, pause_s) in enumerate(works):
            rng = random.Random(self._seed + number)
            self._running.append(self._threads.submit(self._repeat, work, rng, pause_s))

    def check(self) -> None:
        """Raise what a thread ended with, which none does by itself."""
        for thread in self._running:
            if thread.done():
                thread.result()

    def stop(self) -> None:
        """End all of it, and raise what a thread ended with."""
        self._stopping.set()
        self._threads.shutdown()
        self.check()

    def _repeat(self, work: Work, rng: random.Random, pause_s: float) -> None:
        name = work.__name__.strip("_")
        while not self._stopping.wait(rng.uniform(0, 2 * pause_s)):
            try:
                work(rng)
                self._count(name)
            except _REFUSED:
                self._count(f"{name}, refused")

    def _count(self, name: str) -> None:
        with self._counting:
            self.done[name] += 1

    def _some_text(self, rng: random.Random) -> Text:
        return rng.choice([*self._texts])

    # --- programs ------------------------------------------------------------------------------------------------------

    def _publish(self, rng: random.Random) -> None:
        text = make_text(next(self._numbers), rng.randint(1, 5))
        with control(self._publisher.home) as http:
            text.publish(http, self._publisher.home)
        self._texts.append(text)

    def _fetch(self, rng: random.Random) -> None:
        """An artifact, or a slice of it, and all blocks read where they lie."""
        self._fetch_by(self._consumer.home, self._some_text(rng), rng)

    def _fetch_new(self, text: Text, rng: random.Random) -> None:
        """What was published just now, as soon as its announcement has come through."""
        deadline = time.monotonic() + _ANNOUNCED_S
        while True:
            try:
                return self._fetch_by(self._consumer.home, text, rng)
            except NotFoundError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _fetch_by(self, home: Path, text: Text, rng: random.Random) -> None:
        reader = BlockReader(home)
        segments, layers = rng.choice(((None, None), (None, None), (1, None), (None, range(1, 3))))
        with Client(home) as client:
            client.fetch(text.cid, segments=segments, layers=layers, patience_s=_PATIENCE_S, on_event=reader.hear)
        self.damaged += len(reader.damaged)

    def _fetch_prompt(self, rng: random.Random) -> None:
        """A text that was published, and some tokens behind it."""
        text = self._some_text(rng)
        tokens = [*text.token_ids[: rng.randint(200, len(text.token_ids))], *range(rng.randint(1, 50))]
        self._ask(tokens, _PATIENCE_S)

    def _fetch_nothing(self, rng: random.Random) -> None:
        self._ask([rng.randrange(1 << 31) for _ in range(600)], _MISS_PATIENCE_S)

    def _ask(self, tokens: Sequence[int], patience_s: float) -> None:
        body = {"model_id": "01" * 32, "dtype": "bf16", "token_ids": tokens, "patience_s": patience_s}
        with control(self._consumer.home) as http:
            answer = http.post("/v1/fetch", json=body, timeout=calls.EVENTS_TIMEOUT)
        last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        assert last["event"] == "report", last

    def _cancel(self, rng: random.Random) -> None:
        """Begin to fetch, and leave."""
        body: dict[str, Any] = {"manifest": str(self._some_text(rng).cid), "patience_s": _PATIENCE_S}
        leaves = time.monotonic() + rng.uniform(0, 0.1)
        with control(self._consumer.home) as http, http.stream("POST", "/v1/fetch", json=body) as answer:
            for _ in answer.iter_lines():
                if time.monotonic() > leaves:
                    break

    # --- operators -----------------------------------------------------------------------------------------------------

    def _keep(self, rng: random.Random) -> None:
        home = rng.choice((self._publisher.home, self._consumer.home))
        cid = self._some_text(rng).cid
        with Client(home) as client:
            match rng.randrange(4):
                case 0:
                    client.pin(_PINS, cid)
                case 1:
                    client.unpin(_PINS)
                case 2 if home == self._consumer.home:
                    client.remove(cid)
                case _:
                    client.collect()

    def _let_leases_end(self, _: random.Random) -> None:
        """Readers have seconds instead of minutes; what is being fetched stays leased."""
        for node in (self._publisher, self._consumer):
            expire_leases(node.home, READ_LEASE_S - _READING_S)

    def _look(self, rng: random.Random) -> None:
        """At the status page, the metrics and the API."""
        node = rng.choice((self._publisher, self._consumer))
        for path in _PAGES:
            answer = httpx.get(f"{node.web}{path}", timeout=30)
            assert answer.status_code == httpx.codes.OK, (path, answer.status_code)
        with Client(node.home) as client:
            client.status()
            client.artifacts()
            client.pins()

    # --- peers ---------------------------------------------------------------------------------------------------------

    def _come_and_go(self, rng: random.Random) -> None:
        """A peer joins, fetches, serves what it has, and leaves or dies; it comes again, or another does."""
        home = self._folder / f"peer-{rng.randrange(2)}"
        trust_publisher(home)
        peer = start_node(home, bootstrap=[self._publisher.address, self._consumer.address])
        try:
            peer.wait_ready()
            for _ in range(2):
                with suppress(*_REFUSED):
                    self._fetch_by(home, self._some_text(rng), rng)
            self._stopping.wait(rng.uniform(0, _PEER_LIVES_S))
        finally:
            if rng.random() < 0.5:
                peer.kill()
            else:
                peer.stop()
            if rng.random() < 0.5:
                shutil.rmtree(home)
