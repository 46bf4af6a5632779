"""Small private artifacts for tests: random KV of a two-layer model, sealed and signed with fixed keys."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from nacl.signing import SigningKey

from p2pkv.artifact.build import ArtifactBuilder, ModelDescription, Terms
from p2pkv.artifact.private import Privacy
from p2pkv.artifact.read import Artifact, open_manifest
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.segment import Segment
from p2pkv.formats.tensors import layer_bytes
from p2pkv.keys import chain, dht_key, encode_tokens, segment_bounds
from tests.support.artifacts import KEY, NOW, model

NAMESPACE = bytes(range(100, 132))
ARTIFACT_KEY = bytes(range(200, 232))
WINDOW = 16
"""Bytes of a window of plaintext: what is random does not repeat in so many."""


@dataclass(frozen=True)
class PrivateSample:
    """A private artifact, everything of it by CID, the keys, and the plaintext of ``layers[segment][layer]``."""

    manifest: Manifest
    envelope: Envelope
    blocks: dict[Cid, bytes]
    privacy: Privacy
    token_ids: tuple[int, ...]
    layers: tuple[tuple[bytes, ...], ...]

    @property
    def cid(self) -> Cid:
        return self.envelope.cid

    def open(self, artifact_key: bytes | None = None) -> Artifact:
        """Open it with a key, as its reader does; without one it stays closed."""
        tokens = self.manifest.tokens.cid
        block = None if tokens is None else self.blocks[tokens]
        return open_manifest(self.cid, self.manifest, block, artifact_key=artifact_key)

    def segment(self, index: int) -> Segment:
        return Segment.decode(self.blocks[self.manifest.segments[index]])

    def with_segments(self, segments: Sequence[Segment], key: SigningKey = KEY) -> PrivateSample:
        """Return it with other nodes, signed again: what a publisher could say."""
        nodes = [segment.encode() for segment in segments]
        cids = [Cid.of_node(node) for node in nodes]
        manifest = replace(self.manifest, segments=tuple(cids))
        blocks = {**self.blocks, **dict(zip(cids, nodes, strict=True))}
        return replace(self, manifest=manifest, envelope=Envelope.sign(manifest, key), blocks=blocks)


def make_private(
    token_ids: Sequence[int],
    *,
    seed: int = 0,
    description: ModelDescription | None = None,
    namespace: bytes = NAMESPACE,
    artifact_key: bytes = ARTIFACT_KEY,
    key: SigningKey = KEY,
) -> PrivateSample:
    """Build and sign a private artifact; equal arguments give equal bytes. A segment's KV depends on seed and place alone."""
    description = description or model()
    blocks: dict[Cid, bytes] = {}
    privacy = Privacy(namespace, artifact_key)
    builder = ArtifactBuilder(description, token_ids, lambda cid, data: blocks.__setitem__(cid, bytes(data)), privacy=privacy)
    layers = []
    for start, end in pairwise(segment_bounds(len(token_ids))):
        rng = random.Random(f"{seed} {start}")
        layers.append(tuple(rng.randbytes(layer_bytes(g, end - start, description.dtype)) for g in description.layers))
        builder.add_segment(layers[-1])
    terms = Terms(encode_did(bytes(key.verify_key)), sequence=1, created=NOW)
    envelope = Envelope.sign(builder.finish(terms, {}), key)
    blocks[envelope.cid] = envelope.encode()
    return PrivateSample(envelope.open(), envelope, blocks, privacy, tuple(token_ids), tuple(layers))


def secrets_of(
    privacy: Privacy, model_id: bytes, token_ids: Sequence[int], layers: Sequence[bytes] = (), text: str = ""
) -> Iterator[tuple[str, bytes]]:
    """Yield what nobody without the keys may find, by name: keys, chain keys, token ids, text, values, plain hashes."""
    yield "namespace", privacy.namespace
    yield "artifact key", privacy.artifact_key
    tokens = encode_tokens(token_ids)
    yield "token digest", digest(tokens)
    for name, namespace in (("public", b""), ("private", privacy.namespace)):
        for index, key in enumerate(keys := chain(model_id, token_ids, namespace=namespace)):
            yield f"{name} chain key {index}", key
            yield f"DHT key of {name} chain key {index}", dht_key(key)[2:]
        yield f"{name} root", keys.keys[0]
    for at in range(0, len(tokens) - WINDOW + 1, 4):
        yield f"token ids at {at // 4}", tokens[at : at + WINDOW]
        some = token_ids[at // 4 : at // 4 + 6]
        for comma in (",", ", "):
            yield f"token ids at {at // 4} as text", comma.join(map(str, some)).encode()
    for at in range(0, len(text.encode()) - WINDOW + 1, WINDOW // 2):
        yield f"text at {at}", text.encode()[at : at + WINDOW]
    for index, data in enumerate(layers):
        yield f"digest of values {index}", digest(data)
        for at in range(0, len(data) - WINDOW + 1, max(len(data) // 64, 1)):
            yield f"values {index} at {at}", data[at : at + WINDOW]


def find_secrets(data: bytes, known: Iterable[tuple[str, bytes]]) -> list[str]:
    """Return the names of what is found anywhere in ``data``. Each is at least 8 bytes long."""
    by_start: dict[int, list[tuple[str, bytes]]] = {}
    for name, secret in known:
        by_start.setdefault(int.from_bytes(secret[:8], "little"), []).append((name, secret))
    starts = np.array(sorted(by_start), dtype="<u8")
    found: set[str] = set()
    for offset in range(8):
        words = np.frombuffer(data, "<u8", count=max(len(data) - offset, 0) // 8, offset=min(offset, len(data)))
        for index in np.flatnonzero(np.isin(words, starts)):
            at = offset + 8 * int(index)
            found |= {name for name, secret in by_start[int(words[index])] if data[at : at + len(secret)] == secret}
    return sorted(found)
