"""A tiny valid artifact under a fixed key, the same as in ``tests/vectors/``: two layers, three tokens, one segment."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from nacl.signing import SigningKey

from p2pkv import keys
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Manifest, Tokens
from p2pkv.formats.segment import BlockRef, Segment
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind, layer_parts

KEY = SigningKey(bytes(range(32)))
OTHER_KEY = SigningKey(bytes(range(32, 64)))
PUBLISHER = encode_did(bytes(KEY.verify_key))
OTHER_PUBLISHER = encode_did(bytes(OTHER_KEY.verify_key))

TOKEN_IDS = [1, 2, 70000]
DTYPE = Dtype.BF16
LAYERS = (LayerGeometry(LayerKind.FULL, 2, 2, 1), LayerGeometry(LayerKind.FULL, 1, 1, 1))
MODEL_ID = keys.model_id(
    {"architecture": "tiny", "layers": 2, "norm_eps": "1e-05", "rope_theta": 10000},
    digest(b"weights"),
    compute_dtype=DTYPE,
    kv_dtype=DTYPE,
)
CREATED = 1_767_225_600
EXPIRES = 1_798_761_600


def layer_block(geometry: LayerGeometry, tokens: int = len(TOKEN_IDS)) -> bytes:
    """Return K and then V in bf16; the value of head h, token t, dimension d is 100 h + 10 t + d, negative in V."""
    rows = bytearray()
    for sign, dims in ((1, geometry.k_dim), (-1, geometry.v_dim)):
        for head in range(geometry.kv_heads):
            for token in range(tokens):
                for dim in range(dims):
                    rows += struct.pack("<f", sign * (100 * head + 10 * token + dim))[2:]
    return bytes(rows)


BLOCKS = tuple(layer_block(geometry) for geometry in LAYERS)


def segment(**changes: Any) -> Segment:
    """Return the segment over :data:`BLOCKS`, with fields replaced by ``changes``."""
    layers = tuple(
        (BlockRef(layer_parts(geometry, len(TOKEN_IDS), DTYPE)[0], Cid.of_block(block), len(block), digest(block)),)
        for geometry, block in zip(LAYERS, BLOCKS, strict=True)
    )
    base = Segment(
        chain_key=keys.chain(MODEL_ID, TOKEN_IDS).last,
        start=0,
        end=len(TOKEN_IDS),
        dtype=DTYPE,
        codec="raw",
        layers=layers,
    )
    return replace(base, **changes)


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of :func:`segment`, with fields replaced by ``changes``."""
    tokens = keys.encode_tokens(TOKEN_IDS)
    base = Manifest(
        model_id=MODEL_ID,
        model_name="tiny",
        layers=LAYERS,
        dtype=DTYPE,
        codec="raw",
        tokens=Tokens(len(TOKEN_IDS), digest(tokens), tokens, None),
        last_chain_key=keys.chain(MODEL_ID, TOKEN_IDS).last,
        segments=(Cid.of_node(segment().encode()),),
        publisher=PUBLISHER,
        sequence=1,
        created=CREATED,
        expires=EXPIRES,
        licence="CC0-1.0",
        producer={"torch": "2.0"},
        aliases={"vllm": b"\x01\x02"},
    )
    return replace(base, **changes)


def envelope(signed: Manifest | None = None) -> Envelope:
    """Return ``signed``, by default :func:`manifest`, under the signature of :data:`KEY`."""
    return Envelope.sign(manifest() if signed is None else signed, KEY)
