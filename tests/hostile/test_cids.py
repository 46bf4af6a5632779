"""Attacks on CIDs: hashes that bind nothing, numbers in a second form, texts that look alike; wherever a CID may stand."""

from __future__ import annotations

from functools import partial
from itertools import chain

import cbor2
import pytest

from p2pkv.errors import CidError, DagCborError, P2pkvError, ProtocolError, UsageError
from p2pkv.exchange.messages import FrameDecoder, MessageType
from p2pkv.formats import dagcbor
from p2pkv.formats.car import CarDecoder, encode_header
from p2pkv.formats.cid import CID_BYTES, Cid
from p2pkv.units import MIB
from p2pkv_node.requests import read_cid
from tests.hostile.attack import Attack, assert_refused, given

CID = Cid.of_block(b"p2pkv")
DIGEST = CID.digest
TEXT = str(CID)

BINARY: dict[str, bytes] = {
    "no byte": b"",
    **{f"cut off after {end}": CID.binary[:end] for end in (1, 2, 3, 4, 35)},
    "a byte behind it": CID.binary + b"\0",
    "twice": CID.binary * 2,
    "version 0": b"\x12\x20" + DIGEST,
    "version 0 said to be 1": b"\0\x55\x1e\x20" + DIGEST,
    "version 2": b"\x02\x55\x1e\x20" + DIGEST,
    "version 127": b"\x7f\x55\x1e\x20" + DIGEST,
    "version in two bytes": b"\x81\0\x55\x1e\x20" + DIGEST,
    "version in two bytes, of the right length": b"\x81\0\x55\x1e\x20" + DIGEST[1:],
    "version without end": b"\xff" * CID_BYTES,
    "version beyond 64 bits": b"\xff" * 9 + b"\x7f" + bytes(26),
    "codec dag-pb": b"\x01\x70\x1e\x20" + DIGEST,
    "codec libp2p-key": b"\x01\x72\x1e\x20" + DIGEST,
    "codec dag-json": b"\x01\xa9\x02\x1e\x20" + DIGEST,
    "codec raw in two bytes": b"\x01\xd5\0\x1e\x20" + DIGEST,
    "codec raw in two bytes, of the right length": b"\x01\xd5\0\x1e\x20" + DIGEST[1:],
    "the identity, with the content": b"\x01\x55\0\x05p2pkv",
    "the identity, as long as a digest": b"\x01\x55\0\x20" + DIGEST,
    "the identity of nothing": b"\x01\x55\0\0",
    "hash function SHA1": b"\x01\x55\x11\x14" + DIGEST[:20],
    "hash function SHA1, as long as ours": b"\x01\x55\x11\x20" + DIGEST,
    "hash function SHA2-512": b"\x01\x55\x13\x40" + DIGEST * 2,
    "hash function SHA3-256": b"\x01\x55\x16\x20" + DIGEST,
    "hash function MD5": b"\x01\x55\xd5\x01\x10" + DIGEST[:16],
    "hash function BLAKE2b-256": b"\x01\x55\xa0\xe4\x02\x20" + DIGEST,
    "hash function BLAKE3 in two bytes": b"\x01\x55\x9e\0\x20" + DIGEST,
    **{f"{length} bytes of the digest": bytes((1, 0x55, 0x1E, length)) + DIGEST[:length] for length in (0, 1, 16, 20, 31)},
    "a digest of 33 bytes": b"\x01\x55\x1e\x21" + DIGEST + b"\0",
    "a digest that is said to be shorter": b"\x01\x55\x1e\x14" + DIGEST,
    "a digest that is said to be longer": b"\x01\x55\x1e\xff" + DIGEST,
    "a length in two bytes": b"\x01\x55\x1e\xa0\0" + DIGEST,
    "a length of 2^63 - 1": b"\x01\x55\x1e" + b"\xff" * 8 + b"\x7f",
    "the multibase byte of a link": b"\0" + CID.binary,
    "its text": TEXT.encode(),
    "megabytes": CID.binary + bytes(16 * MIB),
}


def link(binary: bytes) -> bytes:
    """Return a DAG-CBOR link, whatever it holds."""
    return cbor2.dumps(cbor2.CBORTag(42, b"\0" + binary))


def padded(binary: bytes) -> bytes:
    return binary.ljust(CID_BYTES, b"\0")[:CID_BYTES]


def want(binary: bytes) -> bytes:
    """Return a want whose list holds a good CID and then 36 bytes of this one."""
    body = CID.binary + padded(binary)
    return len(body).to_bytes(4, "big") + bytes((MessageType.WANT,)) + body


def section(binary: bytes) -> bytes:
    """Return a CAR with a section whose CID is this one, padded."""
    return encode_header([CID]) + bytes((CID_BYTES + 5,)) + padded(binary) + b"p2pkv"


# Where just 36 bytes are taken, only what stands before the digest can be wrong.
OF_SIZE = [name for name, binary in BINARY.items() if padded(binary)[:4] != CID.binary[:4]]
OF_BINARY = {
    name: [
        Attack(name, Cid.from_bytes, CidError, given(binary)),
        Attack(f"in a link: {name}", dagcbor.decode, DagCborError, given(link(binary))),
        *(
            [
                Attack(f"in a want: {name}", lambda data: FrameDecoder().feed(data), ProtocolError, given(want(binary))),
                Attack(f"in a CAR: {name}", lambda data: CarDecoder().feed(data), CidError, given(section(binary))),
            ]
            if padded(binary)[:4] != CID.binary[:4]  # just 36 bytes are taken, so only what is before the digest can be wrong
            else []
        ),
    ]
    for name, binary in BINARY.items()
}

TEXTS: dict[str, str] = {
    "no character": "",
    "upper case": TEXT.upper(),
    "upper case behind the prefix": "b" + TEXT[1:].upper(),
    "the prefix of upper case": "B" + TEXT[1:],
    **{f"multibase {prefix!r}": prefix + TEXT[1:] for prefix in "\0fFvVtTcChkKzZmMuU79pP"},
    "padding": TEXT + "=" * 6,
    "padding in the place of digits": TEXT[:-6] + "=" * 6,
    "cut off": TEXT[:-1],
    "a character behind it": TEXT + "a",
    "a line end behind it": TEXT + "\n",
    "a zero behind it": TEXT + "\0",
    "a space before it": " " + TEXT,
    "a character that is not seen": TEXT[:30] + "\u200b" + TEXT[31:],
    "a letter of another alphabet": TEXT[:30] + "\u0430" + TEXT[31:],  # looks like an a
    "full width": "".join(chr(ord(character) + 0xFEE0) for character in TEXT),
    "a digit that base32 lacks": TEXT[:30] + "1" + TEXT[31:],
    "a lone surrogate": TEXT[:30] + "\ud800" + TEXT[31:],
    "bits behind the last byte": TEXT[:-1] + chr(ord(TEXT[-1]) + 1),
    "a path": f"/ipfs/{TEXT}",
    "an address": f"ipfs://{TEXT}",
    "version 0": "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",
    "megabytes": TEXT * 100_000,
}
OF_TEXTS = {
    name: [
        Attack(f"as text: {name}", Cid.parse, CidError, given(text)),
        Attack(f"told by a program: {name}", read_cid, UsageError, given(text)),
    ]
    for name, text in TEXTS.items()
}
ATTACKS = [*chain.from_iterable(OF_BINARY.values()), *chain.from_iterable(OF_TEXTS.values())]


@pytest.mark.parametrize("name", OF_BINARY)
def test_refused_wherever_a_cid_may_stand(name: str) -> None:
    for attack in OF_BINARY[name]:
        assert_refused(attack)


@pytest.mark.parametrize("name", OF_TEXTS)
def test_a_text_is_refused(name: str) -> None:
    for attack in OF_TEXTS[name]:
        assert_refused(attack)


def test_the_frame_around_the_attacks_is_good() -> None:
    """Else they would be refused for it."""
    assert dagcbor.decode(link(CID.binary)) == CID
    assert len(FrameDecoder().feed(want(CID.binary))) == 1
    assert CarDecoder().feed(section(CID.binary)) == [(CID, b"p2pkv")]


def test_another_content_is_told_from_the_right_one() -> None:
    for data in (b"", b"p2pkv\0", b"P2pkv"):
        attack = Attack("", partial(CID.check, data), P2pkvError)
        with pytest.raises(P2pkvError) as caught:
            attack.run()
        assert caught.value.code == "integrity.hash"
