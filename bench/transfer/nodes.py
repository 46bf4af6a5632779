"""The cases of p2pkv itself: real nodes, a random artifact with a real model's geometry, fetched by manifest CID."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench.artifacts import LLAMA, PUBLISHER, Published, Shape, control, publish, random_segments
from bench.processes import NodeProcess, node_process, wait_announced
from bench.settle import settle
from bench.transfer.measure import Measurement, Meter
from p2pkv.client.sync import Client
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks

# A node prepares its store when it had nothing to do for two seconds; measured is a daemon that has been running.
_IDLE_S: Final = 3.0


@contextmanager
def open_nodes(
    folder: Path, seeders: int, data_bytes: int, *, shape: Shape = LLAMA, options: Sequence[str] = (), isolated: bool
) -> Iterator[Callable[[], Measurement]]:
    """Run the seeders and yield what measures one fetch by a fresh consumer, which is started with ``options``."""
    with ExitStack() as stack:
        nodes: list[NodeProcess] = []
        for index in range(seeders):
            bootstrap = [node.address for node in nodes[:1]]
            nodes.append(stack.enter_context(node_process(folder / f"seeder-{index}", bootstrap=bootstrap)))
        published = _publish_to_all(nodes, shape, data_bytes)
        if seeders > 1:  # a lone node has nobody to tell, and answers for itself
            for node in nodes:
                wait_announced(node)

        def measure() -> Measurement:
            home = folder / "consumer"
            try:
                return _fetch(home, nodes, published, options, isolated=isolated)
            finally:
                shutil.rmtree(home, ignore_errors=True)

        yield measure


def _publish_to_all(nodes: Sequence[NodeProcess], shape: Shape, data_bytes: int) -> Published:
    """Let all nodes serve the same artifact, taken over as from any publisher."""
    segments = random_segments(shape, shape.segments(data_bytes))
    published: list[Published] = []
    for node in nodes:
        with control(node.home) as http:
            published.append(publish(http, node.home, shape, segments))
    return published[0]


def _fetch(
    home: Path, seeders: Sequence[NodeProcess], published: Published, options: Sequence[str], *, isolated: bool
) -> Measurement:
    senders = [node.process.pid for node in seeders]
    with node_process(home, bootstrap=[seeders[0].address], options=options) as node, Client(home) as client:
        client.trust_add(PUBLISHER)
        settle([node.process.pid, *senders], published.data_bytes, _IDLE_S)
        meter = Meter(node.process.pid, senders, isolated=isolated, calls_here=True)
        first: list[float] = []

        def hear(event: dict[str, Any]) -> None:
            if not first and event["event"] == "progress" and event["done_bytes"]:
                first.append(time.perf_counter())  # a block is in the store, verified, and the caller knows it

        start = time.perf_counter()
        report = client.fetch(published.manifest, on_event=hear)
        seconds = time.perf_counter() - start
        usage = meter.stop()
        verify(home, published, report)
    return Measurement(
        data_bytes=published.data_bytes,
        seconds=seconds,
        first_byte_s=first[0] - start,
        receiver_cpu_s=usage.receiver_cpu_s,
        senders_cpu_s=usage.senders_cpu_s,
        rss_growth_bytes=usage.peak_growth_bytes,  # the data lie in the page cache, which is not the node's memory
        wire_bytes=usage.wire_bytes,
        details={name: report[name] for name in ("times", "bytes_by_peer", "duplicate_bytes", "peers_lost")},
    )


def verify(home: Path, published: Published, report: dict[str, Any]) -> None:
    """Read every block and node back, each against its hash. Raises NotFoundError, IntegrityError, RuntimeError."""
    stored = StoredBlocks(HomeLayout(home).blocks)
    for cid in published.cids:
        stored.read(cid)
    if report["local_bytes"] or sum(report["bytes_by_peer"].values()) < published.data_bytes:
        raise RuntimeError("not all of the data came from peers")
