"""Sealed bytes: what is encrypted so that only holders of a key read it, and that nobody else can make or move.

``nonce || XChaCha20-Poly1305 ciphertext || tag`` (draft-irtf-cfrg-xchacha-03), 40 bytes more than the content. The nonce is a
keyed hash of label and content, as the synthetic IV of RFC 5297 is: equal content under one key and label gives equal bytes,
and so equal CIDs, and no nonce ever meets two contents. The ``label`` says what the content is and where it belongs; sealed
bytes open under their own label alone (``docs/spec/private.md``).
"""

from __future__ import annotations

from typing import Final

from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_ABYTES as TAG_BYTES,
    crypto_aead_xchacha20poly1305_ietf_decrypt as decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt as encrypt,
    crypto_aead_xchacha20poly1305_ietf_NPUBBYTES as NONCE_BYTES,
)
from nacl.exceptions import CryptoError

from p2pkv.errors import IntegrityError
from p2pkv.formats.hashing import keyed_hash

SEAL_BYTES: Final = NONCE_BYTES + TAG_BYTES
"""How many bytes sealing adds: 40."""
_KEY_DOMAIN: Final = "p2pkv/seal-key/v1"
_NONCE_DOMAIN: Final = "p2pkv/seal-nonce/v1"


def seal(key: bytes, label: bytes, content: bytes | bytearray | memoryview) -> bytes:
    """Return ``content`` sealed under ``key`` (32 bytes) and ``label``."""
    nonce = keyed_hash(key, _NONCE_DOMAIN, label, content)[:NONCE_BYTES]
    return nonce + encrypt(bytes(content), label, nonce, keyed_hash(key, _KEY_DOMAIN))


def unseal(key: bytes, label: bytes, sealed: bytes | bytearray | memoryview) -> bytes:
    """Return the content of ``sealed``. Raises IntegrityError where it was sealed under another key or label, or changed."""
    data = bytes(sealed)
    try:
        return decrypt(data[NONCE_BYTES:], label, data[:NONCE_BYTES], keyed_hash(key, _KEY_DOMAIN))
    except (CryptoError, ValueError):  # ValueError: shorter than a nonce and a tag
        raise IntegrityError(
            "sealed bytes do not open under their key and place",
            advice="The publisher, or whoever gave the key, has mixed something up: ask for a new grant or artifact.",
        ) from None
