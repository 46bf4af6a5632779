"""Attacks on codecs: blocks that grow when they are decoded, and sizes that are not those of what comes out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from p2pkv.artifact.read import decode_block
from p2pkv.codecs import codec_named
from p2pkv.errors import FormatError, IntegrityError, P2pkvError
from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import digest
from p2pkv.formats.segment import BlockRef
from p2pkv.limits import MAX_BLOCK_BYTES, MAX_CODED_BLOCK_BYTES
from p2pkv.units import GIB, KIB
from tests.hostile.attack import Attack, assert_refused, given
from tests.support import samples

BLOCK = samples.BLOCKS[0]
REF = samples.segment().layers[0][0]
ZSTD_MAGIC = bytes.fromhex("28b52ffd")
_LARGEST_RUN = 128 * KIB


def zstd_bomb(size: int, *, says: int | None = None) -> bytes:
    """Return a zstd frame (RFC 8878) of ``size`` zeros in a thirty-thousandth of the bytes; it may say another size."""
    header = ZSTD_MAGIC + b"\xc0\x58" + (size if says is None else says).to_bytes(8, "little")
    runs = -(-size // _LARGEST_RUN)
    # A block header: the last one's bit, type 1 (a run of one byte), and how long the run is.
    return header + b"".join(
        (_LARGEST_RUN << 3 | 1 << 1 | (number == runs - 1)).to_bytes(3, "little") + b"\0" for number in range(runs)
    )


def skippable(size: int) -> bytes:
    """Return a frame that readers of zstd pass over."""
    return bytes.fromhex("502a4d18") + size.to_bytes(4, "little") + bytes(min(size, 64))


CODED: dict[str, bytes] = {
    "a gigabyte of zeros": zstd_bomb(GIB),
    "a gigabyte that is said to be what it should": zstd_bomb(GIB, says=len(BLOCK)),
    "a gigabyte that is said to be nothing": zstd_bomb(GIB, says=0),
    "a gigabyte that is said to be 2^64 - 1": zstd_bomb(GIB, says=2**64 - 1),
    "a bomb in a bomb": zstd_bomb(1 << 20) + zstd_bomb(GIB),
    "a thousand empty frames": (ZSTD_MAGIC + b"\x20\0\x01\0\0") * 1000,
    "a frame to be skipped of gigabytes": skippable(2**32 - 1),
    "frames to be skipped": skippable(64) * 1000,
    "a frame that needs a dictionary": ZSTD_MAGIC + b"\x23\xff\xff\xff\x7f\0\x01\0\0",
    "no byte": b"",
    "a byte too few": BLOCK[:-1],
    "a byte too many": BLOCK + b"\0",
    "the block twice": BLOCK * 2,
    "other bytes": bytes(len(BLOCK)),
    "as much as a block may have": bytes(MAX_CODED_BLOCK_BYTES),
}


def decoded(data: bytes, codec: str, **changes: object) -> memoryview:
    """Decode ``data``, whose CID the publisher signed, as what it says the block is."""
    ref = BlockRef(REF.part, Cid.of_block(data), len(data), REF.digest)
    return decode_block(replace(ref, **changes), codec, memoryview(data))  # type: ignore[arg-type]  # fields by name


ATTACKS = [
    *(Attack(f"raw: {name}", lambda data: decoded(data, "raw"), IntegrityError, given(data)) for name, data in CODED.items()),
    *(
        Attack(f"{codec!r}: {name}", partial(decoded, codec=codec), FormatError, given(data))
        for codec in ("zstd", "", "RAW", "raw ", "raw\0", "gzip", "../raw", "x" * 60_000)
        for name, data in CODED.items()
        if name in ("a gigabyte of zeros", "no byte")
    ),
    *(
        Attack(
            f"a block of {len(BLOCK)} bytes that is said to be {size}",
            lambda size=size: decoded(BLOCK, "raw", part=replace(REF.part, size=size)),
            IntegrityError,
        )
        for size in (0, 1, len(BLOCK) - 1, len(BLOCK) + 1, MAX_BLOCK_BYTES, 2**63 - 1, -1)
    ),
    Attack("another digest", lambda: decoded(BLOCK, "raw", digest=digest(b"other")), IntegrityError),
    Attack("another size before decoding", lambda: decoded(BLOCK, "raw", size=len(BLOCK) + 1), IntegrityError),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name[:60])
def test_refused(attack: Attack) -> None:
    assert_refused(attack)


def test_an_unknown_codec_is_refused_before_a_byte_is_looked_at() -> None:
    with pytest.raises(P2pkvError) as caught:
        codec_named("zstd")
    assert "Known codecs: raw" in caught.value.advice


def test_what_the_attacks_change_is_good() -> None:
    assert bytes(decoded(BLOCK, "raw")) == BLOCK
    assert len(zstd_bomb(GIB)) < 33_000
