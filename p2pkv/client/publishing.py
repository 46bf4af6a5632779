"""Compute the KV of a text, stage its blocks in the daemon's home, and sign the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nacl.signing import SigningKey

from p2pkv import __version__
from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.errors import UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.store.staging import Staging

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Staged:
    """A signed artifact that waits in a staging folder: its manifest CID and everything that belongs to it."""

    name: str
    manifest: Cid
    cids: Sequence[Cid]
    token_count: int
    bytes: int


def stage_artifact(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    key: SigningKey,
    terms: Terms,
    staging: Staging,
    *,
    model_name: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Staged:
    """Prefill ``token_ids`` canonically, write its blocks into ``staging`` and sign the manifest with ``key``.

    ``on_progress(done, total)`` is called with token counts. Raises ModelUnsupportedError, UsageError, DiskFullError.
    """
    from p2pkv.connectors.hf import api as hf

    if not token_ids:
        raise UsageError("an empty text", advice="Pass the token ids of the text, at least one.")
    shape = hf.geometry(model)
    source = Path(str(model.config._name_or_path or type(model).__name__))
    tokenizer = hf.tokenizer_digest(source) if source.is_dir() else None
    description = ModelDescription(hf.model_id_of(model), model_name or source.name, shape.layers, shape.dtype, tokenizer)
    written = 0

    def write(cid: Cid, data: bytes | bytearray | memoryview) -> None:
        nonlocal written
        written += memoryview(data).nbytes
        staging.write(cid, data)

    builder = ArtifactBuilder(description, token_ids, write)
    cache = hf.open_cache(model)

    def add(start: int, end: int) -> None:
        builder.add_segment([hf.extract_layer(cache, layer, start, end) for layer in range(len(shape.layers))])
        on_progress(end, len(token_ids))

    hf.prefill(model, token_ids, cache, hf.canonical_steps(len(token_ids)), on_step=add)
    envelope = Envelope.sign(builder.finish(terms, {"p2pkv": __version__, **hf.producer_stack(model)}), key)
    data = envelope.encode()
    write(envelope.cid, data)
    return Staged(staging.name, envelope.cid, staging.cids, len(token_ids), written)
