"""The tiny artifact that the pages of ``docs/spec/`` explain: two layers, three tokens, one segment, one key."""

from __future__ import annotations

import struct
from typing import Any

from multiformats import multibase
from nacl.signing import SigningKey

from tests.vectors.encoding import Link, Piece, cid, hashed, joined, node, preimage

SEED = bytes(range(32))
TOKENS = [1, 2, 70000]
MODEL_CONFIG: dict[str, Any] = {"architecture": "tiny", "layers": 2, "norm_eps": "1e-05", "rope_theta": 10000}


# Two weights of a checkpoint: name, safetensors dtype, shape, bytes.
WEIGHTS = [("a.weight", "BF16", (2, 3), bytes(range(12))), ("b.bias", "F32", (1,), bytes(4))]
WEIGHTS_PREIMAGE = preimage(
    "p2pkv/weights/v1",
    *(
        part
        for name, dtype, shape, data in WEIGHTS
        for part in (
            (name.encode(), f"name {name!r}"),
            (dtype.encode(), f"dtype {dtype!r}"),
            (struct.pack(f"<{len(shape)}Q", *shape), f"shape {list(shape)}, each size as u64 little endian"),
            (hashed(data), f"BLAKE3-256 of the {len(data)} bytes of the tensor"),
        )
    ),
)
# A config.json as it is found, and what is described of it.
CONFIG_JSON = {
    "_name_or_path": "somewhere",
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 4,
    "model_type": "tiny",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
DESCRIBED = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 4,
    "model_type": "tiny",
    "rms_norm_eps": "1e-05",
    "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
}
DESCRIBED_PIECES = node(DESCRIBED, {"rms_norm_eps": "the number as text", "rope_parameters": "the new form of rope_theta"})


def bf16(number: float) -> bytes:
    """Return the upper half of an IEEE single, little endian: exact for the small whole numbers used here."""
    return struct.pack("<f", number)[2:]


def block(heads: int, tokens: int, k_dim: int, v_dim: int) -> list[Piece]:
    """K and then V; the value of head h, token t, dimension d is 100 h + 10 t + d, negative in V."""
    pieces: list[Piece] = []
    for name, sign, dims in (("K", 1, k_dim), ("V", -1, v_dim)):
        for h in range(heads):
            for t in range(tokens):
                row = [sign * (100 * h + 10 * t + d) for d in range(dims)]
                pieces.append((b"".join(bf16(number) for number in row), f"{name}[{h}, {t}, :] = {row}"))
    return pieces


MODEL_PREIMAGE = preimage(
    "p2pkv/model/v1",
    (
        joined(
            node(
                {
                    "config": MODEL_CONFIG,
                    "weights": hashed(b"weights"),
                    "adapters": [],
                    "compute_dtype": "bf16",
                    "kv_dtype": "bf16",
                },
                {},
            )
        ),
        "the canonical description as DAG-CBOR",
    ),
)
MODEL_ID = hashed(joined(MODEL_PREIMAGE))
TOKEN_BYTES = struct.pack("<3I", *TOKENS)
WHOLE = struct.pack("<256I", *range(256))

ROOT_PREIMAGE = preimage("p2pkv/chain-root/v1", (MODEL_ID, "the model id"), (b"", "the namespace: empty, public"))
ROOT = hashed(joined(ROOT_PREIMAGE))
TAIL_PREIMAGE = preimage("p2pkv/chain/v1", (ROOT, "the root"), (TOKEN_BYTES, f"the tokens {TOKENS} as u32 little endian"))
TAIL = hashed(joined(TAIL_PREIMAGE))
WHOLE_PREIMAGE = preimage("p2pkv/chain/v1", (ROOT, "the root"), (WHOLE, "the tokens 0 to 255 as u32 little endian"))
FIRST = hashed(joined(WHOLE_PREIMAGE))
SECOND_TAIL_PREIMAGE = preimage(
    "p2pkv/chain/v1",
    (FIRST, "the key after the first segment"),
    (struct.pack("<2I", 7, 8), "the tokens 7 and 8 of the tail as u32 little endian"),
)

LAYERS = [
    {"kind": "full", "kv_heads": 2, "k_dim": 2, "v_dim": 1},
    {"kind": "full", "kv_heads": 1, "k_dim": 1, "v_dim": 1},
]
BLOCKS = [block(layer["kv_heads"], 3, layer["k_dim"], layer["v_dim"]) for layer in LAYERS]  # type: ignore[arg-type]  # the sizes are ints


def block_ref(data: bytes, heads: int) -> dict[str, Any]:
    return {
        "part": "kv",
        "heads": [0, heads],
        "cid": Link(cid(0x55, data)),
        "size": len(data),
        "raw_size": len(data),
        "digest": hashed(data),
    }


SEGMENT_PIECES = node(
    {
        "kind": "p2pkv/segment",
        "version": 1,
        "chain_key": TAIL,
        "start": 0,
        "end": 3,
        "dtype": "bf16",
        "codec": "raw",
        "layers": [[block_ref(joined(BLOCKS[0]), 2)], [block_ref(joined(BLOCKS[1]), 1)]],
    },
    {
        "kind": "what this node is",
        "version": "of this format",
        "chain_key": "the key after this segment",
        "start": "first token",
        "end": "behind the last token",
        "dtype": "element type of the decoded blocks",
        "codec": "how the blocks are coded",
        "layers": "one item per layer",
        "layers[]": "the blocks of one layer, in canonical order",
        "layers[][].part": "K and V together",
        "layers[][].heads": "range of heads",
        "layers[][].heads[]": "first head, and the one behind the last",
        "layers[][].cid": "of the coded block, raw",
        "layers[][].size": "bytes as coded",
        "layers[][].raw_size": "bytes decoded",
        "layers[][].digest": "BLAKE3-256 of the decoded bytes",
    },
)

KEY = SigningKey(SEED)
PUBLIC = bytes(KEY.verify_key)
DID = "did:key:" + multibase.encode(b"\xed\x01" + PUBLIC, "base58btc")

MANIFEST = {
    "kind": "p2pkv/manifest",
    "version": 1,
    "model": {"id": MODEL_ID, "name": "tiny"},
    "layers": LAYERS,
    "dtype": "bf16",
    "codec": "raw",
    "tokens": {"count": 3, "digest": hashed(TOKEN_BYTES), "inline": TOKEN_BYTES, "cid": None},
    "last_chain_key": TAIL,
    "segments": [Link(cid(0x71, joined(SEGMENT_PIECES)))],
    "publisher": DID,
    "sequence": 1,
    "created": 1767225600,
    "expires": 1798761600,
    "licence": "CC0-1.0",
    "producer": {"torch": "2.0"},
    "tokenizer": None,
    "aliases": {"vllm": b"\x01\x02"},
}
MANIFEST_NOTES = {
    "kind": "what this node is",
    "version": "of this format",
    "model.id": "the model id",
    "model.name": "for people",
    "layers": "geometry, one item per layer",
    "layers[].kind": "what the layer's state is",
    "layers[].kv_heads": "heads of K and of V",
    "layers[].k_dim": "values of a head of K",
    "layers[].v_dim": "values of a head of V",
    "dtype": "element type of the decoded blocks",
    "codec": "how the blocks are coded",
    "tokens.count": "tokens of the artifact",
    "tokens.digest": "BLAKE3-256 of the ids as u32 little endian",
    "tokens.inline": "the ids as u32 little endian",
    "tokens.cid": "no block of token ids, since they are inline",
    "last_chain_key": "key of the whole sequence, tail included",
    "segments": "segment nodes in order",
    "segments[]": "of a segment node, dag-cbor",
    "publisher": "whose key signs",
    "sequence": "orders the publisher's manifests",
    "created": "2026-01-01 00:00 UTC, seconds since the epoch",
    "expires": "2027-01-01 00:00 UTC, or null for never",
    "licence": "terms of use",
    "producer": "the stack that computed the values, text by name",
    "tokenizer": "digest of the tokenizer, or null",
    "aliases": "keys of other engines, bytes by name",
}
MANIFEST_PIECES = node(MANIFEST, MANIFEST_NOTES)
# What is the publisher's to say is not in the draft that was there before.
TERMS = {"publisher", "sequence", "created", "expires", "licence"}
DRAFT_PIECES = node(
    {**{name: value for name, value in MANIFEST.items() if name not in TERMS}, "kind": "p2pkv/draft"}, MANIFEST_NOTES
)
SIGNED = b"p2pkv/manifest/v1\x00" + joined(MANIFEST_PIECES)
ENVELOPE_PIECES = node(
    {
        "kind": "p2pkv/envelope",
        "version": 1,
        "payload": joined(MANIFEST_PIECES),
        "key": PUBLIC,
        "signature": KEY.sign(SIGNED).signature,
    },
    {
        "kind": "what this node is",
        "version": "of this format",
        "payload": "the manifest's bytes",
        "key": "the Ed25519 public key of the publisher",
        "signature": "Ed25519 over 'p2pkv/manifest/v1', a zero byte and the payload",
    },
)
