"""Model id, chain keys and DHT keys: how a text under a model gets its name (``docs/spec/keys.md``)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2pkv.errors import FormatError, UsageError
from p2pkv.formats import dagcbor
from p2pkv.formats.hashing import domain_hash
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_TOKENS, SEGMENT_TOKENS

_MODEL_DOMAIN = "p2pkv/model/v1"
_CHAIN_ROOT_DOMAIN = "p2pkv/chain-root/v1"
_CHAIN_DOMAIN = "p2pkv/chain/v1"
_DHT_DOMAIN = "p2pkv/dht/v1"
_PUBLISHER_DOMAIN = "p2pkv/publisher/v1"
_BLAKE3_MULTIHASH = bytes((0x1E, 0x20))

PUBLIC_NAMESPACE = b""


def model_id(
    config: dagcbor.Value,
    weights: bytes,
    *,
    compute_dtype: Dtype,
    kv_dtype: Dtype,
    adapters: Sequence[bytes] = (),
) -> bytes:
    """Return the 32-byte model id.

    ``config`` is the canonical description of all that changes KV values, ``weights`` the 32-byte digest over the weight
    tensors by name, dtype, shape and bytes, ``adapters`` the digests of LoRA adapters in the order they apply.
    """
    description: dagcbor.Value = {
        "config": config,
        "weights": weights,
        "adapters": list(adapters),
        "compute_dtype": compute_dtype.value,
        "kv_dtype": kv_dtype.value,
    }
    return domain_hash(_MODEL_DOMAIN, dagcbor.encode(description))


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as u32 little endian. Raises UsageError for an id that does not fit or too many of them."""
    if len(token_ids) > MAX_TOKENS:
        raise UsageError(f"{len(token_ids)} tokens exceed {MAX_TOKENS}", advice="Split the text.")
    try:
        # The list keeps array from taking a byte string or another array for the machine's own bytes.
        ids = array("I", list(token_ids))
    except (TypeError, OverflowError):
        raise UsageError("token ids are integers from 0 to 4294967295", advice="Pass the tokenizer's input_ids.") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def decode_tokens(data: bytes) -> list[int]:
    """Return the token ids of :func:`encode_tokens`. Raises FormatError where ``data`` is no whole number of u32."""
    if len(data) % 4:
        raise FormatError(f"{len(data)} bytes are no whole number of token ids")
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def segment_bounds(token_count: int) -> list[int]:
    """Return the token offsets at which segments begin and end: 0, 256, 512, ..., ``token_count``."""
    bounds = list(range(0, token_count, SEGMENT_TOKENS))
    return [*bounds, token_count]


@dataclass(frozen=True, slots=True)
class Chain:
    """The chain keys of a token sequence. ``keys[i]`` names the KV of the first ``i`` whole segments.

    ``tail`` names all tokens where the last segment is shorter than 256, and is ``None`` where it is not.
    """

    keys: tuple[bytes, ...]
    tail: bytes | None
    token_count: int

    @property
    def segments(self) -> int:
        """Whole segments."""
        return len(self.keys) - 1

    @property
    def last(self) -> bytes:
        """The key of the whole sequence, tail included."""
        return self.tail if self.tail is not None else self.keys[-1]

    def __iter__(self) -> Iterator[bytes]:
        """Yield the key after each segment, the tail's last."""
        yield from self.keys[1:]
        if self.tail is not None:
            yield self.tail


def chain(model: bytes, token_ids: Sequence[int], *, namespace: bytes = PUBLIC_NAMESPACE) -> Chain:
    """Return the chain keys of ``token_ids`` under ``model`` (its 32-byte id).

    The tail has its own chain step over its own tokens, so that a document shorter than one segment has a name as well.
    """
    encoded = memoryview(encode_tokens(token_ids))
    keys = [domain_hash(_CHAIN_ROOT_DOMAIN, model, namespace)]
    tail: bytes | None = None
    for start, end in pairwise(segment_bounds(len(token_ids))):
        step = domain_hash(_CHAIN_DOMAIN, keys[-1], encoded[4 * start : 4 * end])
        if end - start == SEGMENT_TOKENS:
            keys.append(step)
        else:
            tail = step
    return Chain(tuple(keys), tail, len(token_ids))


def dht_key(chain_key: bytes) -> bytes:
    """Return the multihash under which providers of ``chain_key`` are found: a second hash that tells nothing of the first."""
    return _BLAKE3_MULTIHASH + domain_hash(_DHT_DOMAIN, chain_key)


def publisher_key(public_key: bytes) -> bytes:
    """Return the multihash under which those are found who keep what the publisher with this 32-byte key says of itself."""
    return _BLAKE3_MULTIHASH + domain_hash(_PUBLISHER_DOMAIN, public_key)


def canonical_number(value: int | float) -> dagcbor.Value:
    """Return a number of a model config in its one form, the same for equal numbers and no others.

    DAG-CBOR's strict profile has no floats, and ``10000`` and ``10000.0`` mean the same rope base. Whole numbers are
    integers, or hexadecimal text where they do not fit 64 bits with sign; others are Python's shortest decimal text.
    """
    if isinstance(value, float) and not value.is_integer():
        return repr(float(value))  # float() sheds subclasses, whose repr may differ
    whole = int(value)
    return whole if dagcbor.MIN_INT <= whole <= dagcbor.MAX_INT else hex(whole)


def canonical_config(config: Mapping[str, object]) -> dict[str, dagcbor.Value]:
    """Return a JSON-like config as DAG-CBOR values. Raises UsageError for a value that is not JSON."""
    return {str(key): _canonical_value(value) for key, value in config.items()}


def _canonical_value(value: object) -> dagcbor.Value:
    match value:
        case bool() | None | str():
            return value
        case int() | float():
            return canonical_number(value)
        case list() | tuple():
            return [_canonical_value(item) for item in value]
        case dict():
            return canonical_config(value)
        case _:
            raise UsageError(f"a model config holds {type(value).__name__}, which is not JSON")
