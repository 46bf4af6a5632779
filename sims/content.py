"""The artifact that simulated nodes exchange: real formats, real hashes, random values."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from nacl.signing import SigningKey

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.read import Artifact, open_artifact
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_bytes
from p2pkv.limits import SEGMENT_TOKENS

_KEY: Final = SigningKey(bytes(range(32)))
PUBLISHER: Final = encode_did(bytes(_KEY.verify_key))
CREATED: Final = 1_800_000_000
_LAYER: Final = LayerGeometry(LayerKind.FULL, kv_heads=4, k_dim=64, v_dim=64)
_LAYERS: Final = 16
MODEL: Final = ModelDescription(bytes(32), "simulated", (_LAYER,) * _LAYERS, Dtype.BF16)
BLOCK_BYTES: Final = layer_bytes(_LAYER, SEGMENT_TOKENS, Dtype.BF16)  # 256 KiB


@dataclass(frozen=True, slots=True)
class Content:
    """An artifact, and every block and node of it, the envelope too, by CID. ``data_bytes`` counts the blocks alone."""

    artifact: Artifact
    blocks: dict[Cid, bytes]
    token_ids: tuple[int, ...]
    data_bytes: int


def make_content(blocks: int, seed: int) -> Content:
    """Build and sign an artifact of ``blocks`` blocks of BLOCK_BYTES, rounded up to whole segments of 16."""
    rng = random.Random(seed)
    segments = -(-blocks // _LAYERS)
    token_ids = tuple(range(segments * SEGMENT_TOKENS))
    written: dict[Cid, bytes] = {}
    builder = ArtifactBuilder(MODEL, token_ids, lambda cid, data: written.__setitem__(cid, bytes(data)))
    for _ in range(segments):
        builder.add_segment([rng.randbytes(BLOCK_BYTES) for _ in range(_LAYERS)])
    envelope = Envelope.sign(builder.finish(Terms(PUBLISHER, sequence=1, created=CREATED), {"simulated": "yes"}), _KEY)
    written[envelope.cid] = envelope.encode()
    artifact = open_artifact(envelope.cid, written[envelope.cid])
    return Content(artifact, written, token_ids, segments * _LAYERS * BLOCK_BYTES)
