"""Envelopes: manifest bytes under one Ed25519 signature (``docs/spec/envelope.md``).

The CID of the encoded envelope is what this project calls a *manifest CID*: it names the manifest and its signature at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nacl.signing import SigningKey

from p2pkv.errors import ManifestError, SignatureError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import PUBLIC_KEY_BYTES, encode_did
from p2pkv.formats.fields import Fields
from p2pkv.formats.manifest import Manifest
from p2pkv.formats.signature import SIGNATURE_BYTES, verify_signature
from p2pkv.limits import MAX_NODE_BYTES

KIND: Final = "p2pkv/envelope"
VERSION: Final = 1
# The domain keeps a manifest's signature from being taken for one over anything else that the same key signs.
DOMAIN: Final = b"p2pkv/manifest/v1\x00"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Manifest bytes, the signer's public key and the signature over :data:`DOMAIN` and the manifest bytes."""

    payload: bytes
    key: bytes
    signature: bytes

    @classmethod
    def sign(cls, manifest: Manifest, key: SigningKey) -> Envelope:
        """Sign ``manifest`` with its publisher's key. Raises ManifestError where the key is not the publisher's."""
        if encode_did(bytes(key.verify_key)) != manifest.publisher:
            raise ManifestError("the key is not that of the manifest's publisher", advice="Sign with the publisher's own key.")
        payload = manifest.encode()
        Manifest.decode(payload)  # a manifest that nobody could open is not worth a signature
        return cls(payload, bytes(key.verify_key), key.sign(DOMAIN + payload).signature)

    def encode(self) -> bytes:
        return dagcbor.encode(
            {"kind": KIND, "version": VERSION, "payload": self.payload, "key": self.key, "signature": self.signature}
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Envelope:
        """Parse an envelope without judging its signature. Raises FormatError or a subclass."""
        fields = Fields(dagcbor.decode_map(data), "envelope", ManifestError)
        fields.version(KIND, VERSION)
        envelope = cls(
            fields.bytes_up_to("payload", MAX_NODE_BYTES),
            fields.fixed_bytes("key", PUBLIC_KEY_BYTES),
            fields.fixed_bytes("signature", SIGNATURE_BYTES),
        )
        fields.end()
        return envelope

    @property
    def cid(self) -> Cid:
        """The manifest CID."""
        return Cid.of_node(self.encode())

    def open(self) -> Manifest:
        """Verify the signature and return the manifest. Raises SignatureError, then what Manifest.decode raises.

        Nothing of the payload is looked at before its signature is known to be good.
        """
        verify_signature(self.key, DOMAIN + self.payload, self.signature, "the manifest")
        manifest = Manifest.decode(self.payload)
        if manifest.publisher != encode_did(self.key):
            raise SignatureError(f"the manifest names {manifest.publisher} but another key signed it")
        return manifest
