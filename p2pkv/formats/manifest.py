"""Manifests: what an artifact is, who made it and under what terms (``docs/spec/manifest.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from p2pkv.errors import ManifestError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.did import decode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.sealing import SEAL_BYTES
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.limits import MAX_INLINE_TOKEN_BYTES, MAX_LAYERS, MAX_SEGMENTS, MAX_TEXT_BYTES, MAX_TOKENS, SEGMENT_TOKENS

KIND: Final = "p2pkv/manifest"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token sequence: its count, the digest of its u32 little endian bytes, and the ids inline or in a block.

    In a private artifact the digest is keyed and the ids are sealed, wherever they stand. Both are never given.
    """

    count: int
    digest: bytes
    inline: bytes | None
    cid: Cid | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """One artifact: the KV of a token sequence under a model, in segments of 256 tokens and a shorter tail.

    Times are seconds since the epoch, UTC. ``sequence`` orders a publisher's manifests; clocks only expire them.
    ``producer`` describes the stack (versions, processor) as text by name. ``extra`` holds fields of later versions.
    ``segment_keys`` are the sealed keys of a private artifact, and ``None`` in a public one.
    """

    model_id: bytes
    model_name: str
    layers: tuple[LayerGeometry, ...]
    dtype: Dtype
    codec: str
    tokens: Tokens
    last_chain_key: bytes
    segments: tuple[Cid, ...]
    publisher: str
    sequence: int
    created: int
    expires: int | None = None
    licence: str = ""
    producer: Mapping[str, str] = field(default_factory=dict)
    tokenizer: bytes | None = None
    aliases: Mapping[str, bytes] = field(default_factory=dict)
    segment_keys: bytes | None = None
    extra: Mapping[str, dagcbor.Value] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether token ids, chain keys and blocks are sealed (``docs/spec/private.md``)."""
        return self.segment_keys is not None

    @property
    def token_bytes(self) -> int:
        """How many bytes the token ids take as they are given, sealed or not."""
        return 4 * self.tokens.count + (SEAL_BYTES if self.private else 0)

    def encode(self) -> bytes:
        """Return the bytes that the envelope signs."""
        return dagcbor.encode(
            {
                **self.extra,
                **({"segment_keys": self.segment_keys} if self.segment_keys is not None else {}),
                "kind": KIND,
                "version": VERSION,
                "model": {"id": self.model_id, "name": self.model_name},
                "layers": [
                    {"kind": layer.kind.value, "kv_heads": layer.kv_heads, "k_dim": layer.k_dim, "v_dim": layer.v_dim}
                    for layer in self.layers
                ],
                "dtype": self.dtype.value,
                "codec": self.codec,
                "tokens": {
                    "count": self.tokens.count,
                    "digest": self.tokens.digest,
                    "inline": self.tokens.inline,
                    "cid": self.tokens.cid,
                },
                "last_chain_key": self.last_chain_key,
                "segments": list(self.segments),
                "publisher": self.publisher,
                "sequence": self.sequence,
                "created": self.created,
                "expires": self.expires,
                "licence": self.licence,
                "producer": dict(self.producer),
                "tokenizer": self.tokenizer,
                "aliases": dict(self.aliases),
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse and check a manifest. Raises FormatError or a subclass: UnknownVersionError, ManifestError, ..."""
        fields = Fields(dagcbor.decode_map(data), "manifest", ManifestError)
        fields.version(KIND, VERSION)
        model = fields.map("model")
        manifest = cls(
            model_id=model.fixed_bytes("id", DIGEST_BYTES),
            model_name=model.text("name"),
            layers=tuple(_layer(layer) for layer in fields.maps("layers", MAX_LAYERS)),
            dtype=fields.choice("dtype", Dtype),
            codec=fields.text("codec"),
            tokens=_tokens(fields.map("tokens")),
            last_chain_key=fields.fixed_bytes("last_chain_key", DIGEST_BYTES),
            segments=_segments(fields.items("segments", MAX_SEGMENTS + 1)),
            publisher=fields.text("publisher"),
            sequence=fields.integer("sequence"),
            created=fields.integer("created"),
            expires=fields.optional_integer("expires"),
            licence=fields.text("licence"),
            producer=_texts(fields.map("producer")),
            tokenizer=fields.optional_fixed_bytes("tokenizer", DIGEST_BYTES),
            aliases=_aliases(fields.map("aliases")),
            segment_keys=fields.absent_or_bytes_up_to("segment_keys", MAX_SEGMENTS * DIGEST_BYTES + SEAL_BYTES),
            extra=fields.rest(),
        )
        model.end()
        decode_did(manifest.publisher)
        if not manifest.layers:
            raise ManifestError("a manifest without layers")
        expected = -(-manifest.tokens.count // SEGMENT_TOKENS)
        if len(manifest.segments) != expected:
            raise ManifestError(f"{manifest.tokens.count} tokens take {expected} segments, not {len(manifest.segments)}")
        inline = manifest.tokens.inline
        if inline is not None and (len(inline) != manifest.token_bytes or 4 * manifest.tokens.count > MAX_INLINE_TOKEN_BYTES):
            raise ManifestError(f"the inline token ids are not exactly {manifest.tokens.count} u32")
        if manifest.segment_keys is not None:
            _check_private(manifest, manifest.segment_keys)
        return manifest


def _check_private(manifest: Manifest, segment_keys: bytes) -> None:
    if len(segment_keys) != len(manifest.segments) * DIGEST_BYTES + SEAL_BYTES:
        raise ManifestError(f"the sealed segment keys are not those of {len(manifest.segments)} segments")
    if manifest.aliases:
        raise ManifestError("a private artifact lists keys of other engines, which are hashes of its text")


def _layer(fields: Fields) -> LayerGeometry:
    geometry = LayerGeometry(
        fields.choice("kind", LayerKind), fields.integer("kv_heads"), fields.integer("k_dim"), fields.integer("v_dim")
    )
    fields.end()
    return geometry


def _tokens(fields: Fields) -> Tokens:
    tokens = Tokens(
        fields.integer("count", 1, MAX_TOKENS),
        fields.fixed_bytes("digest", DIGEST_BYTES),
        fields.optional_bytes_up_to("inline", MAX_INLINE_TOKEN_BYTES + SEAL_BYTES),
        fields.optional_link("cid"),
    )
    fields.end()
    if tokens.inline is not None and tokens.cid is not None:
        raise ManifestError("the token ids are given twice, inline and by CID")
    if tokens.cid is not None and tokens.cid.codec is not Codec.RAW:
        raise ManifestError("the token ids are not in a raw block")
    return tokens


def _segments(links: list[dagcbor.Value]) -> tuple[Cid, ...]:
    segments: list[Cid] = []
    for link in links:
        if not isinstance(link, Cid) or link.codec is not Codec.DAG_CBOR:
            raise ManifestError("manifest.segments holds something that is not the CID of a segment node")
        segments.append(link)
    return tuple(segments)


def _texts(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name) for name in fields.rest()}


def _aliases(fields: Fields) -> dict[str, bytes]:
    return {name: fields.bytes_up_to(name, MAX_TEXT_BYTES) for name in fields.rest()}
