"""Ed25519 signatures (RFC 8032), verified so strictly that all readers agree.

libsodium refuses a scalar that is not reduced, keys and points R of small order, and keys in a second encoding. It takes keys
of mixed order, which lie outside of the group of prime order: eight keys belong to one secret then, and whether a signature
under one of them verifies differs from implementation to implementation
(https://hdevalence.ca/blog/2020-10-04-its-25519am). So they are refused here.
"""

from __future__ import annotations

from typing import Final

from nacl.bindings import crypto_core_ed25519_is_valid_point
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from p2pkv.errors import SignatureError

SIGNATURE_BYTES: Final = 64


def verify_signature(key: bytes, message: bytes, signature: bytes, what: str, advice: str | None = None) -> None:
    """Verify that ``signature`` (64 bytes) is one over ``message`` by the holder of ``key`` (32 bytes).

    Raises SignatureError, which names ``what`` was signed.
    """
    try:
        VerifyKey(key).verify(message, signature)
        good = crypto_core_ed25519_is_valid_point(key)
    except BadSignatureError:
        good = False
    if not good:
        raise SignatureError(f"the signature of {what} does not verify", advice=advice)
