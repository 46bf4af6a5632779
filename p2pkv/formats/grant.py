"""Grants: a publisher lets one reader open one private artifact (``docs/spec/private.md``).

The artifact key is sealed to the reader's key: X25519 of the Ed25519 key that its ``did:key`` names, in NaCl's sealed box
(libsodium, ``crypto_box_seal``). Whoever else has the grant learns who may read which artifact, and nothing of the artifact.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Final, Self

from nacl.exceptions import CryptoError, RuntimeError as SodiumError
from nacl.public import Box, PrivateKey, SealedBox
from nacl.signing import SigningKey, VerifyKey

from p2pkv.errors import FormatError, IntegrityError, StatementError, WrongReaderError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import decode_did, encode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.hashing import DIGEST_BYTES
from p2pkv.formats.sealing import SEAL_BYTES
from p2pkv.formats.statement import Statement, StatementKind
from p2pkv.limits import MAX_SEGMENTS, MAX_TOKENS, SEGMENT_TOKENS

KEY_BYTES: Final = 32
# The ephemeral public key of 32 bytes, and the tag of 16.
SEALED_KEY_BYTES: Final = KEY_BYTES + 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant(Statement):
    """The key of the private artifact ``manifest``, sealed to ``reader`` (a did:key).

    ``start`` are the token ids of the first segment, sealed, and ``match`` holds a key for each segment: by them a reader
    finds out how much of a prompt the artifact has in common with it, without having the artifact. ``expires`` is in seconds
    since the epoch, ``None`` for never.
    """

    kind: ClassVar[StatementKind] = StatementKind.GRANT

    manifest: Cid
    reader: str
    sealed_key: bytes
    model_id: bytes
    token_count: int
    start: bytes
    match: bytes
    expires: int | None = None

    def body(self) -> dict[str, dagcbor.Value]:
        return {
            "manifest": self.manifest,
            "reader": self.reader,
            "sealed_key": self.sealed_key,
            "model_id": self.model_id,
            "token_count": self.token_count,
            "start": self.start,
            "match": self.match,
            "expires": self.expires,
        }

    @classmethod
    def read(cls, fields: Fields, publisher: str, sequence: int, created: int) -> Self:
        grant = cls(
            publisher=publisher,
            sequence=sequence,
            created=created,
            manifest=fields.link("manifest"),
            reader=fields.text("reader"),
            sealed_key=fields.fixed_bytes("sealed_key", SEALED_KEY_BYTES),
            model_id=fields.fixed_bytes("model_id", DIGEST_BYTES),
            token_count=fields.integer("token_count", 1, MAX_TOKENS),
            start=fields.bytes_up_to("start", start_bytes(MAX_TOKENS)),
            match=fields.bytes_up_to("match", MAX_SEGMENTS * DIGEST_BYTES),
            expires=fields.optional_integer("expires"),
            extra=fields.rest(),
        )
        decode_did(grant.reader)
        if len(grant.match) != -(-grant.token_count // SEGMENT_TOKENS) * DIGEST_BYTES:
            raise StatementError(f"{grant.token_count} tokens do not have the segments that the grant has keys for")
        if len(grant.start) != start_bytes(grant.token_count):
            raise StatementError(f"the grant does not have the start of {grant.token_count} tokens")
        return grant

    def artifact_key(self, reader: SigningKey) -> bytes:
        """Return the artifact key (32 bytes). Raises WrongReaderError for another reader, IntegrityError."""
        did = encode_did(bytes(reader.verify_key))
        if did != self.reader:
            raise WrongReaderError(f"the grant of {self.manifest} is for {self.reader}, and this is {did}")
        try:
            key = SealedBox(reader.to_curve25519_private_key()).decrypt(self.sealed_key)
        except CryptoError:
            raise IntegrityError(
                f"the key in the grant of {self.manifest} does not open",
                advice="The publisher sealed something else: ask for a new grant.",
            ) from None
        return bytes(key)


def start_bytes(token_count: int) -> int:
    """Return how long ``start`` is for a text of so many tokens."""
    return 4 * min(token_count, SEGMENT_TOKENS) + SEAL_BYTES


def seal_key(artifact_key: bytes, reader: str, ephemeral: bytes) -> bytes:
    """Return ``artifact_key`` (32 bytes) sealed to the did:key ``reader``.

    ``ephemeral`` are 32 bytes of chance, for this once. Raises FormatError for what is no did:key, and for a key of low order
    or off the curve, to which anybody could open what is sealed.
    """
    if len(artifact_key) != KEY_BYTES:
        raise FormatError(f"an artifact key has {KEY_BYTES} bytes, got {len(artifact_key)}")
    try:
        public = VerifyKey(decode_did(reader)).to_curve25519_public_key()
        secret = PrivateKey(ephemeral)
        box = Box(secret, public)
    except (SodiumError, CryptoError):
        raise FormatError(
            f"nothing can be sealed to {reader}", advice="Ask the reader for the did:key of a real key."
        ) from None
    shown = bytes(secret.public_key)
    nonce = blake2b(shown + bytes(public), digest_size=Box.NONCE_SIZE).digest()
    return shown + bytes(box.encrypt(artifact_key, nonce).ciphertext)
