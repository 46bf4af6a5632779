"""Write the golden vectors: ``python -m tests.vectors.make`` from the project's root.

This is a second, slow implementation of every format, which imports nothing of p2pkv. A test builds all of it again and
compares it with the files, so that neither can change alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multiformats import multibase
from nacl.signing import SigningKey

from tests.vectors.encoding import Link, Piece, cid, cid_text, hashed, joined, node, preimage
from tests.vectors.form import hash_vector, refused, render, vector
from tests.vectors.key_file_pieces import ENCRYPTED, PASSPHRASE, PLAIN
from tests.vectors.private_pieces import ARTIFACT_KEY, NAMESPACE, PRIVATE
from tests.vectors.statement_pieces import REFUSED_STATEMENTS, STATEMENTS
from tests.vectors.tiny import (
    BLOCKS,
    CONFIG_JSON,
    DESCRIBED_PIECES,
    DID,
    DRAFT_PIECES,
    ENVELOPE_PIECES,
    LAYERS,
    MANIFEST,
    MANIFEST_PIECES,
    MODEL_CONFIG,
    MODEL_ID,
    MODEL_PREIMAGE,
    PUBLIC,
    ROOT_PREIMAGE,
    SECOND_TAIL_PREIMAGE,
    SEED,
    SEGMENT_PIECES,
    TAIL,
    TAIL_PREIMAGE,
    TERMS,
    TOKENS,
    WEIGHTS,
    WEIGHTS_PREIMAGE,
    WHOLE_PREIMAGE,
)
from tests.vectors.values import cid_file, dag_cbor_file
from tests.vectors.wire import FRAMES, GREETING, LANE, PEER_ID, REFUSED, SKIPPED, TOLERATED

FOLDER = Path(__file__).parent
# The seed of the first test of RFC 8032, section 7.1.
RFC_8032_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")


def keys_file() -> dict[str, Any]:
    private = preimage("p2pkv/chain-root/v1", (MODEL_ID, "the model id"), (b"secret", "the namespace"))
    dht = preimage("p2pkv/dht/v1", (TAIL, "the chain key"))
    publisher = preimage("p2pkv/publisher/v1", (PUBLIC, "the publisher's Ed25519 public key"))
    return {
        "about": "Preimages of the hashes; `digest` is BLAKE3-256 of the pieces.",
        "vectors": [
            hash_vector(
                "model id",
                "of a made-up config and weights digest",
                MODEL_PREIMAGE,
                config=MODEL_CONFIG,
                weights=hashed(b"weights").hex(),
                dtype="bf16",
            ),
            hash_vector("chain root", "chain[0] of public content", ROOT_PREIMAGE),
            hash_vector("chain root, private", "chain[0] under the namespace 'secret'", private),
            hash_vector("tail of a short text", "the only key of a text of three tokens", TAIL_PREIMAGE, tokens=TOKENS),
            hash_vector("first segment", "chain[1] of a text that begins with the tokens 0 to 255", WHOLE_PREIMAGE),
            hash_vector("tail behind a segment", "last key of the tokens 0 to 255, 7, 8", SECOND_TAIL_PREIMAGE),
            hash_vector(
                "publisher key",
                "where what the publisher of envelope.json says of itself is found",
                publisher,
                multihash="1e20" + hashed(joined(publisher)).hex(),
            ),
            hash_vector("dht key", "`multihash` is what the DHT sees", dht, multihash="1e20" + hashed(joined(dht)).hex()),
        ],
    }


def model_id_file() -> dict[str, Any]:
    tensors = [[name, dtype, list(shape), data.hex()] for name, dtype, shape, data in WEIGHTS]
    return {
        "about": "What the model id of a checkpoint folder is made of.",
        "vectors": [
            hash_vector("weights digest", "of `tensors`: name, dtype, shape, bytes", WEIGHTS_PREIMAGE, tensors=tensors),
            vector("config description", "of the `config` of a checkpoint", DESCRIBED_PIECES, config=CONFIG_JSON),
        ],
    }


def part(name: str, start: int, end: int, size: int) -> list[Any]:
    return [name, start, end, size]


def blocks_file() -> dict[str, Any]:
    mib = 1 << 20
    cuts: list[tuple[str, dict[str, int], int, str, list[list[Any]]]] = [
        ("K and V fit", {"kv_heads": 3, "k_dim": 64, "v_dim": 64}, 256, "bf16", [part("kv", 0, 3, 196608)]),
        ("K and V fill a block", {"kv_heads": 8, "k_dim": 128, "v_dim": 128}, 256, "bf16", [part("kv", 0, 8, mib)]),
        (
            "K and V each fill a block",
            {"kv_heads": 8, "k_dim": 128, "v_dim": 128},
            256,
            "fp32",
            [part("k", 0, 8, mib), part("v", 0, 8, mib)],
        ),
        (
            "ranges of heads",
            {"kv_heads": 9, "k_dim": 128, "v_dim": 64},
            256,
            "fp32",
            [part("k", 0, 8, mib), part("k", 8, 9, mib // 8), part("v", 0, 9, 9 * mib // 16)],
        ),
    ]
    return {
        "about": "Neutral tensors of three tokens in bf16, and how layers are cut: part, first head, end of heads, bytes.",
        "vectors": [
            vector(f"layer {index}", f"geometry {json.dumps(LAYERS[index])}", pieces, cid=cid_text(cid(0x55, joined(pieces))))
            for index, pieces in enumerate(BLOCKS)
        ],
        "cuts": [
            {"name": name, **geometry, "tokens": tokens, "dtype": dtype, "parts": parts}
            for name, geometry, tokens, dtype, parts in cuts
        ],
    }


def segment_file() -> dict[str, Any]:
    cid_here = cid_text(cid(0x71, joined(SEGMENT_PIECES)))
    comment = "the only segment of a text of three tokens, over the blocks of blocks.json"
    return {"about": "A segment node.", "vectors": [vector("tiny", comment, SEGMENT_PIECES, cid=cid_here)]}


def manifest_file() -> dict[str, Any]:
    comment = "of the segment in segment.json, published by the key in did-key.json"
    return {"about": "A manifest.", "vectors": [vector("tiny", comment, MANIFEST_PIECES)]}


def draft_file() -> dict[str, Any]:
    def changed(**fields: Any) -> str:
        content = {**{name: value for name, value in MANIFEST.items() if name not in TERMS}, "kind": "p2pkv/draft", **fields}
        return joined(node({name: value for name, value in content.items() if value != "absent"}, {})).hex()

    return {
        "about": "A draft. `cid` is that of its bytes.",
        "vectors": [
            vector("tiny", "of the manifest in manifest.json", DRAFT_PIECES, cid=cid_text(cid(0x71, joined(DRAFT_PIECES))))
        ],
        "refused": [
            refused("the manifest itself", joined(MANIFEST_PIECES).hex()),
            refused("a publisher", changed(publisher=DID)),
            refused("a sequence number", changed(sequence=1)),
            refused("an expiry that is null", changed(expires=None)),
            refused("a tokenizer that is left out", changed(tokenizer="absent")),
            refused("version 2", changed(version=2)),
            refused("no segments", changed(segments=[])),
        ],
    }


def key_file() -> dict[str, Any]:
    return {
        "about": "Key files, whole. `seed` is the key in them, `passphrase` opens the encrypted one.",
        "vectors": [
            vector("plain", "in the open", PLAIN, seed=SEED.hex(), did=DID),
            vector("encrypted", "under a passphrase", ENCRYPTED, seed=SEED.hex(), did=DID, passphrase=PASSPHRASE),
        ],
    }


def envelope_file() -> dict[str, Any]:
    cid_here = cid_text(cid(0x71, joined(ENVELOPE_PIECES)))
    comment = "the manifest of manifest.json under its signature"
    return {
        "about": "An envelope. `seed` makes the secret key; `cid` is the manifest CID.",
        "vectors": [vector("tiny", comment, ENVELOPE_PIECES, seed=SEED.hex(), cid=cid_here)],
    }


def section(comment: str, codec: int, data: bytes) -> list[Piece]:
    """Return one section of a CAR: its length as unsigned LEB128 (up to 16,383 here), CID and block."""
    length = 36 + len(data)
    varint = bytes((length,)) if length < 128 else bytes((length & 127 | 128, length >> 7))
    name = "raw" if codec == 0x55 else "dag-cbor"
    return [
        (varint, f"length of the section: {length}"),
        (cid(codec, data), f"CID, {name}"),
        (data, comment),
    ]


def car_file() -> dict[str, Any]:
    segment, envelope = joined(SEGMENT_PIECES), joined(ENVELOPE_PIECES)
    header = node(
        {"roots": [Link(cid(0x71, envelope))], "version": 1}, {"roots": "one for each root", "roots[]": "of the envelope"}
    )
    pieces: list[Piece] = [(bytes((len(joined(header)),)), f"length of the header: {len(joined(header))}"), *header]
    pieces += section("the envelope of envelope.json", 0x71, envelope)
    pieces += section("the segment node of segment.json", 0x71, segment)
    for index, block in enumerate(BLOCKS):
        pieces += section(f"the block of layer {index} of blocks.json", 0x55, joined(block))
    return {
        "about": "An artifact as CAR v1. `root` is the manifest CID.",
        "vectors": [vector("tiny", "the artifact of envelope.json", pieces, root=cid_text(cid(0x71, envelope)))],
    }


def did_file() -> dict[str, Any]:
    vectors = []
    for name, seed in (("sample", SEED), ("RFC 8032", RFC_8032_SEED)):
        key = bytes(SigningKey(seed).verify_key)
        pieces = [(b"\xed\x01", "multicodec ed25519-pub as varint"), (key, "Ed25519 public key")]
        text = "did:key:" + multibase.encode(joined(pieces), "base58btc")
        vectors.append(vector(name, "", pieces, seed=seed.hex(), did=text))
    x25519 = "did:key:" + multibase.encode(b"\xec\x01" + PUBLIC, "base58btc")
    short = "did:key:" + multibase.encode(b"\xed\x01" + PUBLIC[:-1], "base58btc")
    long = "did:key:" + multibase.encode(b"\xed\x01" + PUBLIC + b"\x00", "base58btc")
    return {
        "about": "Names of publishers. The pieces are what base58btc encodes, `did` is the name.",
        "vectors": vectors,
        "refused": [
            {"name": name, "did": text}
            for name, text in (
                ("empty", ""),
                ("no did", DID.removeprefix("did:key:")),
                ("another method", DID.replace("key", "web")),
                ("base64url instead of base58btc", "did:key:u" + base64.urlsafe_b64encode(b"\xed\x01" + PUBLIC).decode()),
                ("X25519 key", x25519),
                ("31 bytes", short),
                ("33 bytes", long),
                ("character outside base58", DID[:-1] + "0"),
                ("leading zero digit", DID.replace(":z", ":z1")),
                ("last character missing", DID[:-1]),
                ("space behind", DID + " "),
                ("fragment", DID + "#" + DID[8:]),
                ("largest number of 47 digits", "did:key:z" + "z" * 47),
            )
        ],
    }


def exchange_file() -> dict[str, Any]:
    greeting = vector(
        "bulk lane, consumer's greeting",
        "the first bytes inside TLS, for the offer of 'bulk-offer', by the peer whose secret key `seed` makes",
        GREETING,
        seed=SEED.hex(),
        peer_id=PEER_ID,
    )
    frames, lane = ([vector(*entry) for entry in entries] for entries in (FRAMES, LANE))
    return {
        "about": "Frames of the exchange, and bytes of the bulk lane. `refused`: either end refuses the frame. `skipped`: it "
        "is passed over in silence. `tolerated`: it means the same as the vector that it names.",
        "vectors": [*frames, greeting, *lane],
        "refused": [refused(name, data.hex()) for name, data in REFUSED],
        "skipped": [refused(name, data.hex()) for name, data in SKIPPED],
        "tolerated": [{**refused(name, data.hex()), "vector": same} for name, data, same in TOLERATED],
    }


def statements_file() -> dict[str, Any]:
    return {
        "about": "Signed statements, each behind its payload. `seed` makes the key of the publisher, which is that of "
        "envelope.json. `refused` are signed statements that no reader may obey.",
        "vectors": [vector(name, comment, pieces, seed=SEED.hex()) for name, comment, pieces in STATEMENTS],
        "refused": [refused(name, data.hex()) for name, data in REFUSED_STATEMENTS],
    }


def private_file() -> dict[str, Any]:
    return {
        "about": "The artifact of envelope.json, private in `namespace` and under `artifact_key`, and a grant of it.",
        "namespace": NAMESPACE.hex(),
        "artifact_key": ARTIFACT_KEY.hex(),
        "vectors": [vector(name, comment, pieces, **more) for name, comment, pieces, more in PRIVATE],
    }


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "cid.json": cid_file,
    "dag-cbor.json": dag_cbor_file,
    "keys.json": keys_file,
    "model-id.json": model_id_file,
    "blocks.json": blocks_file,
    "segment.json": segment_file,
    "manifest.json": manifest_file,
    "envelope.json": envelope_file,
    "draft.json": draft_file,
    "car.json": car_file,
    "key-file.json": key_file,
    "did-key.json": did_file,
    "exchange.json": exchange_file,
    "statements.json": statements_file,
    "private.json": private_file,
}


def main() -> None:
    for name, build in FILES.items():
        (FOLDER / name).write_text(render(build()), encoding="utf-8")


if __name__ == "__main__":
    main()
