"""What signing and checking cost, beside the fetch of an artifact with the size of the demo's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from blake3 import blake3
from nacl.signing import SigningKey

from bench.artifacts import PUBLISHER, SMOLLM2, build, control, publish, random_segments
from bench.processes import node_process
from p2pkv.artifact.build import Buffer
from p2pkv.artifact.read import open_artifact
from p2pkv.client.sync import Client
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.trust.policy import NO_RECORDS, judge
from p2pkv.trust.rules import Action, Rule

# The demo's document has 3,841 tokens: fifteen segments and one of a single token.
SEGMENTS: Final = 15
_TIMES: Final = 101
_PATIENCE_S: Final = 120.0


def measure_costs() -> dict[str, Any]:
    """Return the median seconds of signing the manifest, of checking it and the policy, and of hashing all blocks."""
    blocks: dict[Cid, bytes] = {}

    def write(cid: Cid, data: Buffer) -> None:
        blocks[cid] = bytes(data)

    published = build(SMOLLM2, random_segments(SMOLLM2, SEGMENTS), write)
    artifact = open_artifact(published.manifest, published.envelope)
    key, rules, now = SigningKey(bytes(range(32))), [Rule(Action.ACCEPT, PUBLISHER)], time.time()

    def verify() -> None:
        opened = open_artifact(published.manifest, published.envelope)
        judge(opened.manifest, opened.cid, rules, NO_RECORDS, now).require()

    def hash_all() -> None:
        for cid, data in blocks.items():
            assert cid.codec is not Codec.RAW or blake3(data).digest() == cid.digest
        for index, node in enumerate(artifact.manifest.segments):
            artifact.open_segment(index, blocks[node])

    return {
        "case": "costs",
        "data_bytes": published.data_bytes,
        "sign_s": _median(lambda: Envelope.sign(artifact.manifest, key).encode()),
        "verify_s": _median(verify),
        "hash_s": _median(hash_all),
    }


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def measure_fetch(folder: Path, repetitions: int) -> Iterator[dict[str, Any]]:
    """Fetch the same artifact from one other node on this machine, each time into a new home; yield a row of each."""
    segments = random_segments(SMOLLM2, SEGMENTS)
    with node_process(folder / "publisher") as publisher, control(publisher.home) as http:
        published = publish(
            http, publisher.home, SMOLLM2, segments
        )  # a lone node has nobody to announce to, and answers for itself
        for repetition in range(1, repetitions + 1):
            home = folder / f"consumer-{repetition}"
            with node_process(home, bootstrap=[publisher.address]), Client(home) as client:
                client.trust_add(PUBLISHER)
                started = time.perf_counter()
                report = client.fetch(published.manifest, patience_s=_PATIENCE_S)
                seconds = time.perf_counter() - started
            if not report["complete"]:
                raise RuntimeError("the artifact did not arrive whole")
            yield {"case": "fetch", "repetition": repetition, "fetch_s": seconds}
