"""What a consumer says first on a bulk lane (``docs/spec/exchange.md``), and how the provider knows who says it.

::

    MAGIC (8 bytes), token (32), signature (64): Ed25519 over DOMAIN, the fingerprint of the offer (32) and its token

The signature is by the key in the consumer's peer id, so that a token is good for the peer that it was made for and nobody
else. The fingerprint ties it to one run of one provider.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final, TypeAlias

from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from p2pkv.ports import BulkOffer
from p2pkv_node.bulk_wire import MAGIC

Signer: TypeAlias = Callable[[bytes], bytes]
"""Returns the Ed25519 signature (64 bytes) of a message by the node's own key."""

# The domain keeps the signature from being taken for one over anything else that the same key signs.
DOMAIN: Final = b"p2pkv/bulk-lane/v1\x00"
TOKEN_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
GREETING_BYTES: Final = len(MAGIC) + TOKEN_BYTES + SIGNATURE_BYTES


def make_greeting(offer: BulkOffer, sign: Signer) -> bytes:
    """Return the greeting that takes ``offer`` up."""
    return MAGIC + offer.token + sign(_signed(offer))


def token_of(greeting: bytes) -> bytes:
    """Return the token in ``GREETING_BYTES`` bytes, which may be anybody's."""
    return greeting[len(MAGIC) : -SIGNATURE_BYTES]


def takes_up(greeting: bytes, offer: BulkOffer, key: VerifyKey) -> bool:
    """Return whether ``GREETING_BYTES`` bytes are a greeting for ``offer`` that the holder of ``key`` signed."""
    said, signature = greeting[:-SIGNATURE_BYTES], greeting[-SIGNATURE_BYTES:]
    if not hmac.compare_digest(said, MAGIC + offer.token):
        return False
    try:
        key.verify(_signed(offer), signature)
    except BadSignatureError:
        return False
    return True


def _signed(offer: BulkOffer) -> bytes:
    return DOMAIN + offer.fingerprint + offer.token
