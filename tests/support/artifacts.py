"""Small whole artifacts for driver tests: random KV of a two-layer model, signed with a fixed key."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nacl.signing import SigningKey

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.read import Artifact, open_artifact
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_bytes
from p2pkv.keys import segment_bounds

KEY = SigningKey(bytes(range(32)))
PUBLISHER = encode_did(bytes(KEY.verify_key))
NOW = 1_800_000_000


@dataclass(frozen=True)
class Sample:
    """An artifact, and every block and node of it, the envelope too, by CID."""

    artifact: Artifact
    blocks: dict[Cid, bytes]

    @property
    def cid(self) -> Cid:
        return self.artifact.cid


def model(name: str = "tiny", *, layers: int = 2, model_id: bytes = b"\x01" * 32) -> ModelDescription:
    geometry = LayerGeometry(LayerKind.FULL, kv_heads=1, k_dim=8, v_dim=8)
    return ModelDescription(model_id, name, (geometry,) * layers, Dtype.BF16)


def make_sample(
    token_ids: Sequence[int],
    *,
    seed: int = 0,
    description: ModelDescription | None = None,
    key: SigningKey = KEY,
    expires: int | None = None,
    created: int = NOW,
    sequence: int = 1,
) -> Sample:
    """Build and sign an artifact over ``token_ids``; equal arguments give equal bytes."""
    description = description or model()
    rng = random.Random(seed)
    blocks: dict[Cid, bytes] = {}
    builder = ArtifactBuilder(description, token_ids, lambda cid, data: blocks.__setitem__(cid, bytes(data)))
    bounds = segment_bounds(len(token_ids))
    for start, end in pairwise(bounds):
        builder.add_segment([rng.randbytes(layer_bytes(g, end - start, description.dtype)) for g in description.layers])
    terms = Terms(encode_did(bytes(key.verify_key)), sequence, created, expires=expires, licence="CC0-1.0")
    envelope = Envelope.sign(builder.finish(terms, {"torch": "none"}), key)
    data = envelope.encode()
    blocks[envelope.cid] = data
    tokens = envelope.open().tokens.cid
    return Sample(open_artifact(envelope.cid, data, None if tokens is None else blocks[tokens]), blocks)
