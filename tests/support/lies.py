"""A publisher who signs whatever it is given: artifacts of KV values that no model computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nacl.signing import SigningKey
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.read import Artifact
from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.cache import layer_tensors
from p2pkv.connectors.hf.geometry import bits
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from tests.support.crafted import Pieces
from tests.support.town import PUBLISHER


def whole(model: PreTrainedModel, token_ids: Sequence[int]) -> DynamicCache:
    """Return the honest KV of a text."""
    cache = hf.open_cache(model)
    hf.prefill(model, token_ids, cache, hf.canonical_steps(len(token_ids)))
    return cache


def one_bit(
    model: PreTrainedModel, token_ids: Sequence[int], producer: Mapping[str, str] | None = None
) -> tuple[Artifact, dict[Cid, bytes]]:
    """Sign values of which one, of token 300, has another last bit."""
    cache = whole(model, token_ids)
    bits(layer_tensors(cache)[2][1])[0, 0, 300, 7] ^= 1
    return signed_values(model, token_ids, layer_tensors(cache), producer)


def resigned(sealed: tuple[Artifact, dict[Cid, bytes]], key: SigningKey, **changes: Any) -> tuple[Artifact, dict[Cid, bytes]]:
    """Let another publisher sign what one signed."""
    artifact, blocks = sealed
    pieces = Pieces(artifact.manifest, artifact.token_ids, {cid: blocks[cid] for cid in blocks if cid != artifact.cid})
    return pieces.signed(key, publisher=encode_did(bytes(key.verify_key)), **changes)


def signed_values(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    values: Sequence[tuple[Tensor, Tensor]],
    producer: Mapping[str, str] | None = None,
) -> tuple[Artifact, dict[Cid, bytes]]:
    """Sign keys and ``values``, ``[1, heads, tokens, dim]`` of each layer, as the KV of ``token_ids``.

    ``producer`` is the stack that the manifest claims, by default this one.
    """
    blocks: dict[Cid, bytes] = {}
    shape = hf.geometry(model)
    description = ModelDescription(hf.model_id_of(model), "lied about", shape.layers, shape.dtype)
    builder = ArtifactBuilder(description, token_ids, lambda cid, data: blocks.__setitem__(cid, bytes(data)))
    cache = hf.open_cache(model)
    for layer, (keys, halves) in enumerate(values):
        cache.update(keys.contiguous(), halves.contiguous(), layer)
    for start, end in hf.canonical_steps(len(token_ids)):
        builder.add_segment([hf.extract_layer(cache, layer, start, end) for layer in range(len(shape.layers))])
    now = int(time.time())
    manifest = builder.finish(
        Terms(PUBLISHER, sequence=now, created=now), hf.producer_stack(model) if producer is None else producer
    )
    return Pieces(manifest, tuple(token_ids), blocks).signed()
