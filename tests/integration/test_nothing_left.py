"""Fetches that are started and stopped among real peers that leave and die: no task, thread, socket or file stays behind."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from bench.processes import NodeProcess, node_processes, wait_announced
from p2pkv.errors import FetchIncompleteError, NotFoundError
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.store.store import Store, open_store
from p2pkv.swarm.report import FetchReport
from p2pkv.swarm.target import ManifestTarget
from p2pkv.units import MIB
from p2pkv_node.bulk import TlsBulkLane
from p2pkv_node.bulk_lane import THREAD_NAME, BulkStatistics
from p2pkv_node.network import open_network
from tests.support.artifacts import Sample, make_sample, model as describe
from tests.support.town import LOOPBACK, Daemon, Town, in_thread, until

# At this rate an artifact takes some 200 ms, so that most of what happens strikes in the middle.
UPLOAD_LIMIT = 12 * MIB
EVENTFUL_S = 0.3
PATIENCE_S = 5.0


def make_samples(count: int) -> list[Sample]:
    """Artifacts of 18 blocks of 128 KiB and less, each of a text of its own."""
    layer = LayerGeometry(LayerKind.FULL, kv_heads=2, k_dim=64, v_dim=64)
    description = type(describe())(b"\x02" * 32, "small", (layer,) * 6, Dtype.BF16)
    created = int(time.time())
    return [make_sample(range(i, i + 600), seed=i, description=description, created=created) for i in range(count)]


class Possessions:
    """What this process has: descriptors by what they are, threads of lanes, and trio's tasks."""

    def __init__(self) -> None:
        self.descriptors: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue  # the one that lists them
            kind = target.partition(":")[0] if ":" in target else target
            self.descriptors[kind] += 1
        self.lane_threads = sum(thread.name == THREAD_NAME for thread in threading.enumerate())
        self.tasks = trio.lowlevel.current_statistics().tasks_living

    def more_than(self, before: Possessions) -> dict[str, int]:
        """Return what has been added since ``before``."""
        added = dict(self.descriptors - before.descriptors)
        if self.lane_threads > before.lane_threads:
            added["threads of lanes"] = self.lane_threads - before.lane_threads
        if self.tasks > before.tasks:
            added["tasks"] = self.tasks - before.tasks
        return added


async def assert_nothing_added(before: Possessions) -> None:
    """Closing goes on after a fetch has ended: streams linger for CLOSE_LINGER_S."""
    with suppress(trio.TooSlowError):
        await until(lambda: not Possessions().more_than(before))
    assert Possessions().more_than(before) == {}


async def fetch(consumer: Daemon, sample: Sample, stop_after_s: float) -> FetchReport | None:
    """Fetch, and check that what is said to be here is here; ``None`` where it was stopped or came to nothing."""
    report: FetchReport | None = None
    with (
        trio.fail_after(PATIENCE_S + 3.0),
        trio.move_on_after(stop_after_s),
        suppress(NotFoundError, FetchIncompleteError),  # whoever had it is gone
    ):
        report = await consumer.node.fetch(ManifestTarget(sample.cid), lambda event: None, PATIENCE_S)
    if report is not None:
        assert all(consumer.node.store.read(cid) == data for cid, data in sample.blocks.items())
    return report


def lanes(daemon: Daemon) -> BulkStatistics:
    assert isinstance(daemon.node.context.bulk, TlsBulkLane)
    return daemon.node.context.bulk.statistics()


@pytest.mark.slow
async def test_fetches_among_peers_that_leave(town: Town) -> None:
    rng = random.Random(3)
    samples = make_samples(50)
    consumer = await town.start("consumer", mirror=False)
    whole = stopped = 0

    async def provider(name: str, round_samples: Sequence[Sample], ready: trio.Event, leave_after_s: float) -> None:
        daemon = await town.start(name, upload_limit=UPLOAD_LIMIT)
        for sample in round_samples:
            await in_thread(partial(keep, daemon.node.store, sample))
            daemon.node.announcer.add([sample.cid.multihash])
        await daemon.announced()
        ready.set()
        await trio.sleep(leave_after_s)
        await daemon.stop()

    async def one_round(number: int, round_samples: Sequence[Sample]) -> None:
        nonlocal whole, stopped
        readies = [trio.Event(), trio.Event()]
        async with trio.open_nursery() as nursery:
            for place, ready in enumerate(readies):
                leave_after_s = rng.uniform(0.0, EVENTFUL_S * len(round_samples))
                nursery.start_soon(provider, f"provider{number}-{place}", round_samples, ready, leave_after_s)
            for ready in readies:
                await ready.wait()
            for sample in round_samples:
                stop_after_s = rng.uniform(0.0, EVENTFUL_S) if rng.random() < 1 / 3 else 60.0
                report = await fetch(consumer, sample, stop_after_s)
                whole += report is not None
                stopped += stop_after_s < EVENTFUL_S

    await one_round(0, samples[:2])  # what is opened once and kept is open now
    await trio.sleep(1.0)
    before = Possessions()
    for number in range(1, 9):
        await one_round(number, samples[6 * number - 4 :][:6])
    assert whole >= 8
    assert stopped >= 8
    assert lanes(consumer).blocks_received > 50
    await assert_nothing_added(before)
    assert lanes(consumer).receiving_lanes == 0
    assert consumer.node.context.asked == {}
    assert consumer.node.server.statistics().channels == 0


@pytest.mark.slow
async def test_fetches_among_processes_that_are_killed(town: Town, tmp_path: Path) -> None:
    """Each fetch is one of a new node, which ends with it."""
    rng = random.Random(4)
    (sample,) = make_samples(1)
    homes = [tmp_path / f"provider{number}" for number in range(3)]
    for home in homes:
        with open_store(home) as store:
            keep(store, sample)
    reports: list[FetchReport | None] = []
    processes = node_processes(homes, bootstrap=town.bootstrap, options=("--upload-limit", str(UPLOAD_LIMIT // 3)))
    providers = await in_thread(processes.__enter__)
    try:
        for provider in providers:
            await in_thread(partial(wait_announced, provider))

        async def start_and_stop(number: int, victim: NodeProcess | None, stop_after_s: float) -> None:
            consumer = await town.start(f"consumer{number}", mirror=False)
            async with trio.open_nursery() as nursery:
                if victim is not None:
                    nursery.start_soon(kill, victim, rng.uniform(0.0, EVENTFUL_S))
                reports.append(await fetch(consumer, sample, stop_after_s))
            await until(lambda: lanes(consumer).receiving_lanes == 0)
            assert consumer.node.context.asked == {}
            await consumer.stop()

        await start_and_stop(0, None, PATIENCE_S)  # what is opened once and kept is open now
        await trio.sleep(1.0)
        before = Possessions()
        for number in range(1, 13):
            victim = providers.pop() if number % 4 == 0 else None
            await start_and_stop(number, victim, rng.choice([EVENTFUL_S / 2, PATIENCE_S, PATIENCE_S]))
        assert sum(report is not None for report in reports) >= 4
        await assert_nothing_added(before)
    finally:
        await in_thread(lambda: processes.__exit__(None, None, None))


async def kill(victim: NodeProcess, after_s: float) -> None:
    await trio.sleep(after_s)
    victim.kill()


async def test_an_inbound_connection_that_ends_leaves_no_task() -> None:
    """The library ends the task of a connection that it accepted with the node, unless it is made to end it sooner."""
    async with open_network(bytes(32), LOOPBACK) as network:
        host, port = "127.0.0.1", int(network.addresses[0].split("/")[4])
        before = Possessions()
        for number in range(1, 4):
            async with open_network(bytes([number]) * 32, LOOPBACK) as other:
                await other.connect(network.addresses[0])
            for last_words in (b"", b"GET / HTTP/1.1\r\n\r\n"):
                stranger = await trio.open_tcp_stream(host, port)
                if last_words:
                    await stranger.send_all(last_words)
                await stranger.aclose()
        await assert_nothing_added(before)


def keep(store: Store, sample: Sample) -> None:
    """Store an artifact as if it had been published here."""
    for cid, data in sample.blocks.items():
        store.write(cid, data)
    store.index.add_artifact(sample.artifact, range(len(sample.artifact.manifest.segments)))
