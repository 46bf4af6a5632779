"""Compute the KV of a text, and stage it in the daemon's home under a signed manifest."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nacl.signing import SigningKey

from p2pkv import __version__
from p2pkv.artifact.build import ArtifactBuilder, Buffer, ModelDescription, Terms
from p2pkv.artifact.granting import make_grant
from p2pkv.artifact.private import ARTIFACT_KEY_BYTES, Privacy
from p2pkv.errors import UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.grant import KEY_BYTES
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.statement import SignedStatement
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
    grant: SignedStatement | None = None
    """Of a private artifact: the publisher's grant to itself, without which nobody can open it or grant it to others."""


@dataclass(frozen=True, slots=True)
class Built:
    """An artifact that nobody signed yet: what finishes it with a publisher's terms, and the stack that computed it."""

    builder: ArtifactBuilder
    producer: Mapping[str, str]

    def manifest(self, terms: Terms) -> Manifest:
        """Return the manifest to be signed; what belongs to it is written by then."""
        return self.builder.finish(terms, self.producer)


def build_artifact(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    write: Callable[[Cid, Buffer], None],
    *,
    model_name: str | None = None,
    privacy: Privacy | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Built:
    """Prefill ``token_ids`` canonically and hand its blocks and segment nodes to ``write``, sealed where there is ``privacy``.

    ``on_progress(done, total)`` is called with token counts. Raises ModelUnsupportedError, UsageError, what ``write`` raises.
    """
    from p2pkv.connectors.hf import api as hf

    if not token_ids:
        raise UsageError("an empty text", advice="Pass the token ids of the text, at least one.")
    shape = hf.geometry(model)
    source = Path(str(model.config._name_or_path or type(model).__name__))
    tokenizer = hf.tokenizer_digest(source) if source.is_dir() else None
    description = ModelDescription(hf.model_id_of(model), model_name or source.name, shape.layers, shape.dtype, tokenizer)
    builder = ArtifactBuilder(description, token_ids, write, privacy=privacy)
    cache = hf.open_cache(model)

    def add(start: int, end: int) -> None:
        builder.add_segment([hf.extract_layer(cache, layer, start, end) for layer in range(len(shape.layers))])
        on_progress(end, len(token_ids))

    hf.prefill(model, token_ids, cache, hf.canonical_steps(len(token_ids)), on_step=add)
    return Built(builder, {"p2pkv": __version__, **hf.producer_stack(model)})


def stage_artifact(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    key: SigningKey,
    terms: Terms,
    staging: Staging,
    *,
    model_name: str | None = None,
    namespace: bytes | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Staged:
    """Build an artifact into ``staging`` and sign its manifest with ``key``; a private one with a ``namespace`` (32 bytes).

    ``on_progress(done, total)`` is called with token counts. Raises ModelUnsupportedError, UsageError, DiskFullError.
    """
    written = 0

    def write(cid: Cid, data: Buffer) -> None:
        nonlocal written
        written += memoryview(data).nbytes
        staging.write(cid, data)

    privacy = Privacy(namespace, secrets.token_bytes(ARTIFACT_KEY_BYTES)) if namespace is not None else None
    built = build_artifact(model, token_ids, write, model_name=model_name, privacy=privacy, on_progress=on_progress)
    envelope = Envelope.sign(built.manifest(terms), key)
    data = envelope.encode()
    write(envelope.cid, data)
    grant: SignedStatement | None = None
    if privacy is not None:
        own = make_grant(
            key,
            envelope.cid,
            privacy.artifact_key,
            envelope.open().model_id,
            token_ids,
            sequence=terms.sequence,
            created=terms.created,
            ephemeral=secrets.token_bytes(KEY_BYTES),
        )
        grant = SignedStatement.sign(own, key)
    return Staged(staging.name, envelope.cid, staging.cids, len(token_ids), written, grant)
