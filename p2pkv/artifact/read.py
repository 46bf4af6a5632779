"""Read an artifact: every claim of a manifest is checked against tokens, chain keys, geometry and digests before use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pkv import keys
from p2pkv.codecs import RAW, codec_named
from p2pkv.errors import IntegrityError, ManifestError, WrongDtypeError, WrongModelError
from p2pkv.formats.cid import Cid, Codec, HashFunction
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import SEGMENT_TOKENS


@dataclass(frozen=True, slots=True)
class Artifact:
    """A manifest whose signature and token ids are verified. ``chain_keys[i]`` is the key after segment ``i``."""

    cid: Cid
    manifest: Manifest
    token_ids: tuple[int, ...]
    chain_keys: tuple[bytes, ...]

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
        common = self.common_prefix(token_ids)
        count = len(self.token_ids)
        if common == count < len(token_ids) and shared in (None, count):
            return count
        limit = min(common, len(token_ids) if shared is None else shared)
        whole = limit - limit % SEGMENT_TOKENS
        return whole if whole < len(token_ids) else max(whole - SEGMENT_TOKENS, 0)

    def segments_for(self, tokens: int) -> int:
        """Return how many segments hold the first ``tokens`` tokens."""
        return -(-tokens // SEGMENT_TOKENS)

    def open_segment(self, index: int, node: bytes) -> Segment:
        """Parse and check the node of segment ``index``.

        Raises IntegrityError where the bytes are not those of its CID, FormatError or ManifestError where it does not fit.
        """
        self.manifest.segments[index].check(node)
        segment = Segment.decode(node)
        bounds = keys.segment_bounds(len(self.token_ids))
        if (segment.start, segment.end) != (bounds[index], bounds[index + 1]):
            raise ManifestError(f"segment {index} covers tokens {segment.start} to {segment.end}")
        if segment.chain_key != self.chain_keys[index]:
            raise ManifestError(f"segment {index} belongs to another text or model")
        if segment.codec != self.manifest.codec:
            raise ManifestError(f"segment {index} is coded as {segment.codec[:64]!r}, not {self.manifest.codec!r}")
        segment.check(self.manifest.layers, self.manifest.dtype)
        if segment.codec == RAW.name and not all(_is_itself(ref) for ref in segment.blocks()):
            raise ManifestError(f"segment {index} says of a block that is not coded that it decodes to something else")
        return segment


def open_artifact(cid: Cid, envelope: bytes, token_block: bytes | None = None) -> Artifact:
    """Verify the envelope's CID and signature, and the token ids against the last chain key.

    ``token_block`` is the block of the token ids where the manifest does not hold them inline. Raises IntegrityError,
    SignatureError, UnknownVersionError, ManifestError, FormatError.
    """
    cid.check(envelope)
    manifest = Envelope.decode(envelope).open()
    return open_manifest(cid, manifest, token_block)


def open_manifest(cid: Cid, manifest: Manifest, token_block: bytes | None = None) -> Artifact:
    """Check the token ids of a manifest whose signature is verified. Raises as :func:`open_artifact`."""
    codec_named(manifest.codec)
    if len(set(manifest.segments)) != len(manifest.segments):
        raise ManifestError("two segments have the same node, although each names its own place")
    tokens = manifest.tokens.inline if manifest.tokens.inline is not None else token_block
    if tokens is None:
        raise ManifestError("the manifest does not tell its token ids")
    if len(tokens) != 4 * manifest.tokens.count or digest(tokens) != manifest.tokens.digest:
        raise ManifestError("the token ids are not those that the manifest names")
    token_ids = keys.decode_tokens(tokens)
    chain = keys.chain(manifest.model_id, token_ids)
    if chain.last != manifest.last_chain_key:
        raise ManifestError("the last chain key does not follow from the model id and the tokens")
    return Artifact(cid, manifest, tuple(token_ids), tuple(chain))


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


def decode_block(ref: BlockRef, codec: str, data: memoryview) -> memoryview:
    """Return the decoded bytes of a block whose bytes are verified against its CID. Raises IntegrityError, FormatError."""
    if len(data) != ref.size:
        raise IntegrityError(f"block {ref.cid} has {len(data)} bytes, its segment says {ref.size}")
    decoded = codec_named(codec).decode(data, ref.part.size)
    # A raw block under a BLAKE3 CID is verified by its CID already: the two digests are the same.
    verified = decoded is data and ref.cid == Cid(Codec.RAW, HashFunction.BLAKE3, ref.digest)
    if not verified and digest(decoded) != ref.digest:
        raise IntegrityError(f"block {ref.cid} decodes to other bytes than its publisher hashed")
    return decoded
