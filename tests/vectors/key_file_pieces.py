"""A publisher's key file, in the open and under a passphrase: lines of text, made with PyNaCl alone."""

from __future__ import annotations

from nacl.pwhash import argon2id
from nacl.secret import SecretBox

from tests.vectors.encoding import Piece
from tests.vectors.tiny import DID, SEED

PASSPHRASE = "correct horse battery staple"  # noqa: S105  # of a vector
# As cheap as libsodium does it at all: a vector is to be checked, not to be kept.
OPERATIONS, MEMORY = 1, 8192
SALT = bytes(range(0x10, 0x20))
NONCE = bytes(range(0x20, 0x38))

_BOX_KEY = argon2id.kdf(32, PASSPHRASE.encode(), SALT, opslimit=OPERATIONS, memlimit=MEMORY)
_SEALED = bytes(SecretBox(_BOX_KEY).encrypt(SEED, NONCE))


def _head() -> list[Piece]:
    return [(b"p2pkv publisher key v1\n", "what this is, and its version"), (f"{DID}\n".encode(), "whose key it is")]


PLAIN = [*_head(), (f"seed {SEED.hex()}\n".encode(), "the Ed25519 seed")]
ENCRYPTED = [
    *_head(),
    (f"argon2id {OPERATIONS} {MEMORY} {SALT.hex()}\n".encode(), "passes, bytes of memory, and the salt"),
    (f"secretbox {_SEALED.hex()}\n".encode(), "nonce, tag and ciphertext of the seed"),
]
