"""The frames of the exchange and the bytes of the bulk lane, by hand: the sample artifact of ``tiny.py`` on its way."""

from __future__ import annotations

import struct
from typing import Any

from multiformats import multibase

from tests.vectors.encoding import Link, Piece, cid, joined, node
from tests.vectors.statement_pieces import STATEMENTS
from tests.vectors.tiny import BLOCKS, ENVELOPE_PIECES, KEY, PUBLIC, TAIL

MANIFEST_CID = cid(0x71, joined(ENVELOPE_PIECES))
PAYLOADS = [joined(pieces) for pieces in BLOCKS]
BLOCK_CIDS = [cid(0x55, payload) for payload in PAYLOADS]
TOKEN = bytes(range(32))
FINGERPRINT = bytes(range(32, 64))
MAGIC = b"p2pkvBL1"
# An identity multihash of 36 bytes around a protobuf message: type 1 (Ed25519), data of 32 bytes.
PEER_ID = multibase.encode(bytes.fromhex("0024 0801 1220") + PUBLIC, "base58btc").removeprefix("z")
LANE_SIGNED = b"p2pkv/bulk-lane/v1\x00" + FINGERPRINT + TOKEN

LIST, SUCCESSION = (joined(pieces) for name, _, pieces in STATEMENTS if name in ("revocations", "succession"))

CODES = {
    "hello": 0x01,
    "query": 0x10,
    "matches": 0x11,
    "ask-statements": 0x12,
    "statements": 0x13,
    "want": 0x20,
    "block": 0x21,
    "dont-have": 0x22,
    "have": 0x23,
    "cancel": 0x24,
    "bulk-request": 0x30,
    "bulk-offer": 0x31,
    "bulk-closed": 0x32,
    "error": 0x7F,
}


def header(code: int, length: int) -> bytes:
    return struct.pack(">IB", length, code)


def frame(kind: str, body: list[Piece]) -> list[Piece]:
    length, code = len(joined(body)), CODES[kind]
    return [
        (struct.pack(">I", length), f"length of the body: {length} as u32 big endian"),
        (bytes((code,)), f"type 0x{code:02x}: {kind}"),
        *body,
    ]


def map_frame(kind: str, value: dict[str, Any], notes: dict[str, str] | None = None) -> list[Piece]:
    return frame(kind, node(value, notes or {}))


def cid_frame(kind: str, *cids: bytes) -> list[Piece]:
    return frame(kind, [(binary, "binary CID") for binary in cids])


HELLO_NOTES = {"version": "of the messages", "agent": "software, for people", "features[]": "it can use the bulk lane"}
MATCH = {"manifest": Link(MANIFEST_CID), "matched": 1, "segments": 1, "held": b"\x01"}
OFFER = {"port": 4002, "token": TOKEN, "fingerprint": FINGERPRINT}
OFFER_NOTES = {
    "port": "TCP port at the address of this connection",
    "token": "one-time token",
    "fingerprint": "SHA-256 of the TLS certificate (DER)",
}

# Name, comment, type, pieces; the names are those of the messages.
FRAMES: list[tuple[str, str, list[Piece]]] = [
    (
        "hello",
        "first frame of each side",
        map_frame("hello", {"version": 1, "agent": "p2pkv/1", "features": ["bulk"]}, HELLO_NOTES),
    ),
    ("hello without features", "", map_frame("hello", {"version": 1, "agent": "", "features": []}, HELLO_NOTES)),
    (
        "query",
        "for the text of three tokens",
        map_frame("query", {"request": 1, "keys": [TAIL]}, {"request": "number of the request", "keys[]": "a chain key"}),
    ),
    (
        "matches",
        "the sample artifact, held whole",
        map_frame(
            "matches",
            {"request": 1, "matches": [MATCH]},
            {
                "request": "number of the query that is answered",
                "matches[].manifest": "the manifest CID",
                "matches[].matched": "the longest key of the query is that of segment 1, counted from 1",
                "matches[].segments": "segments of the artifact",
                "matches[].held": "bitmap: segment 0 is held",
            },
        ),
    ),
    ("no matches", "", map_frame("matches", {"request": 2147483647, "matches": []})),
    (
        "ask-statements",
        "what the publisher of the sample says beyond its list of revocations",
        map_frame(
            "ask-statements",
            {"request": 3, "publisher": PUBLIC, "known": [Link(cid(0x71, LIST))]},
            {
                "request": "number of the request",
                "publisher": "the publisher's Ed25519 public key",
                "known[]": "a statement's CID",
            },
        ),
    ),
    (
        "statements",
        "its succession",
        map_frame(
            "statements",
            {"request": 3, "statements": [SUCCESSION]},
            {"request": "number of the request that is answered", "statements[]": "a signed statement"},
        ),
    ),
    ("no statements", "", map_frame("statements", {"request": 0, "statements": []})),
    ("want", "both blocks, in this order", cid_frame("want", *BLOCK_CIDS)),
    ("empty want", "legal, and without effect", cid_frame("want")),
    ("block", "the first block", frame("block", [(BLOCK_CIDS[0], "binary CID"), (PAYLOADS[0], "payload")])),
    ("dont-have", "", cid_frame("dont-have", BLOCK_CIDS[1])),
    ("have", "", cid_frame("have", BLOCK_CIDS[1])),
    ("cancel", "", cid_frame("cancel", BLOCK_CIDS[1])),
    ("bulk-request", "", map_frame("bulk-request", {})),
    ("bulk-offer", "", map_frame("bulk-offer", OFFER, OFFER_NOTES)),
    (
        "no bulk lane",
        "port 0 says that there is none",
        map_frame("bulk-offer", {"port": 0, "token": bytes(32), "fingerprint": bytes(32)}, OFFER_NOTES),
    ),
    ("bulk-closed", "", map_frame("bulk-closed", {})),
    (
        "error",
        "",
        map_frame(
            "error",
            {"code": "wire.protocol", "message": "hello twice"},
            {"code": "stable code", "message": "for people"},
        ),
    ),
]

GREETING: list[Piece] = [
    (MAGIC, "magic 'p2pkvBL1'"),
    (TOKEN, "the token of the offer"),
    (KEY.sign(LANE_SIGNED).signature, "Ed25519 over the domain 'p2pkv/bulk-lane/v1', one zero byte, fingerprint and token"),
]
LANE: list[tuple[str, str, list[Piece]]] = [
    ("bulk lane, provider's greeting", "the answer to a good greeting", [(MAGIC, "magic 'p2pkvBL1'")]),
    (
        "bulk lane, block",
        "the second block",
        [
            (BLOCK_CIDS[1], "binary CID"),
            (struct.pack(">I", len(PAYLOADS[1])), f"length of the payload: {len(PAYLOADS[1])} as u32 big endian"),
            (PAYLOADS[1], "payload"),
        ],
    ),
]


def _map(kind: str, value: dict[str, Any]) -> bytes:
    return joined(map_frame(kind, value))


ASK: dict[str, Any] = {"request": 1, "publisher": PUBLIC, "known": []}
HELLO = {"version": 1, "agent": "a", "features": []}
REFUSED: list[tuple[str, bytes]] = [
    ("hello of version 2", _map("hello", {**HELLO, "version": 2})),
    ("hello without an agent", _map("hello", {"version": 1, "features": []})),
    ("hello whose agent is bytes", _map("hello", {**HELLO, "agent": b"a"})),
    ("hello with an agent of 257 bytes", _map("hello", {**HELLO, "agent": "a" * 257})),
    ("hello with a feature that is no text", _map("hello", {**HELLO, "features": [1]})),
    ("hello with a feature of 257 bytes", _map("hello", {**HELLO, "features": ["f" * 257]})),
    ("hello with 65 features", _map("hello", {**HELLO, "features": [f"{number:02}" for number in range(65)]})),
    ("hello that is a list", header(0x01, 1) + b"\x80"),
    ("hello of no bytes", header(0x01, 0)),
    ("bulk request with keys out of order", header(0x30, 7) + bytes.fromhex("a2616201616102")),
    ("hello with bytes behind it", header(0x01, 2) + b"\xa0\x00"),
    ("query with a key of 31 bytes", _map("query", {"request": 1, "keys": [bytes(31)]})),
    ("query with a key that is text", _map("query", {"request": 1, "keys": ["a" * 32]})),
    ("query number -1", _map("query", {"request": -1, "keys": []})),
    ("query number 2^31", _map("query", {"request": 2**31, "keys": []})),
    ("match of no segment", _map("matches", {"request": 1, "matches": [{**MATCH, "matched": 0}]})),
    ("match beyond the last segment", _map("matches", {"request": 1, "matches": [{**MATCH, "matched": 2}]})),
    ("match with a bitmap too long", _map("matches", {"request": 1, "matches": [{**MATCH, "held": bytes(2)}]})),
    ("match of 1,025 segments", _map("matches", {"request": 1, "matches": [{**MATCH, "segments": 1025, "held": bytes(129)}]})),
    ("match whose manifest is bytes", _map("matches", {"request": 1, "matches": [{**MATCH, "manifest": MANIFEST_CID}]})),
    ("17 matches", _map("matches", {"request": 1, "matches": [MATCH] * 17})),
    ("ask with a key of 31 bytes", _map("ask-statements", {**ASK, "publisher": bytes(31)})),
    ("ask with a CID that is bytes", _map("ask-statements", {**ASK, "known": [bytes(36)]})),
    ("ask with 7 CIDs", _map("ask-statements", {**ASK, "known": [Link(MANIFEST_CID)] * 7})),
    ("7 statements", _map("statements", {"request": 1, "statements": [b""] * 7})),
    ("statement of 131,073 bytes", _map("statements", {"request": 1, "statements": [bytes(131_073)]})),
    ("statement that is text", _map("statements", {"request": 1, "statements": [""]})),
    ("want cut off in a CID", header(0x20, 35) + BLOCK_CIDS[0][:35]),
    ("want of the identity hash", header(0x20, 36) + b"\x01\x55\x00\x20" + bytes(32)),
    ("want of 1,025 CIDs, its header alone", header(0x20, 36 * 1025)),
    ("block shorter than its CID", header(0x21, 35) + BLOCK_CIDS[0][:35]),
    ("block too large, its header alone", header(0x21, 1_052_737)),
    ("control message too large, its header alone", header(0x01, 262_145)),
    ("unknown type too large, its header alone", header(0x70, 1_052_737)),
    ("bulk closed that is no map", header(0x32, 1) + b"\x80"),
    ("bulk request that is no map", header(0x30, 1) + b"\x80"),
    ("bulk offer of port 65,536", _map("bulk-offer", {**OFFER, "port": 65_536})),
    ("bulk offer with a token of 31 bytes", _map("bulk-offer", {**OFFER, "token": bytes(31)})),
    ("bulk offer without a fingerprint", _map("bulk-offer", {"port": 1, "token": TOKEN})),
    ("error whose text has 4,097 bytes", _map("error", {"code": "a", "message": "a" * 4097})),
]

# What later versions may send: unknown types, and unknown fields of known maps.
SKIPPED: list[tuple[str, bytes]] = [
    ("unknown type without a body", header(0x02, 0)),
    ("unknown type with a body", header(0x70, 3) + b"\xff\xff\xff"),
    ("type 0", header(0x00, 5) + b"later"),
]
TOLERATED: list[tuple[str, bytes, str]] = [
    (
        "hello with a field of a later version",
        _map("hello", {"version": 1, "agent": "p2pkv/1", "features": ["bulk"], "later": 1}),
        "hello",
    ),
    ("match with a field of a later version", _map("matches", {"request": 1, "matches": [{**MATCH, "later": 1}]}), "matches"),
    (
        "statements with a field of a later version",
        _map("statements", {"request": 0, "statements": [], "later": 1}),
        "no statements",
    ),
    ("bulk request with a field of a later version", _map("bulk-request", {"later": 1}), "bulk-request"),
]
