"""The tiny artifact once more, private, and a grant of it: keyed hashes, sealed bytes, node, manifest, envelope.

XChaCha20-Poly1305 is HChaCha20 by hand (draft-irtf-cfrg-xchacha-03, section 2.2) in front of the RFC 8439 cipher of
``cryptography``; the sealed box is put together from X25519, HSalsa20 and XSalsa20-Poly1305 as libsodium describes it.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from multiformats import multibase
from nacl.bindings import crypto_box, crypto_scalarmult_base, crypto_sign_ed25519_pk_to_curve25519
from nacl.signing import SigningKey

from tests.vectors.encoding import Link, Piece, cid, hashed, joined, node, preimage
from tests.vectors.tiny import BLOCKS, DID, KEY, LAYERS, MODEL_ID, PUBLIC, TOKEN_BYTES

NAMESPACE = bytes(range(100, 132))
ARTIFACT_KEY = bytes(range(200, 232))
EPHEMERAL = bytes(range(10, 42))
READER_SEED = bytes(range(50, 82))
READER_PUBLIC = bytes(SigningKey(READER_SEED).verify_key)
READER = "did:key:" + multibase.encode(b"\xed\x01" + READER_PUBLIC, "base58btc")


def keyed(key: bytes, pieces: list[Piece]) -> bytes:
    return blake3(joined(pieces), key=key).digest()


def hchacha20(key: bytes, nonce: bytes) -> bytes:
    words = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), *struct.unpack("<4I", nonce)]

    def turn(a: int, b: int, c: int, d: int) -> None:
        for left, right, into, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            words[left] = (words[left] + words[right]) & 0xFFFFFFFF
            mixed = words[into] ^ words[left]
            words[into] = (mixed << bits | mixed >> (32 - bits)) & 0xFFFFFFFF

    for _ in range(10):
        for column in range(4):
            turn(column, 4 + column, 8 + column, 12 + column)
        for diagonal in range(4):
            turn(diagonal, 4 + (diagonal + 1) % 4, 8 + (diagonal + 2) % 4, 12 + (diagonal + 3) % 4)
    return struct.pack("<8I", *words[:4], *words[12:])


def sealed(key: bytes, label: bytes, content: bytes) -> list[Piece]:
    nonce = keyed(key, preimage("p2pkv/seal-nonce/v1", (label, ""), (content, "")))[:24]
    cipher_key = keyed(key, preimage("p2pkv/seal-key/v1"))
    data = ChaCha20Poly1305(hchacha20(cipher_key, nonce[:16])).encrypt(bytes(4) + nonce[16:], content, label)
    return [(nonce, "nonce"), (data[:-16], "ciphertext"), (data[-16:], "tag")]


ROOT_PREIMAGE = preimage("p2pkv/chain-root/v1", (MODEL_ID, "the model id"), (NAMESPACE, "the namespace"))
CHAIN_KEY = hashed(joined(preimage("p2pkv/chain/v1", (hashed(joined(ROOT_PREIMAGE)), ""), (TOKEN_BYTES, ""))))
SEGMENT_KEY_PREIMAGE = preimage("p2pkv/segment-key/v1", (CHAIN_KEY, "the chain key after the segment"))
SEGMENT_KEY = keyed(NAMESPACE, SEGMENT_KEY_PREIMAGE)
SHOWN_CHAIN_KEY = keyed(SEGMENT_KEY, preimage("p2pkv/private-chain/v1"))
PLACES = [node([layer, "kv", 0, heads, len(joined(BLOCKS[layer])), "raw"], {}) for layer, heads in ((0, 2), (1, 1))]
SEALED_BLOCKS = [sealed(SEGMENT_KEY, joined(place), joined(block)) for place, block in zip(PLACES, BLOCKS, strict=True)]


def block_ref(index: int, heads: int) -> dict[str, Any]:
    block, place, data = joined(BLOCKS[index]), joined(PLACES[index]), joined(SEALED_BLOCKS[index])
    return {
        "part": "kv",
        "heads": [0, heads],
        "cid": Link(cid(0x55, data)),
        "size": len(data),
        "raw_size": len(block),
        "digest": keyed(SEGMENT_KEY, preimage("p2pkv/private-block/v1", (place, ""), (block, ""))),
    }


PRIVATE_SEGMENT = node(
    {
        "kind": "p2pkv/segment",
        "version": 1,
        "chain_key": SHOWN_CHAIN_KEY,
        "start": 0,
        "end": 3,
        "dtype": "bf16",
        "codec": "raw",
        "layers": [[block_ref(0, 2)], [block_ref(1, 1)]],
    },
    {
        "chain_key": "keyed, in the place of the chain key",
        "layers[][].cid": "of the sealed block",
        "layers[][].size": "bytes as sealed: 40 more than coded",
        "layers[][].raw_size": "bytes decoded",
        "layers[][].digest": "keyed, of place and decoded bytes",
    },
)
SEALED_KEYS = sealed(ARTIFACT_KEY, b"p2pkv/segment-keys/v1", SEGMENT_KEY)
SEALED_TOKENS = sealed(ARTIFACT_KEY, b"p2pkv/tokens/v1", TOKEN_BYTES)
TOKEN_DIGEST = keyed(ARTIFACT_KEY, preimage("p2pkv/private-tokens/v1", (TOKEN_BYTES, "")))
PRIVATE_MANIFEST = node(
    {
        "kind": "p2pkv/manifest",
        "version": 1,
        "model": {"id": MODEL_ID, "name": "tiny"},
        "layers": LAYERS,
        "dtype": "bf16",
        "codec": "raw",
        "tokens": {"count": 3, "digest": TOKEN_DIGEST, "inline": joined(SEALED_TOKENS), "cid": None},
        "last_chain_key": SHOWN_CHAIN_KEY,
        "segments": [Link(cid(0x71, joined(PRIVATE_SEGMENT)))],
        "segment_keys": joined(SEALED_KEYS),
        "publisher": DID,
        "sequence": 1,
        "created": 1767225600,
        "expires": None,
        "licence": "",
        "producer": {},
        "tokenizer": None,
        "aliases": {},
    },
    {
        "tokens.digest": "keyed, of the token ids",
        "tokens.inline": "the token ids, sealed",
        "last_chain_key": "that of the last segment node",
        "segment_keys": "the keys of all segments, sealed",
        "aliases": "none: they would be hashes of the text",
    },
)
PRIVATE_ENVELOPE = node(
    {
        "kind": "p2pkv/envelope",
        "version": 1,
        "payload": joined(PRIVATE_MANIFEST),
        "key": PUBLIC,
        "signature": KEY.sign(b"p2pkv/manifest/v1\x00" + joined(PRIVATE_MANIFEST)).signature,
    },
    {},
)

START = sealed(ARTIFACT_KEY, b"p2pkv/start/v1", TOKEN_BYTES)
MATCH_NAMESPACE = keyed(ARTIFACT_KEY, preimage("p2pkv/match/v1"))
MATCH_ROOT = hashed(joined(preimage("p2pkv/chain-root/v1", (MODEL_ID, ""), (MATCH_NAMESPACE, ""))))
MATCH_KEY = hashed(joined(preimage("p2pkv/chain/v1", (MATCH_ROOT, ""), (TOKEN_BYTES, ""))))
READER_X25519 = crypto_sign_ed25519_pk_to_curve25519(READER_PUBLIC)
SHOWN = crypto_scalarmult_base(EPHEMERAL)
BOX_NONCE = blake2b(SHOWN + READER_X25519, digest_size=24).digest()
SEALED_ARTIFACT_KEY: list[Piece] = [
    (SHOWN, "the public half of a key used once"),
    (crypto_box(ARTIFACT_KEY, BOX_NONCE, READER_X25519, EPHEMERAL), "tag, and the artifact key encrypted"),
]
GRANT = node(
    {
        "kind": "p2pkv/grant",
        "version": 1,
        "publisher": DID,
        "sequence": 1,
        "created": 1767225600,
        "manifest": Link(cid(0x71, joined(PRIVATE_ENVELOPE))),
        "reader": READER,
        "sealed_key": joined(SEALED_ARTIFACT_KEY),
        "model_id": MODEL_ID,
        "token_count": 3,
        "start": joined(START),
        "match": MATCH_KEY,
        "expires": 1798761600,
    },
    {
        "manifest": "the artifact that may be opened",
        "reader": "who may open it",
        "sealed_key": "the artifact key in a sealed box",
        "model_id": "that of the manifest",
        "token_count": "that of the manifest",
        "start": "the token ids of the first segment, sealed",
        "match": "32 bytes for each segment",
        "expires": "seconds since the epoch, or null for never",
    },
)
SIGNED_GRANT = node(
    {
        "kind": "p2pkv/statement",
        "version": 1,
        "statement": "grant",
        "payload": joined(GRANT),
        "key": PUBLIC,
        "signature": KEY.sign(b"p2pkv/grant/v1\x00" + joined(GRANT)).signature,
    },
    {"statement": "what kind of statement it is", "payload": "the grant"},
)
PRIVATE: list[tuple[str, str, list[Piece], dict[str, str]]] = [
    (
        "segment key",
        "what is hashed with the namespace as the key; `digest` is the key of the segment",
        SEGMENT_KEY_PREIMAGE,
        {"key": NAMESPACE.hex(), "digest": SEGMENT_KEY.hex()},
    ),
    ("place", "of the first block: the label that it is sealed under", PLACES[0], {}),
    ("block", "the block of layer 0 of blocks.json, sealed in its place", SEALED_BLOCKS[0], {"key": SEGMENT_KEY.hex()}),
    ("tokens", "the token ids, sealed under the artifact key", SEALED_TOKENS, {"key": ARTIFACT_KEY.hex()}),
    ("segment keys", "the one segment key, sealed under the artifact key", SEALED_KEYS, {"key": ARTIFACT_KEY.hex()}),
    ("segment", "the segment of segment.json, private", PRIVATE_SEGMENT, {}),
    ("manifest", "the manifest of it", PRIVATE_MANIFEST, {}),
    ("envelope", "that manifest, signed by the key in did-key.json", PRIVATE_ENVELOPE, {}),
    (
        "sealed key",
        "the artifact key, sealed to the reader with the key `ephemeral`",
        SEALED_ARTIFACT_KEY,
        {"ephemeral": EPHEMERAL.hex(), "reader_seed": READER_SEED.hex()},
    ),
    ("grant", "of that envelope to the reader", GRANT, {}),
    ("signed grant", "that grant, as it is given", SIGNED_GRANT, {}),
]
