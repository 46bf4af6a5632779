"""Read an artifact: every claim of a manifest is checked against tokens, chain keys, geometry and digests before use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from p2pkv import keys
from p2pkv.artifact import private
from p2pkv.artifact.private import SegmentCipher
from p2pkv.codecs import RAW, codec_named
from p2pkv.errors import GrantMissingError, IntegrityError, ManifestError, WrongDtypeError, WrongModelError
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.sealing import SEAL_BYTES
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import SEGMENT_TOKENS

_OTHER_TOKENS: Final = "the token ids are not those that the manifest names"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A manifest whose signature and token ids are verified. ``chain_keys[i]`` is the key after segment ``i``.

    A private artifact that was opened with its key has ``ciphers``, one a segment, and in place of chain keys what its nodes
    have. To whoever lacks the key it has no token ids, and empty chain keys, which match nothing: it can be stored and
    passed on, and its blocks cannot be decoded.
    """

    cid: Cid
    manifest: Manifest
    token_ids: tuple[int, ...]
    chain_keys: tuple[bytes, ...]
    ciphers: tuple[SegmentCipher, ...] = field(default=(), repr=False)

    @property
    def readable(self) -> bool:
        """Whether blocks can be decoded."""
        return bool(self.ciphers) or not self.manifest.private

    def common_prefix(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens from the start this artifact has in common with ``token_ids``."""
        # Slices compare in C; only the chunk that differs is walked.
        limit = min(len(self.token_ids), len(token_ids))
        step = 256
        for start in range(0, limit, step):
            end = min(start + step, limit)
            if tuple(token_ids[start:end]) != self.token_ids[start:end]:
                return next(i for i in range(start, end) if token_ids[i] != self.token_ids[i])
        return limit

    def usable_prefix(self, token_ids: Sequence[int], shared: int | None) -> int:
        """Return how many tokens of a prompt can be taken from this artifact so that hit and miss give the same bits.

        KV depends on the shape of the step that computed it, so a hit ends where a canonical step of the prompt ends: at a
        whole segment, or at the end of the artifact where that is the end of the shared part (``shared``, or where the
        caller named none, wherever a published text ends). The prompt's last step is always left to be computed.
        """
        return usable_tokens(self.common_prefix(token_ids), len(self.token_ids), len(token_ids), shared)

    def segments_for(self, tokens: int) -> int:
        """Return how many segments hold the first ``tokens`` tokens."""
        return -(-tokens // SEGMENT_TOKENS)

    def open_segment(self, index: int, node: bytes) -> Segment:
        """Parse and check the node of segment ``index``.

        Raises IntegrityError where the bytes are not those of its CID, FormatError or ManifestError where it does not fit.
        """
        self.manifest.segments[index].check(node)
        segment = Segment.decode(node)
        bounds = keys.segment_bounds(self.manifest.tokens.count)
        if (segment.start, segment.end) != (bounds[index], bounds[index + 1]):
            raise ManifestError(f"segment {index} covers tokens {segment.start} to {segment.end}")
        known = self.chain_keys[index] or (self.manifest.last_chain_key if index == len(bounds) - 2 else segment.chain_key)
        if segment.chain_key != known:
            raise ManifestError(f"segment {index} belongs to another text or model")
        if segment.codec != self.manifest.codec:
            raise ManifestError(f"segment {index} is coded as {segment.codec[:64]!r}, not {self.manifest.codec!r}")
        segment.check(self.manifest.layers, self.manifest.dtype)
        is_itself = _is_itself_sealed if self.manifest.private else _is_itself
        if segment.codec == RAW.name and not all(map(is_itself, segment.blocks())):
            raise ManifestError(f"segment {index} says of a block that is not coded that it decodes to something else")
        return segment

    def decode_block(self, index: int, layer: int, ref: BlockRef, data: memoryview) -> memoryview:
        """Return the decoded bytes of a block of segment ``index``, whose bytes are verified against its CID.

        Raises IntegrityError, also where a sealed block belongs to another place; FormatError; GrantMissingError where the
        artifact is private and was opened without its key.
        """
        if not self.manifest.private:
            return decode_block(ref, self.manifest.codec, data)
        if not self.ciphers:
            raise GrantMissingError(f"the blocks of {self.cid} are private")
        ref.check_size(data)
        return self.ciphers[index].decode(layer, ref, self.manifest.codec, data)


def usable_tokens(common: int, count: int, prompt: int, shared: int | None) -> int:
    """Return :meth:`Artifact.usable_prefix` of an artifact of ``count`` tokens that has ``common`` with one of ``prompt``."""
    if common == count < prompt and shared in (None, count):
        return count
    limit = min(common, prompt if shared is None else shared)
    whole = limit - limit % SEGMENT_TOKENS
    return whole if whole < prompt else max(whole - SEGMENT_TOKENS, 0)


def open_artifact(cid: Cid, envelope: bytes, token_block: bytes | None = None) -> Artifact:
    """Verify the envelope's CID and signature, and the token ids against the last chain key.

    ``token_block`` is the block of the token ids where the manifest does not hold them inline. Raises IntegrityError,
    SignatureError, UnknownVersionError, ManifestError, FormatError.
    """
    cid.check(envelope)
    manifest = Envelope.decode(envelope).open()
    return open_manifest(cid, manifest, token_block)


def open_manifest(
    cid: Cid, manifest: Manifest, token_block: bytes | None = None, *, artifact_key: bytes | None = None
) -> Artifact:
    """Check the token ids of a manifest whose signature is verified. Raises as :func:`open_artifact`.

    ``artifact_key`` opens a private artifact, which without it is only seen to be well formed. Raises IntegrityError where it
    is another artifact's.
    """
    codec_named(manifest.codec)
    if len(set(manifest.segments)) != len(manifest.segments):
        raise ManifestError("two segments have the same node, although each names its own place")
    tokens = manifest.tokens.inline if manifest.tokens.inline is not None else token_block
    if tokens is None:
        raise ManifestError("the manifest does not tell its token ids")
    if manifest.segment_keys is not None:
        return _open_private(cid, manifest, tokens, manifest.segment_keys, artifact_key)
    if len(tokens) != manifest.token_bytes or digest(tokens) != manifest.tokens.digest:
        raise ManifestError(_OTHER_TOKENS)
    token_ids = keys.decode_tokens(tokens)
    chain = keys.chain(manifest.model_id, token_ids)
    if chain.last != manifest.last_chain_key:
        raise ManifestError("the last chain key does not follow from the model id and the tokens")
    return Artifact(cid, manifest, tuple(token_ids), tuple(chain))


def _open_private(cid: Cid, manifest: Manifest, sealed: bytes, segment_keys: bytes, artifact_key: bytes | None) -> Artifact:
    if len(sealed) != manifest.token_bytes:
        raise ManifestError(_OTHER_TOKENS)
    if artifact_key is None:
        return Artifact(cid, manifest, (), (b"",) * len(manifest.segments))
    tokens = private.open_tokens(artifact_key, sealed)
    if private.token_digest(artifact_key, tokens) != manifest.tokens.digest:
        raise ManifestError(_OTHER_TOKENS)
    ciphers = private.open_segment_keys(artifact_key, segment_keys, len(manifest.segments))
    chain_keys = tuple(cipher.chain_key for cipher in ciphers)
    if chain_keys[-1] != manifest.last_chain_key:
        raise ManifestError("the last chain key does not follow from the last segment key")
    return Artifact(cid, manifest, tuple(keys.decode_tokens(tokens)), chain_keys, ciphers)


def check_model(manifest: Manifest, model_id: bytes, dtype: Dtype) -> None:
    """Raise WrongDtypeError or WrongModelError unless the manifest is of this model in this dtype."""
    if manifest.dtype is not dtype:
        raise WrongDtypeError(f"the artifact holds {manifest.dtype}, the model runs in {dtype}")
    if manifest.model_id != model_id:
        raise WrongModelError(
            f"the artifact {manifest.model_name[:64]!r} is of model {manifest.model_id.hex()[:16]}, "
            f"this model is {model_id.hex()[:16]}"
        )


def _is_itself(ref: BlockRef) -> bool:
    """Whether size and digest before and after a coding that changes nothing are the same, as far as the node tells."""
    same_hash = ref.cid.hash_function is HashFunction.BLAKE3
    return ref.size == ref.part.size and (not same_hash or ref.cid.digest == ref.digest)


def _is_itself_sealed(ref: BlockRef) -> bool:
    """The same of a sealed block, of which the size alone can be told."""
    return ref.size == ref.part.size + SEAL_BYTES


def decode_block(ref: BlockRef, codec: str, data: memoryview) -> memoryview:
    """Return the decoded bytes of a block whose bytes are verified against its CID. Raises IntegrityError, FormatError."""
    ref.check_size(data)
    decoded = codec_named(codec).decode(data, ref.part.size)
    # A raw block under a BLAKE3 CID is verified by its CID already: the two digests are the same.
    verified = decoded is data and ref.cid == Cid(Codec.RAW, HashFunction.BLAKE3, ref.digest)
    if not verified and digest(decoded) != ref.digest:
        raise IntegrityError(f"block {ref.cid} decodes to other bytes than its publisher hashed")
    return decoded
