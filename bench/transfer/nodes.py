"""The cases of p2pkv itself: real nodes, a random artifact with a real model's geometry, fetched by manifest CID."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from nacl.signing import SigningKey

from bench.processes import NodeProcess, node_process, wait_announced
from bench.transfer.measure import Measurement, Meter, settle
from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.client import calls
from p2pkv.client.sync import Client
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_bytes
from p2pkv.limits import SEGMENT_TOKENS
from p2pkv.store.blocks import StoredBlocks
from p2pkv.store.home import HomeLayout
from p2pkv.store.staging import Staging, open_staging

# All seeders hold the same artifact only where everything that it is made of is fixed.
_KEY: Final = SigningKey(bytes(range(32)))
_PUBLISHER: Final = encode_did(bytes(_KEY.verify_key))
_CREATED: Final = 1_767_225_600
_SEED: Final = 3
# A node prepares its store when it had nothing to do for two seconds; measured is a daemon that has been running.
_IDLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The geometry of a model's KV: one block a layer and segment."""

    name: str
    layers: int
    geometry: LayerGeometry

    @property
    def block_bytes(self) -> int:
        return layer_bytes(self.geometry, SEGMENT_TOKENS, Dtype.BF16)

    def segments(self, data_bytes: int) -> int:
        """Return how many segments come nearest to ``data_bytes``, at least one."""
        return max(1, round(data_bytes / (self.layers * self.block_bytes)))


LLAMA: Final = Shape("Llama-3.1-8B", 32, LayerGeometry(LayerKind.FULL, kv_heads=8, k_dim=128, v_dim=128))
SMOLLM2: Final = Shape("SmolLM2-135M", 30, LayerGeometry(LayerKind.FULL, kv_heads=3, k_dim=64, v_dim=64))


@dataclass(frozen=True, slots=True)
class Published:
    """The artifact that the seeders hold: everything that belongs to it, and the bytes of its blocks."""

    manifest: Cid
    cids: Sequence[Cid]
    data_bytes: int


def build(shape: Shape, data_bytes: int, staging: Staging) -> Published:
    """Build and sign the artifact in ``staging``; equal arguments give equal bytes."""
    segments = shape.segments(data_bytes)
    rng = random.Random(_SEED)
    model = ModelDescription(b"\1" * 32, shape.name, (shape.geometry,) * shape.layers, Dtype.BF16)
    builder = ArtifactBuilder(model, range(segments * SEGMENT_TOKENS), staging.write)
    for _ in range(segments):
        builder.add_segment([rng.randbytes(shape.block_bytes) for _ in range(shape.layers)])
    manifest = builder.finish(Terms(_PUBLISHER, sequence=1, created=_CREATED), {"bench": "random"})
    envelope = Envelope.sign(manifest, _KEY)
    staging.write(envelope.cid, envelope.encode())
    return Published(envelope.cid, staging.cids, segments * shape.layers * shape.block_bytes)


def publish(node: NodeProcess, shape: Shape, data_bytes: int) -> Published:
    """Let ``node`` serve the artifact, taken over as from any publisher."""
    with open_staging(node.home) as staging:
        published = build(shape, data_bytes, staging)
        call = calls.publish(staging.name, published.manifest, published.cids)
        transport = httpx.HTTPTransport(uds=str(calls.socket_of(node.home)))
        with httpx.Client(transport=transport, base_url=calls.BASE_URL, timeout=calls.CALL_TIMEOUT) as http:
            calls.read_answer(http.request(call.method, call.path, json=call.body))
    return published


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
        published, *_ = [publish(node, shape, data_bytes) for node in nodes]
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


def _fetch(
    home: Path, seeders: Sequence[NodeProcess], published: Published, options: Sequence[str], *, isolated: bool
) -> Measurement:
    senders = [node.process.pid for node in seeders]
    with node_process(home, bootstrap=[seeders[0].address], options=options) as node, Client(home) as client:
        client.trust_add(_PUBLISHER)
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
