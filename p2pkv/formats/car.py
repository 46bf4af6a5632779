"""CAR v1: an artifact as one file, a header that names its root and then block after block (``docs/spec/car.md``).

Sans-IO: the decoder is fed bytes as they come and gives back verified blocks, the encoder returns the bytes to write. A CAR
has no mark at its end, so only whoever feeds the decoder knows that no more bytes come: see :meth:`CarDecoder.end`.
Spec: https://ipld.io/specs/transport/car/carv1/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from p2pkv.errors import DagCborError, FormatError, TruncatedError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import CID_BYTES, Cid, Codec
from p2pkv.formats.fields import Fields
from p2pkv.limits import MAX_CAR_HEADER_BYTES, MAX_CODED_BLOCK_BYTES, MAX_NODE_BYTES

VERSION: Final = 1
MAX_SECTION_BYTES: Final = CID_BYTES + MAX_CODED_BLOCK_BYTES
_MORE: Final = 0x80  # set in every byte of a varint but its last


def encode_header(roots: Sequence[Cid]) -> bytes:
    """Return the beginning of a CAR with these roots. Raises FormatError for none, or for more than a header holds."""
    if not roots:
        raise FormatError("a CAR without a root", advice="Name at least one root.")
    header = dagcbor.encode({"roots": list(roots), "version": VERSION})
    if len(header) > MAX_CAR_HEADER_BYTES:
        raise FormatError(f"a CAR header of {len(header)} bytes exceeds {MAX_CAR_HEADER_BYTES}", advice="Name fewer roots.")
    return _encode_varint(len(header)) + header


def encode_section(cid: Cid, data: bytes | bytearray | memoryview) -> bytes:
    """Return the section of one block, whose bytes the caller has verified. Raises FormatError for more than a block holds."""
    view = memoryview(data).cast("B")
    _check_size(cid, len(view))
    return b"".join((_encode_varint(CID_BYTES + len(view)), cid.binary, view))


def section_size(size: int) -> int:
    """Return how many bytes the section of a block of ``size`` bytes takes."""
    length = CID_BYTES + size
    return len(_encode_varint(length)) + length


class CarDecoder:
    """Reads one CAR, fed in pieces of any size. After an error nothing of the file is to be used, nor the decoder.

    Between calls it holds less than one section, of at most :data:`MAX_SECTION_BYTES` and its length.
    """

    def __init__(self) -> None:
        self._left = bytearray()
        self._roots: tuple[Cid, ...] = ()

    @property
    def roots(self) -> tuple[Cid, ...]:
        """The roots, at least one; empty while the header is not read."""
        return self._roots

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[Cid, bytes]]:
        """Take the next bytes and return the blocks that they complete, each verified against its CID, in the file's order.

        Raises UnknownVersionError, CidError, DagCborError or FormatError for what is no CAR of the profile, IntegrityError
        for a block that is not what its CID names. A length is refused before its bytes are awaited.
        """
        self._left += data
        blocks: list[tuple[Cid, bytes]] = []
        at = 0 if self._roots else self._read_header()
        while self._roots and (section := _find_section(self._left, at)) is not None:
            start, at = section
            cid = Cid.from_bytes(self._left[start : start + CID_BYTES])
            block = bytes(self._left[start + CID_BYTES : at])
            cid.check(block)
            blocks.append((cid, block))
        del self._left[:at]
        return blocks

    def end(self) -> None:
        """Say that no more bytes come. Raises TruncatedError where the header or a section is not whole."""
        if not self._roots:
            raise TruncatedError("the CAR ends within its header")
        if self._left:
            raise TruncatedError("the CAR ends within a block")

    def _read_header(self) -> int:
        """Read the roots where the header is whole, and return where what follows begins."""
        found = _decode_varint(self._left, 0, MAX_CAR_HEADER_BYTES, "header")
        if found is None:
            return 0
        size, start = found
        if len(self._left) < start + size:
            return 0
        self._roots = _decode_header(self._left[start : start + size])
        return start + size


def _decode_header(data: bytearray) -> tuple[Cid, ...]:
    try:
        fields = Fields(dagcbor.decode_map(data), "CAR header", FormatError)
    except TruncatedError as error:  # of the value alone: all bytes that the header claims are here
        raise DagCborError(f"CAR header: {error.message}") from None
    version = fields.integer("version")
    if version != VERSION:
        raise UnknownVersionError(
            f"CAR version {version} is unknown here; version {VERSION} is", advice="Write it again as CAR v1."
        )
    links = fields.items("roots", MAX_CAR_HEADER_BYTES // CID_BYTES)
    fields.end()
    roots = tuple(link for link in links if isinstance(link, Cid))
    if not roots or len(roots) != len(links):
        raise FormatError("the roots of a CAR header are not a list of at least one CID")
    return roots


def _find_section(data: bytearray, at: int) -> tuple[int, int] | None:
    """Return where the CID of the section at ``at`` begins and where the section ends; ``None`` while it is not whole."""
    found = _decode_varint(data, at, MAX_SECTION_BYTES, "section")
    if found is None:
        return None
    size, start = found
    if size < CID_BYTES:
        raise FormatError(f"a CAR section of {size} bytes holds no CID")
    if len(data) >= start + CID_BYTES:
        _check_size(Cid.from_bytes(data[start : start + CID_BYTES]), size - CID_BYTES)
    return (start, start + size) if len(data) >= start + size else None


def _check_size(cid: Cid, size: int) -> None:
    most = MAX_NODE_BYTES if cid.codec is Codec.DAG_CBOR else MAX_CODED_BLOCK_BYTES
    if size > most:
        raise FormatError(f"{cid} of {size} bytes exceeds {most}")


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= _MORE:
        encoded.append(number & 0x7F | _MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _decode_varint(data: bytearray, at: int, most: int, what: str) -> tuple[int, int] | None:
    """Return the length (unsigned LEB128) of ``what`` at ``at``, and where it ends; ``None`` while it is not whole.

    Raises FormatError for a number beyond ``most``, as soon as a byte tells, and for one that is not in its shortest form.
    """
    number = 0
    longest = len(_encode_varint(most))
    for index, byte in enumerate(data[at : at + longest]):
        number |= (byte & 0x7F) << 7 * index
        if number > most or (byte & _MORE and index == longest - 1):
            raise FormatError(f"a CAR {what} of more than {most} bytes")
        if not byte & _MORE:
            if byte == 0 and index:
                raise FormatError(f"the length of a CAR {what} is not in its shortest form")
            return number, at + index + 1
    return None
