"""Build an artifact: layer bytes in, blocks and segment nodes out, and at the end an unsigned manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2pkv import keys
from p2pkv.artifact import private
from p2pkv.artifact.private import Privacy
from p2pkv.codecs import RAW, BlockCodec
from p2pkv.errors import CacheMismatchError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest, Tokens
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.formats.tensors import BlockPart, Dtype, LayerGeometry, Part, layer_bytes, layer_parts
from p2pkv.limits import MAX_INLINE_TOKEN_BYTES

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a manifest says of the model: its id (32 bytes), a name for people, the geometry of its layers and its KV dtype."""

    model_id: bytes
    name: str
    layers: tuple[LayerGeometry, ...]
    dtype: Dtype
    tokenizer: bytes | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a publisher says of an artifact. Times are seconds since the epoch."""

    publisher: str
    sequence: int
    created: int
    expires: int | None = None
    licence: str = ""


class ArtifactBuilder:
    """Takes the segments of one token sequence in order and writes their blocks and nodes through ``write``.

    With ``privacy`` everything that tells of the text is sealed. Raises UsageError for no tokens, too many, or one that is no
    u32.
    """

    def __init__(
        self,
        model: ModelDescription,
        token_ids: Sequence[int],
        write: Callable[[Cid, Buffer], None],
        *,
        codec: BlockCodec = RAW,
        privacy: Privacy | None = None,
    ) -> None:
        if not token_ids:
            raise UsageError("an artifact of no tokens", advice="Publish a text of at least one token.")
        self._model = model
        self._tokens = keys.encode_tokens(token_ids)
        self._privacy = privacy
        namespace = privacy.namespace if privacy is not None else keys.PUBLIC_NAMESPACE
        self._chain_keys = list(keys.chain(model.model_id, token_ids, namespace=namespace))
        self._ciphers = privacy.ciphers(self._chain_keys) if privacy is not None else []
        if self._ciphers:
            self._chain_keys = [cipher.chain_key for cipher in self._ciphers]
        self._bounds = keys.segment_bounds(len(token_ids))
        self._write = write
        self._codec = codec
        self._segments: list[Segment] = []
        self._nodes: list[Cid] = []
        self._token_block: Cid | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments added so far."""
        return tuple(self._segments)

    @property
    def cids(self) -> Iterator[Cid]:
        """Yield every block and node written so far, each once."""
        written = dict.fromkeys(block.cid for segment in self._segments for block in segment.blocks())
        yield from written
        yield from dict.fromkeys(self._nodes)
        if self._token_block is not None:
            yield self._token_block

    def add_segment(self, layers: Sequence[Buffer]) -> Segment:
        """Add the next segment; ``layers[i]`` is the neutral K and then V of layer ``i`` (see formats.tensors).

        Raises CacheMismatchError where the count of layers or their sizes do not fit the model, or all segments are here.
        """
        index = len(self._segments)
        if index == len(self._bounds) - 1:
            raise CacheMismatchError(f"all {index} segments were added already")
        start, end = self._bounds[index], self._bounds[index + 1]
        if len(layers) != len(self._model.layers):
            raise CacheMismatchError(f"{len(layers)} layers given, the model has {len(self._model.layers)}")
        segment = Segment(
            chain_key=self._chain_keys[index],
            start=start,
            end=end,
            dtype=self._model.dtype,
            codec=self._codec.name,
            layers=tuple(self._add_layer(memoryview(data).cast("B"), layer, end - start) for layer, data in enumerate(layers)),
        )
        node = segment.encode()
        cid = Cid.of_node(node)
        self._write(cid, node)
        self._segments.append(segment)
        self._nodes.append(cid)
        return segment

    def finish(self, terms: Terms, producer: Mapping[str, str]) -> Manifest:
        """Return the manifest of all segments, to be signed. Raises CacheMismatchError while segments are missing."""
        if len(self._segments) != len(self._bounds) - 1:
            raise CacheMismatchError(f"{len(self._segments)} of {len(self._bounds) - 1} segments were added")
        tokens, token_digest, segment_keys = self._tokens, digest(self._tokens), None
        if self._privacy is not None:
            key = self._privacy.artifact_key
            tokens, token_digest = private.seal_tokens(key, tokens), private.token_digest(key, tokens)
            segment_keys = private.seal_segment_keys(key, self._ciphers)
        inline = len(self._tokens) <= MAX_INLINE_TOKEN_BYTES
        if not inline:
            self._token_block = Cid.of_block(tokens)
            self._write(self._token_block, tokens)
        return Manifest(
            model_id=self._model.model_id,
            model_name=self._model.name,
            layers=self._model.layers,
            dtype=self._model.dtype,
            codec=self._codec.name,
            tokens=Tokens(len(self._tokens) // 4, token_digest, tokens if inline else None, self._token_block),
            last_chain_key=self._chain_keys[-1],
            segments=tuple(self._nodes),
            publisher=terms.publisher,
            sequence=terms.sequence,
            created=terms.created,
            expires=terms.expires,
            licence=terms.licence,
            producer=producer,
            tokenizer=self._model.tokenizer,
            segment_keys=segment_keys,
        )

    def _add_layer(self, data: memoryview, layer: int, tokens: int) -> tuple[BlockRef, ...]:
        refs: list[BlockRef] = []
        for part, payload in split_layer(data, self._model.layers[layer], tokens, self._model.dtype):
            coded = self._codec.encode(payload)
            if self._ciphers:
                cipher = self._ciphers[len(self._segments)]
                coded = cipher.seal(layer, part, self._codec.name, coded)
                block_digest = cipher.digest(layer, part, self._codec.name, payload)
                cid = Cid.of_block(coded)
            else:
                cid = Cid.of_block(coded)
                # Hashing is most of what building costs: what is not coded is hashed once.
                block_digest = cid.digest if coded is payload else digest(payload)
            self._write(cid, coded)
            refs.append(BlockRef(part, cid, len(coded), block_digest))
        return tuple(refs)


def split_layer(
    data: memoryview, geometry: LayerGeometry, tokens: int, dtype: Dtype
) -> Iterator[tuple[BlockPart, memoryview]]:
    """Yield the canonical blocks of one layer as views of ``data`` (K and then V). Raises CacheMismatchError."""
    expected = layer_bytes(geometry, tokens, dtype)
    if len(data) != expected:
        raise CacheMismatchError(f"a layer of {len(data)} bytes, expected {expected} for {tokens} tokens")
    k_head = tokens * geometry.k_dim * dtype.itemsize
    v_head = tokens * geometry.v_dim * dtype.itemsize
    v_offset = geometry.kv_heads * k_head
    for part in layer_parts(geometry, tokens, dtype):
        match part.part:
            case Part.KV:
                yield part, data
            case Part.K:
                yield part, data[part.head_start * k_head : part.head_end * k_head]
            case Part.V:
                yield part, data[v_offset + part.head_start * v_head : v_offset + part.head_end * v_head]
