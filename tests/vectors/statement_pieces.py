"""Statements by hand: payloads, and the signed form around each, under the key of ``tiny.py``."""

from __future__ import annotations

from typing import Any

from multiformats import multibase
from nacl.signing import SigningKey

from tests.vectors.encoding import Link, Piece, cid, joined, node
from tests.vectors.tiny import DID, ENVELOPE_PIECES, KEY, MODEL_ID, PUBLIC

SUCCESSOR = SigningKey(bytes(range(32, 64)))
SUCCESSOR_PUBLIC = bytes(SUCCESSOR.verify_key)
SUCCESSOR_DID = "did:key:" + multibase.encode(b"\xed\x01" + SUCCESSOR_PUBLIC, "base58btc")
MANIFEST = Link(cid(0x71, joined(ENVELOPE_PIECES)))
CREATED = 1767312000
HEAD_NOTES = {
    "kind": "what this node is",
    "version": "of this format",
    "publisher": "whose key signs",
    "sequence": "orders the publisher's statements of this kind",
    "created": "2026-01-02 00:00 UTC, seconds since the epoch",
}
SIGNED_NOTES = {
    "kind": "what this node is",
    "version": "of this format",
    "statement": "which kind of statement, and so which domain",
    "payload": "the statement's bytes",
    "key": "the Ed25519 public key of the publisher",
}


def payload(kind: str, body: dict[str, Any], notes: dict[str, str]) -> list[Piece]:
    head = {"kind": f"p2pkv/{kind}", "version": 1, "publisher": DID, "sequence": 1, "created": CREATED}
    return node({**head, **body}, {**HEAD_NOTES, **notes})


def signed(kind: str, content: bytes, key: SigningKey = KEY, domain: bytes | None = None, **changes: Any) -> list[Piece]:
    domain = f"p2pkv/{kind}/v1".encode() + b"\x00" if domain is None else domain
    note = f"Ed25519 over 'p2pkv/{kind}/v1', a zero byte and the payload"
    fields = {
        "kind": "p2pkv/statement",
        "version": 1,
        "statement": kind,
        "payload": content,
        "key": bytes(key.verify_key),
        "signature": key.sign(domain + content).signature,
    }
    return node(fields | changes, {**SIGNED_NOTES, "signature": note})


REVOCATIONS_BODY = {
    "items": [
        {"manifest": MANIFEST, "reason": "made with the wrong tokenizer"},
        {"model": MODEL_ID, "reason": ""},
        {"before": 7, "reason": "the machine that made them was not ours alone"},
    ]
}
REVOCATIONS = payload(
    "revocations",
    REVOCATIONS_BODY,
    {
        "items": "what is taken back, in the order in which it was",
        "items[].manifest": "one artifact",
        "items[].model": "all that is of this model id",
        "items[].before": "all with a lower sequence number",
        "items[].reason": "for people",
    },
)
CONSENT_SIGNED = b"p2pkv/succession-consent/v1\x00" + PUBLIC + SUCCESSOR_PUBLIC
CONSENT_TO_ITSELF = b"p2pkv/succession-consent/v1\x00" + PUBLIC + PUBLIC
SUCCESSION_BODY = {
    "successor": SUCCESSOR_DID,
    "last": 12,
    "reason": "yearly change of keys",
    "consent": SUCCESSOR.sign(CONSENT_SIGNED).signature,
}
SUCCESSION = payload(
    "succession",
    SUCCESSION_BODY,
    {
        "successor": "whose key signs from now on",
        "last": "the last sequence number of a manifest that the old key signed",
        "reason": "for people",
        "consent": "Ed25519 by the successor over 'p2pkv/succession-consent/v1', a zero byte, the old key and its own",
    },
)

STATEMENTS: list[tuple[str, str, list[Piece]]] = [
    ("revocations, payload", "a list of three items", REVOCATIONS),
    ("revocations", "that list, signed", signed("revocations", joined(REVOCATIONS))),
    ("succession, payload", "the key of the seed 20 21 22 ... 3f follows", SUCCESSION),
    ("succession", "that succession, signed", signed("succession", joined(SUCCESSION))),
]


def _revocations(**body: Any) -> bytes:
    content = joined(payload("revocations", body, {}))
    return joined(signed("revocations", content))


def _succession(**changes: Any) -> bytes:
    content = joined(payload("succession", {**SUCCESSION_BODY, **changes}, {}))
    return joined(signed("succession", content))


_LIST = joined(REVOCATIONS)
_ITEM = {"manifest": MANIFEST, "reason": ""}
REFUSED_STATEMENTS: list[tuple[str, bytes]] = [
    ("signed as a manifest", joined(signed("revocations", _LIST, domain=b"p2pkv/manifest/v1\x00"))),
    ("signed as a succession", joined(signed("revocations", _LIST, domain=b"p2pkv/succession/v1\x00"))),
    ("said to be of another kind", joined(signed("revocations", _LIST, statement="succession"))),
    ("of an unknown kind", joined(signed("revocations", _LIST, statement="wishes"))),
    ("signed by another key", joined(signed("revocations", _LIST, key=SUCCESSOR))),
    ("with a field more", joined(signed("revocations", _LIST, more=1))),
    ("version 2", joined(signed("revocations", _LIST, version=2))),
    ("sequence 0", _revocations(items=[], sequence=0)),
    ("an item of nothing", _revocations(items=[{"reason": ""}])),
    ("an item of two things", _revocations(items=[{**_ITEM, "before": 1}])),
    ("an item without a reason", _revocations(items=[{"before": 1}])),
    ("an item before 0", _revocations(items=[{"before": 0, "reason": ""}])),
    ("one thing twice", _revocations(items=[_ITEM, {**_ITEM, "reason": "again"}])),
    ("a model id of 31 bytes", _revocations(items=[{"model": bytes(31), "reason": ""}])),
    ("a successor that did not consent", _succession(consent=KEY.sign(CONSENT_SIGNED).signature)),
    ("a consent to follow another key", _succession(consent=SUCCESSOR.sign(CONSENT_SIGNED[:-1] + b"\x00").signature)),
    ("a key that follows itself", _succession(successor=DID, consent=KEY.sign(CONSENT_TO_ITSELF).signature)),
]
