"""What a quorum costs: a prompt of the demo's size that two publishers signed, fetched with a quorum of two and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from nacl.signing import SigningKey

from bench.artifacts import MODEL_ID, PUBLISHER, SMOLLM2, control, publish, random_segments
from bench.processes import NodeProcess, node_process, wait_announced
from bench.trust.costs import SEGMENTS
from p2pkv.client import calls
from p2pkv.client.sync import Client
from p2pkv.formats.did import encode_did
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import SEGMENT_TOKENS

_AGREEING: Final = SigningKey(bytes(range(1, 33)))
_DIFFERING: Final = SigningKey(bytes(range(2, 34)))
_PATIENCE_S: Final = 120.0
# The second publisher of each case, the seed of its values, and the first token of the text.
_CASES: Final = {"agreeing": (_AGREEING, 3, 0), "differing": (_DIFFERING, 4, 10_000)}


def measure_quorum(folder: Path, repetitions: int) -> Iterator[dict[str, Any]]:
    """Fetch the same prompts into new homes, without a quorum and with one; yield a row for each pair."""
    with ExitStack() as stack:
        first = stack.enter_context(node_process(folder / "first"))
        second = stack.enter_context(node_process(folder / "second", bootstrap=[first.address]))
        for key, seed, text in _CASES.values():
            with control(first.home) as http:
                publish(http, first.home, SMOLLM2, random_segments(SMOLLM2, SEGMENTS), first_token=text)
            with control(second.home) as http:
                publish(http, second.home, SMOLLM2, random_segments(SMOLLM2, SEGMENTS, seed), first_token=text, key=key)
        for node in (first, second):
            wait_announced(node)
        for repetition in range(1, repetitions + 1):
            for case, (key, _, text) in _CASES.items():
                row: dict[str, Any] = {"case": f"quorum_{case}", "repetition": repetition}
                for name, quorum in (("prompt", None), ("quorum", 2)):
                    home = folder / f"{case}-{repetition}-{name}"
                    row[f"{name}_s"], row[f"{name}_bytes"] = _fetch(home, first, key, text, quorum)
                yield row


def _fetch(home: Path, bootstrap: NodeProcess, other: SigningKey, text: int, quorum: int | None) -> tuple[float, int]:
    """Return seconds until the report, and bytes of blocks, nodes and manifests that came."""
    tokens = SEGMENTS * SEGMENT_TOKENS
    body = {
        "model_id": MODEL_ID.hex(),
        "dtype": Dtype.BF16.value,
        "token_ids": [*range(text, text + tokens), 1],
        "shared": tokens,
        "patience_s": _PATIENCE_S,
        "quorum": quorum,
    }
    with node_process(home, bootstrap=[bootstrap.address]), Client(home) as client, control(home) as http:
        for did in (PUBLISHER, encode_did(bytes(other.verify_key))):
            client.trust_add(did)
        started = time.perf_counter()
        with http.stream("POST", "/v1/fetch", json=body, timeout=calls.EVENTS_TIMEOUT) as answer:
            events = [event for line in answer.iter_lines() if (event := calls.read_event(line)) is not None]
        seconds = time.perf_counter() - started
        heard = sum(event["event"] == "witness" for event in events)
        if events[-1].get("hit_tokens") != tokens or heard != (quorum is not None):
            raise RuntimeError(f"{events[-1].get('hit_tokens')} tokens came, and {heard} witnesses")
        stats = client.stats()
    return seconds, stats["lane_bytes"] + stats["stream_bytes"]
