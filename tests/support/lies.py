"""A publisher who signs whatever it is given: artifacts of KV values that no model computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.read import Artifact
from p2pkv.connectors.hf import api as hf
from p2pkv.formats.cid import Cid
from tests.support.crafted import Pieces
from tests.support.town import PUBLISHER


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
