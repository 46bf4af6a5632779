"""The node's libp2p identity: an Ed25519 key pair that follows from 32 secret bytes.

Whoever calls keeps the bytes (``p2pkv.store`` writes the file); nothing here touches the disk or a log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID
from nacl.signing import VerifyKey

from p2pkv.errors import KeyFileError
from p2pkv.ports import PeerId

SEED_BYTES: Final = 32
_KEY_BYTES: Final = 32
# In front of the key in a peer id that carries one: identity multihash of 36 bytes, and in it a protobuf message with type
# Ed25519 and 32 bytes of data (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).
_CARRIED_ED25519: Final = bytes.fromhex("0024 0801 1220")


def key_pair_from_seed(seed: bytes) -> KeyPair:
    """Return the key pair of a node whose secret is ``seed`` (32 bytes). Raises KeyFileError for any other length."""
    if len(seed) != SEED_BYTES:
        raise KeyFileError(f"A node's seed is {SEED_BYTES} bytes, not {len(seed)}.")
    return create_new_key_pair(seed)


def peer_id_from_seed(seed: bytes) -> PeerId:
    """Return the peer id (base58) of the node whose secret is ``seed``. Raises KeyFileError."""
    return ID.from_pubkey(key_pair_from_seed(seed).public_key).to_base58()


def signer_from_seed(seed: bytes) -> Callable[[bytes], bytes]:
    """Return what signs messages (Ed25519, 64 bytes) for the node whose secret is ``seed``. Raises KeyFileError.

    The secret is not in its repr.
    """
    return key_pair_from_seed(seed).private_key.sign


def verify_key_of(peer_id: PeerId) -> VerifyKey | None:
    """Return the Ed25519 key that ``peer_id`` carries; ``None`` for one that carries none, or of another kind."""
    try:
        multihash = ID.from_base58(peer_id).to_bytes()
    except ValueError:  # not base58
        return None
    prefix, key = multihash[: len(_CARRIED_ED25519)], multihash[len(_CARRIED_ED25519) :]
    return VerifyKey(key) if prefix == _CARRIED_ED25519 and len(key) == _KEY_BYTES else None
