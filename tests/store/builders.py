"""Small artifacts for the tests of the store: real manifests and segment nodes over a few bytes of KV."""

from __future__ import annotations

from dataclasses import dataclass

from p2pkv.artifact import read as artifact_read
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest, Tokens
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_parts
from p2pkv.keys import chain, encode_tokens
from p2pkv.limits import SEGMENT_TOKENS

MODEL = digest(b"the model of the tests")
GEOMETRY = LayerGeometry(LayerKind.FULL, 1, 1, 1)
DID = encode_did(bytes(range(32)))
OTHER_DID = encode_did(bytes(range(1, 33)))


@dataclass(frozen=True)
class Artifact:
    """A manifest with all that hangs below it; ``blocks`` are nodes and blocks by CID."""

    manifest_cid: Cid
    manifest: Manifest
    segments: tuple[Segment, ...]
    keys: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    blocks: dict[Cid, bytes]

    @property
    def opened(self) -> artifact_read.Artifact:
        """What a reader makes of it."""
        return artifact_read.Artifact(self.manifest_cid, self.manifest, self.token_ids, self.keys)

    def blocks_of(self, position: int) -> list[Cid]:
        return [self.manifest.segments[position], *(block.cid for block in self.segments[position].blocks())]


def make_artifact(token_ids: list[int], *, sequence: int = 1, did: str = DID) -> Artifact:
    """Return the artifact of ``token_ids``; equal prefixes give equal nodes and blocks."""
    keys = tuple(chain(MODEL, token_ids))
    blocks: dict[Cid, bytes] = {}
    segments: list[Segment] = []
    for index, key in enumerate(keys):
        start, end = index * SEGMENT_TOKENS, min((index + 1) * SEGMENT_TOKENS, len(token_ids))
        (part,) = layer_parts(GEOMETRY, end - start, Dtype.BF16)
        data = (key * (-(-part.size // len(key))))[: part.size]
        block = Cid.of_block(data)
        segment = Segment(key, start, end, Dtype.BF16, "raw", ((BlockRef(part, block, len(data), digest(data)),),))
        blocks[Cid.of_node(segment.encode())] = segment.encode()
        blocks[block] = data
        segments.append(segment)
    encoded = encode_tokens(token_ids)
    manifest = Manifest(
        model_id=MODEL,
        model_name="tests/tiny",
        layers=(GEOMETRY,),
        dtype=Dtype.BF16,
        codec="raw",
        tokens=Tokens(len(token_ids), digest(encoded), encoded, None),
        last_chain_key=keys[-1],
        segments=tuple(Cid.of_node(segment.encode()) for segment in segments),
        publisher=did,
        sequence=sequence,
        created=1_700_000_000,
    )
    return Artifact(Cid.of_node(manifest.encode()), manifest, tuple(segments), keys, tuple(token_ids), blocks)


def tokens(segments: int, tail: int = 0, *, seed: int = 0) -> list[int]:
    """Return ids of ``segments`` whole segments and a tail; another ``seed`` differs from the first token on."""
    return [(seed * 7919 + number) % 50_000 for number in range(segments * SEGMENT_TOKENS + tail)]
