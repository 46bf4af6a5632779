"""The node's libp2p identity: an Ed25519 key pair that follows from 32 secret bytes.

Whoever calls keeps the bytes (``p2pkv.store`` writes the file); nothing here touches the disk or a log.
"""

from __future__ import annotations

from typing import Final

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from p2pkv.errors import KeyFileError
from p2pkv.ports import PeerId

SEED_BYTES: Final = 32


def key_pair_from_seed(seed: bytes) -> KeyPair:
    """Return the key pair of a node whose secret is ``seed`` (32 bytes). Raises KeyFileError for any other length."""
    if len(seed) != SEED_BYTES:
        raise KeyFileError(f"A node's seed is {SEED_BYTES} bytes, not {len(seed)}.")
    return create_new_key_pair(seed)


def peer_id_from_seed(seed: bytes) -> PeerId:
    """Return the peer id (base58) of the node whose secret is ``seed``. Raises KeyFileError."""
    return ID.from_pubkey(key_pair_from_seed(seed).public_key).to_base58()
