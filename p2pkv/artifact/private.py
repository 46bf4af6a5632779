"""Private artifacts: the keys of one, and how its segments are sealed (``docs/spec/private.md``).

From a namespace (a secret of 32 bytes) and the chain key of a segment follows the key of that segment, so that artifacts of
one namespace share the nodes and blocks of a common prefix, as public ones do. An artifact key of its own, drawn by chance,
opens the segment keys and the token ids of one artifact: whoever is given it can open this artifact and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from p2pkv.codecs import codec_named
from p2pkv.errors import IntegrityError, ManifestError
from p2pkv.formats import dagcbor
from p2pkv.formats.hashing import DIGEST_BYTES, keyed_hash
from p2pkv.formats.sealing import seal, unseal
from p2pkv.formats.segment import BlockRef
from p2pkv.formats.tensors import BlockPart

NAMESPACE_BYTES: Final = 32
ARTIFACT_KEY_BYTES: Final = 32
SEGMENT_KEY_BYTES: Final = DIGEST_BYTES
_SEGMENT_KEY_DOMAIN: Final = "p2pkv/segment-key/v1"
_CHAIN_DOMAIN: Final = "p2pkv/private-chain/v1"
_BLOCK_DOMAIN: Final = "p2pkv/private-block/v1"
_TOKENS_DOMAIN: Final = "p2pkv/private-tokens/v1"
_TOKENS_LABEL: Final = b"p2pkv/tokens/v1"
_SEGMENT_KEYS_LABEL: Final = b"p2pkv/segment-keys/v1"


@dataclass(frozen=True, slots=True)
class SegmentCipher:
    """Seals and opens the blocks of one segment under its key (32 bytes)."""

    key: bytes = field(repr=False)

    @classmethod
    def derive(cls, namespace: bytes, chain_key: bytes) -> SegmentCipher:
        """Return the cipher of the segment after which a text of ``namespace`` has ``chain_key``."""
        return cls(keyed_hash(namespace, _SEGMENT_KEY_DOMAIN, chain_key))

    @property
    def chain_key(self) -> bytes:
        """What stands in the place of the chain key, for those who cannot have it."""
        return keyed_hash(self.key, _CHAIN_DOMAIN)

    def digest(self, layer: int, part: BlockPart, codec: str, decoded: memoryview) -> bytes:
        """Return what stands in a block's ``digest``."""
        return keyed_hash(self.key, _BLOCK_DOMAIN, _place(layer, part, codec), decoded)

    def seal(self, layer: int, part: BlockPart, codec: str, coded: bytes | memoryview) -> bytes:
        """Return the bytes of a block, which open in this place alone."""
        return seal(self.key, _place(layer, part, codec), coded)

    def decode(self, layer: int, ref: BlockRef, codec: str, data: memoryview) -> memoryview:
        """Return the decoded bytes of a block whose bytes are verified against its CID.

        Raises IntegrityError where it was sealed for another place or decodes to other bytes, FormatError.
        """
        coded = unseal(self.key, _place(layer, ref.part, codec), data)
        decoded = codec_named(codec).decode(memoryview(coded), ref.part.size)
        if self.digest(layer, ref.part, codec, decoded) != ref.digest:
            raise IntegrityError(f"block {ref.cid} decodes to other bytes than its publisher hashed")
        return decoded


def _place(layer: int, part: BlockPart, codec: str) -> bytes:
    return dagcbor.encode([layer, part.part.value, part.head_start, part.head_end, part.size, codec])


@dataclass(frozen=True, slots=True)
class Privacy:
    """What makes an artifact private: the ``namespace`` that it shares prefixes in, and an ``artifact_key`` of its own.

    Both are 32 secret bytes, the second used for this one artifact.
    """

    namespace: bytes = field(repr=False)
    artifact_key: bytes = field(repr=False)

    def ciphers(self, chain_keys: Sequence[bytes]) -> list[SegmentCipher]:
        """Return the cipher of each segment; ``chain_keys`` are those after each segment, made with the namespace."""
        return [SegmentCipher.derive(self.namespace, key) for key in chain_keys]


def token_digest(artifact_key: bytes, tokens: bytes) -> bytes:
    """Return what stands in the manifest's ``tokens.digest``."""
    return keyed_hash(artifact_key, _TOKENS_DOMAIN, tokens)


def seal_tokens(artifact_key: bytes, tokens: bytes) -> bytes:
    """Return what stands in the place of the token bytes, in the manifest or in a block."""
    return seal(artifact_key, _TOKENS_LABEL, tokens)


def open_tokens(artifact_key: bytes, sealed: bytes) -> bytes:
    """Return the token bytes. Raises IntegrityError."""
    return unseal(artifact_key, _TOKENS_LABEL, sealed)


def seal_segment_keys(artifact_key: bytes, ciphers: Sequence[SegmentCipher]) -> bytes:
    """Return the manifest's ``segment_keys``."""
    return seal(artifact_key, _SEGMENT_KEYS_LABEL, b"".join(cipher.key for cipher in ciphers))


def open_segment_keys(artifact_key: bytes, sealed: bytes, segments: int) -> tuple[SegmentCipher, ...]:
    """Return the ciphers of all ``segments`` segments. Raises IntegrityError, ManifestError where there are not as many."""
    opened = unseal(artifact_key, _SEGMENT_KEYS_LABEL, sealed)
    if len(opened) != segments * SEGMENT_KEY_BYTES:
        raise ManifestError(f"the manifest has {segments} segments, and another number of segment keys")
    return tuple(SegmentCipher(opened[at : at + SEGMENT_KEY_BYTES]) for at in range(0, len(opened), SEGMENT_KEY_BYTES))
