"""``did:key`` names of publishers: Ed25519 public keys in multibase base58btc (``docs/spec/did-key.md``).

Source: https://w3c-ccg.github.io/did-key-spec/ (multicodec ed25519-pub, 0xed01).
"""

from __future__ import annotations

from typing import Final

from p2pkv.errors import FormatError

PUBLIC_KEY_BYTES: Final = 32
_PREFIX: Final = "did:key:z"
_ED25519_PUB: Final = b"\xed\x01"
_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# 34 bytes that begin with 0xed give 47 characters; a text of another length is not worth decoding.
_TEXT_LENGTH: Final = len(_PREFIX) + 47


def encode_did(public_key: bytes) -> str:
    """Return ``did:key:z6Mk...`` of a 32-byte Ed25519 public key. Raises FormatError for another length."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise FormatError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, got {len(public_key)}")
    number = int.from_bytes(_ED25519_PUB + public_key, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return _PREFIX + digits


def decode_did(text: str) -> bytes:
    """Return the 32-byte Ed25519 public key that ``text`` names. Raises FormatError."""
    advice = "A publisher is named did:key:z6Mk... as `p2pkv keygen` prints it."
    if not text.startswith(_PREFIX) or len(text) != _TEXT_LENGTH:
        raise FormatError(f"not a did:key of an Ed25519 key: {text[:80]!r}", advice=advice)
    number = 0
    for character in text[len(_PREFIX) :]:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise FormatError(f"not base58: {text!r}", advice=advice)
        number = number * 58 + digit
    size = len(_ED25519_PUB) + PUBLIC_KEY_BYTES
    if number.bit_length() > 8 * size:
        raise FormatError(f"not a did:key of an Ed25519 key: {text!r}", advice=advice)
    data = number.to_bytes(size, "big")
    if not data.startswith(_ED25519_PUB) or encode_did(data[2:]) != text:
        raise FormatError(f"not a did:key of an Ed25519 key: {text!r}", advice=advice)
    return data[2:]
