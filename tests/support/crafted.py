"""Artifacts of a real model, in memory, that a test may sign as it likes: also in ways no honest publisher would."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nacl.signing import SigningKey
from transformers import PreTrainedModel

from p2pkv import keys
from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.read import Artifact
from p2pkv.connectors.hf import api as hf
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import DOMAIN, Envelope
from p2pkv.formats.manifest import Manifest
from tests.support.town import KEY, PUBLISHER


@dataclass(frozen=True)
class Pieces:
    """An unsigned artifact: its manifest, and its blocks and nodes by CID."""

    manifest: Manifest
    token_ids: tuple[int, ...]
    blocks: Mapping[Cid, bytes]

    def seal(self, envelope: Envelope | bytes) -> tuple[Artifact, dict[Cid, bytes]]:
        """Return what a node plants: whatever ``envelope`` says, listed under the text's true chain keys."""
        data = envelope if isinstance(envelope, bytes) else envelope.encode()
        cid = Cid.of_node(data)
        chain_keys = tuple(keys.chain(self.manifest.model_id, self.token_ids))
        return Artifact(cid, self.manifest, self.token_ids, chain_keys), {**self.blocks, cid: data}

    def signed(self, key: SigningKey = KEY, **changes: Any) -> tuple[Artifact, dict[Cid, bytes]]:
        """Sign the manifest with fields replaced by ``changes``, whether or not it makes sense."""
        return self.seal(sign_anything(replace(self.manifest, **changes).encode(), key))

    def cids(self, codec: Codec) -> list[Cid]:
        return [cid for cid in self.blocks if cid.codec is codec]


def sign_anything(payload: bytes, key: SigningKey = KEY) -> Envelope:
    """Return an envelope over bytes that :meth:`Envelope.sign` would refuse."""
    return Envelope(payload, bytes(key.verify_key), key.sign(DOMAIN + payload).signature)


def compute(model: PreTrainedModel, token_ids: Sequence[int], *, name: str = "tiny", **terms: Any) -> Pieces:
    """Prefill ``token_ids`` canonically and build the artifact. ``terms`` are those of a manifest, by default from now on."""
    blocks: dict[Cid, bytes] = {}
    shape = hf.geometry(model)
    description = ModelDescription(hf.model_id_of(model), name, shape.layers, shape.dtype)
    builder = ArtifactBuilder(description, token_ids, lambda cid, data: blocks.__setitem__(cid, bytes(data)))
    cache = hf.open_cache(model)

    def add(start: int, end: int) -> None:
        builder.add_segment([hf.extract_layer(cache, layer, start, end) for layer in range(len(shape.layers))])

    hf.prefill(model, token_ids, cache, hf.canonical_steps(len(token_ids)), on_step=add)
    now = int(time.time())
    manifest = builder.finish(Terms(PUBLISHER, **{"sequence": now, "created": now, **terms}), hf.producer_stack(model))
    return Pieces(manifest, tuple(token_ids), blocks)
