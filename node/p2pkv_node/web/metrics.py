"""A snapshot in the formats of Prometheus: each figure with its name, unit and help text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from p2pkv import __version__
from p2pkv_node.web.snapshot import Snapshot


def exposition(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics in the format that the ``Accept`` header asks for, and its content type. Reads ``/proc``."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(snapshot))
    ProcessCollector(registry=registry)  # memory, processor time and open files of the daemon
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _NodeCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot
        yield InfoMetricFamily("p2pkv_build", "Version of p2pkv.", {"version": __version__})
        yield _gauge("start_time_seconds", "When the node started, in seconds since the epoch.", now.started)
        yield _gauge("ready", "1 where the node can do its work, as /readyz says; else 0.", now.unready is None)
        yield from self._stored()
        yield from self._fetched()
        yield from self._served()
        yield from self._network()

    def _stored(self) -> Iterator[Metric]:
        store, known = self._snapshot.store, self._snapshot.store.artifacts
        yield _gauge("store_blocks", "Blocks in the store.", store.blocks)
        yield _gauge("store_bytes", "Bytes of the blocks in the store.", store.bytes)
        artifacts = _gauge("store_artifacts", "Artifacts in the index: held whole, or in part.", label="held")
        artifacts.add_metric(["whole"], store.complete_artifacts)
        artifacts.add_metric(["part"], known - store.complete_artifacts)
        yield artifacts
        yield _counter("store_damaged_blocks", "Stored blocks that no longer had their hash when read.", store.damaged_blocks)
        yield _gauge("disk_free_bytes", "Free bytes on the disk of the home.", self._snapshot.disk_free_bytes)

    def _fetched(self) -> Iterator[Metric]:
        now = self._snapshot
        received = _counter("received_bytes", "Bytes of verified blocks that peers sent, by the way they came.", label="path")
        received.add_metric(["lane"], now.lane_bytes)
        received.add_metric(["stream"], now.stream_bytes)
        yield received
        yield _counter("refused_blocks", "Blocks of peers that did not have the hash they were asked by.", now.blocks_refused)
        yield _gauge("fetches_running", "Fetches under way.", now.fetches)
        fetches = _counter("fetches", "Fetches that ended, by how they did.", label="outcome")
        for outcome, count in now.outcomes.items():
            fetches.add_metric([outcome.value], count)
        yield fetches
        yield _counter("prompt_tokens", "Tokens of the prompts that a KV cache was fetched for.", now.prompt_tokens)
        yield _counter("hit_tokens", "Tokens of these prompts whose KV cache was found.", now.hit_tokens)

    def _served(self) -> Iterator[Metric]:
        served = self._snapshot.served
        yield _counter("sent_bytes", "Bytes of blocks sent to peers.", served.bytes)
        yield _counter("sent_blocks", "Blocks sent to peers.", served.blocks)
        yield _gauge("served_channels", "Channels of peers open for serving.", served.channels)
        yield _counter("refused_channels", "Channels refused, or ended since the peer broke the rules.", served.refused)
        outstanding = sum(served.outstanding_by_peer.values())
        yield _gauge("outstanding_bytes", "Bytes granted to peers and not sent yet.", outstanding)

    def _network(self) -> Iterator[Metric]:
        now, announcing = self._snapshot, self._snapshot.announcing
        yield _gauge("connected_peers", "Peers connected now.", len(now.connected_peers))
        yield _gauge("dht_peers", "Peers in the routing table of the DHT.", len(now.dht_peers))
        yield _gauge("banned_peers", "Peers banned now for a wrong block.", len(now.banned_peers))
        yield _gauge("announcement_keys", "Keys to be kept announced.", announcing.keys)
        yield _gauge("announced_keys", "Keys that were announced once at least.", announcing.announced)
        yield _gauge("announcement_late_seconds", "How late the most overdue announcement is.", announcing.late_s)


def _gauge(name: str, text: str, value: float | None = None, *, label: str | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"p2pkv_{name}", text, value=value, labels=[label] if label else None)


def _counter(name: str, text: str, value: float | None = None, *, label: str | None = None) -> CounterMetricFamily:
    """Return a counter; its samples end in ``_total``."""
    return CounterMetricFamily(f"p2pkv_{name}", text, value=value, labels=[label] if label else None)
