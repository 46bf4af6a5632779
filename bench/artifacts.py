"""Artifacts of random bytes with the geometry of real models, published as by any publisher."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from nacl.signing import SigningKey

from p2pkv.artifact.build import ArtifactBuilder, Buffer, ModelDescription, Terms
from p2pkv.client import calls
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_bytes
from p2pkv.limits import SEGMENT_TOKENS
from p2pkv.store.staging import open_staging

# All who build the same artifact get the same bytes only where everything that it is made of is fixed.
_KEY: Final = SigningKey(bytes(range(32)))
PUBLISHER: Final = encode_did(bytes(_KEY.verify_key))
MODEL_ID: Final = b"\1" * 32
_CREATED: Final = 1_767_225_600
_SEED: Final = 3


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
    """An artifact: everything that belongs to it, its encoded envelope, and the bytes of its blocks."""

    manifest: Cid
    envelope: bytes
    cids: Sequence[Cid]
    data_bytes: int


def random_segments(shape: Shape, count: int, seed: int = _SEED) -> list[list[bytes]]:
    """Return the bytes of each layer of each segment, which nothing can compress; the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randbytes(shape.block_bytes) for _ in range(shape.layers)] for _ in range(count)]


def build(
    shape: Shape,
    segments: Sequence[Sequence[bytes]],
    write: Callable[[Cid, Buffer], None],
    *,
    first_token: int = 0,
    key: SigningKey = _KEY,
) -> Published:
    """Build and sign an artifact of whole segments through ``write``; equal arguments give equal bytes.

    Its tokens count up from ``first_token``: artifacts with different ones share no prefix.
    """
    model = ModelDescription(MODEL_ID, shape.name, (shape.geometry,) * shape.layers, Dtype.BF16)
    builder = ArtifactBuilder(model, range(first_token, first_token + len(segments) * SEGMENT_TOKENS), write)
    for layers in segments:
        builder.add_segment(layers)
    terms = Terms(encode_did(bytes(key.verify_key)), sequence=1, created=_CREATED)
    signed = Envelope.sign(builder.finish(terms, {"bench": "random"}), key)
    envelope = signed.encode()
    manifest = Cid.of_node(envelope)
    write(manifest, envelope)
    return Published(manifest, envelope, (*builder.cids, manifest), len(segments) * shape.layers * shape.block_bytes)


@contextmanager
def control(home: Path) -> Iterator[httpx.Client]:
    """Connect to the node that keeps ``home``, as its clients do."""
    transport = httpx.HTTPTransport(uds=str(calls.socket_of(home)))
    with httpx.Client(transport=transport, base_url=calls.BASE_URL, timeout=calls.CALL_TIMEOUT) as http:
        yield http


def publish(
    http: httpx.Client,
    home: Path,
    shape: Shape,
    segments: Sequence[Sequence[bytes]],
    *,
    first_token: int = 0,
    key: SigningKey = _KEY,
) -> Published:
    """Build an artifact in a staging folder of ``home`` and let the node there take it over and announce it."""
    with open_staging(home) as staging:
        published = build(shape, segments, staging.write, first_token=first_token, key=key)
        call = calls.publish(staging.name, published.manifest)
        with http.stream(call.method, call.path, json=call.body, timeout=calls.EVENTS_TIMEOUT) as answer:
            if answer.is_error:
                answer.read()
                calls.read_answer(answer)
            events = [event for line in answer.iter_lines() if (event := calls.read_event(line)) is not None]
        if not events or events[-1]["event"] != "report":
            raise calls.no_report()
    return published
