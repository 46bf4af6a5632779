"""A snapshot in the formats of Prometheus: each figure with its name, unit and help text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from p2pkv import __version__
from p2pkv_node.snapshot import Snapshot

K = TypeVar("K", bound=str)


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
        yield from self._collected()
        yield from self._fetched()
        yield from self._prefilled()
        yield from self._served()
        yield from self._network()

    def _stored(self) -> Iterator[Metric]:
        room = self._snapshot.room
        store, whole = room.store, room.store.complete_artifacts
        yield _gauge("store_blocks", "Blocks in the store.", store.blocks)
        yield _gauge("store_bytes", "Bytes of the blocks in the store.", store.bytes)
        yield _gauge("store_quota_bytes", "Bytes of blocks that the operator allows; 0: as the disk has room.", room.quota)
        yield _gauge("store_high_mark_bytes", "Above so many bytes of blocks the node collects.", room.marks.high)
        yield _gauge("store_low_mark_bytes", "So many bytes of blocks are left when it has.", room.marks.low)
        held = {"whole": whole, "part": store.artifacts - whole}
        yield _gauge("store_artifacts", "Artifacts in the index: held whole, or in part.", held, label="held")
        yield _gauge("store_pins", "Pins, each of which keeps an artifact.", room.pins)
        yield _gauge("store_leases", "Leases of downloads and readers; each keeps an artifact for a while.", room.leases)
        yield _counter("store_damaged_blocks", "Stored blocks that no longer had their hash when read.", store.damaged_blocks)
        yield _gauge("disk_free_bytes", "Free bytes on the disk of the home.", room.disk_free_bytes)

    def _collected(self) -> Iterator[Metric]:
        collections = self._snapshot.collections
        yield _counter("collections", "Collections of garbage, by why.", collections.count, label="why")
        yield _counter("collected_artifacts", "Artifacts that were evicted by them.", collections.evicted)
        yield _counter("collected_bytes", "Bytes that the disk got back by them.", collections.freed_bytes)
        last = collections.last
        at = {} if last is None else {last.why: last.at}
        yield _gauge("last_collection_time_seconds", "When the last was over, in seconds since the epoch.", at, label="why")
        text = "1 where what it left is too much, and all of it is pinned or leased; else 0."
        yield _gauge("over_quota", text, collections.over_quota)

    def _fetched(self) -> Iterator[Metric]:
        now = self._snapshot
        received = {"lane": now.lane_bytes, "stream": now.stream_bytes}
        text = "Bytes of verified blocks that peers sent, by the way they came."
        yield _counter("received_bytes", text, received, label="path")
        yield _counter("refused_blocks", "Blocks of peers that did not have the hash they were asked by.", now.blocks_refused)
        yield _gauge("fetches_running", "Fetches under way, by what they wait for.", now.fetches, label="state")
        yield _counter("fetches", "Fetches that ended, by how they did.", now.outcomes, label="outcome")
        yield _gauge("downloads_queued", "Downloads of the last run that wait for their turn.", now.queued)
        yield _gauge("downloads_unfinished", "Downloads that go on at the next start if the node ends.", now.room.unfinished)
        yield _counter("prompt_tokens", "Tokens of the prompts that a KV cache was fetched for.", now.prompt_tokens)
        yield _counter("hit_tokens", "Tokens of these prompts whose KV cache was found.", now.hit_tokens)

    def _prefilled(self) -> Iterator[Metric]:
        prefills = self._snapshot.prefills
        counts = {"known": prefills.rated, "unknown": prefills.unrated}
        text = "Prefills that programs told of, by whether it is known how fast they compute."
        yield _counter("prefills", text, counts, label="rate")
        text = "What computing the loaded tokens would have taken, of the prefills with a known rate."
        yield _counter("prefill_computing_seconds", text, prefills.computing_s)
        yield _counter("prefill_loading_seconds", "What loading them took, or looking in vain.", prefills.loading_s)
        # No counter: it falls where p2pkv was slower than computing.
        yield _gauge("prefill_saved_seconds", "The first less the second; below zero for a loss.", prefills.saved_s)

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
        yield _gauge("tasks", "Tasks of the event loop: they come and go with connections and fetches.", now.tasks)
        yield _gauge("announcement_keys", "Keys to be kept announced.", announcing.keys)
        yield _gauge("announced_keys", "Keys that were announced once at least.", announcing.announced)
        yield _gauge("announcement_late_seconds", "How late the most overdue announcement is.", announcing.late_s)


def _gauge(name: str, text: str, value: float | Mapping[K, float], *, label: str = "") -> Metric:
    """Return a gauge; with a ``label`` it has a sample for each of its values."""
    return _filled(GaugeMetricFamily(f"p2pkv_{name}", text, labels=[label] if label else None), value)


def _counter(name: str, text: str, value: float | Mapping[K, float], *, label: str = "") -> Metric:
    """Return a counter; its samples end in ``_total``."""
    return _filled(CounterMetricFamily(f"p2pkv_{name}", text, labels=[label] if label else None), value)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[K, float]) -> Metric:
    if isinstance(value, Mapping):
        for key, sample in value.items():
            family.add_metric([key], sample)
    else:
        family.add_metric([], value)
    return family
