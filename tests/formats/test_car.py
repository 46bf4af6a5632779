"""CAR v1: what is written is read, however the bytes are cut, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import dag_cbor
import pytest
from hypothesis import given, strategies as st
from multiformats import CID, varint

from p2pkv.errors import CidError, DagCborError, FormatError, IntegrityError, TruncatedError, UnknownVersionError
from p2pkv.formats import dagcbor
from p2pkv.formats.car import MAX_SECTION_BYTES, CarDecoder, encode_header, encode_section, section_size
from p2pkv.formats.cid import CID_BYTES, Cid, Codec, HashFunction
from p2pkv.limits import MAX_CAR_HEADER_BYTES, MAX_CODED_BLOCK_BYTES, MAX_NODE_BYTES
from tests.support import samples, vectors
from tests.support.strategies import cids

GOLDEN = vectors.load("car.json")["tiny"]

# Built by hand: one root, the empty map as a node, and one block of five bytes, b"p2pkv".
NODE_CID = "01711e20" + "".join(f"{byte:02x}" for byte in Cid.of_node(b"\xa0").digest)
BY_HAND = bytes.fromhex(
    "3a"  # the header has 58 bytes
    "a2"  # a map of two
    "65726f6f7473"  # "roots"
    "81"  # a list of one
    f"d82a582500{NODE_CID}"  # tag 42 over 37 bytes: zero, CID
    "6776657273696f6e"  # "version"
    "01"
    "25"  # the first section has 37 bytes
    f"{NODE_CID}"
    "a0"
    "29"  # the second one has 41
    "01551e2095c55f09c292a596871028cbc920be663f56a992a21a6a5307152b022ba7c1dd"
    "7032706b76"
)
NODE = (Cid.of_node(b"\xa0"), b"\xa0")
BLOCK = (Cid.of_block(b"p2pkv"), b"p2pkv")
HEADER = encode_header([NODE[0]])

Blocks = list[tuple[Cid, bytes]]


def read(pieces: Iterable[bytes]) -> tuple[tuple[Cid, ...], Blocks]:
    decoder = CarDecoder()
    blocks = [block for piece in pieces for block in decoder.feed(piece)]
    decoder.end()
    return decoder.roots, blocks


def write(roots: Sequence[Cid], blocks: Blocks) -> bytes:
    return encode_header(roots) + b"".join(encode_section(cid, data) for cid, data in blocks)


def single(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def named(codec: Codec, function: HashFunction, data: bytes) -> tuple[Cid, bytes]:
    digest = Cid.of_block(data).digest if function is HashFunction.BLAKE3 else sha256(data).digest()
    return Cid(codec, function, digest), data


blocks_of_a_car = st.lists(
    st.builds(named, st.sampled_from(Codec), st.sampled_from(HashFunction), st.binary(max_size=300)), max_size=6
)
roots_of_a_car = st.lists(cids, min_size=1, max_size=4)


def test_golden_vector() -> None:
    envelope = samples.envelope()
    nodes = [envelope.encode(), samples.segment().encode()]
    blocks = [*((Cid.of_node(node), node) for node in nodes), *((Cid.of_block(block), block) for block in samples.BLOCKS)]
    assert write([envelope.cid], blocks) == GOLDEN.data
    assert read([GOLDEN.data]) == ((envelope.cid,), blocks)
    assert str(envelope.cid) == GOLDEN.fields["root"]


def test_a_car_that_was_built_by_hand() -> None:
    assert write([NODE[0]], [NODE, BLOCK]) == BY_HAND
    assert read([BY_HAND]) == ((NODE[0],), [NODE, BLOCK])
    assert read(single(BY_HAND)) == ((NODE[0],), [NODE, BLOCK])


@given(roots_of_a_car, blocks_of_a_car, st.data())
def test_what_is_written_is_read_however_it_is_cut(roots: list[Cid], blocks: Blocks, data: st.DataObject) -> None:
    written = write(roots, blocks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    for fed in ([written], pieces, single(written)):
        assert read(fed) == (tuple(roots), blocks)


@given(roots_of_a_car, blocks_of_a_car)
def test_independent_libraries_read_the_same(roots: list[Cid], blocks: Blocks) -> None:
    left = write(roots, blocks)
    sections = []
    while left:
        size, used, _ = varint.decode_raw(left)
        sections.append(left[used : used + size])
        left = left[used + size :]
    assert dag_cbor.decode(sections.pop(0)) == {"roots": [CID.decode(root.binary) for root in roots], "version": 1}
    assert sections == [cid.binary + data for cid, data in blocks]
    assert [section_size(len(data)) for _, data in blocks] == [len(encode_section(cid, data)) for cid, data in blocks]


@given(blocks_of_a_car)
def test_every_cut_is_whole_or_told_to_be_truncated(blocks: Blocks) -> None:
    written = write([NODE[0]], blocks)
    ends = {len(write([NODE[0]], blocks[:count])): count for count in range(len(blocks) + 1)}
    for cut in range(len(written)):
        if cut in ends:
            assert read([written[:cut]])[1] == blocks[: ends[cut]]
        else:
            with pytest.raises(TruncatedError):
                read([written[:cut]])


@pytest.mark.parametrize(
    "garbage", [b"\x00", b"\xff\xff\xff", b"\x80\x80\x80", b"\x80\x00", b"\x24" + bytes(36), BY_HAND], ids=bytes.hex
)
def test_garbage_behind_the_last_block_is_refused(garbage: bytes) -> None:
    for pieces in ([BY_HAND + garbage], [BY_HAND, garbage], single(BY_HAND + garbage)):
        with pytest.raises(FormatError):
            read(pieces)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read([data])
    try:
        blocks = read([HEADER, data])[1]
    except (FormatError, IntegrityError):
        return
    assert HEADER + data == write([NODE[0]], blocks)


@given(st.integers(0, 8 * len(BY_HAND) - 1))
def test_no_flipped_bit_is_read_as_the_same(bit: int) -> None:
    changed = bytearray(BY_HAND)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        found = read([bytes(changed)])
    except (FormatError, IntegrityError):
        return
    assert found != ((NODE[0],), [NODE, BLOCK])


def test_a_block_that_is_not_what_its_cid_names_is_refused() -> None:
    with pytest.raises(IntegrityError):
        read([HEADER, encode_section(BLOCK[0], b"P2PKV")])


# --- sizes -------------------------------------------------------------------------------------------------------------


def length(number: int) -> bytes:
    return bytes(varint.encode(number))


@pytest.mark.parametrize(
    ("before", "number"),
    [
        (b"", MAX_CAR_HEADER_BYTES + 1),
        (b"", 2**63 - 1),
        (HEADER, MAX_SECTION_BYTES + 1),
        (HEADER, 2**21),
        (HEADER, 2**63 - 1),
        (HEADER, CID_BYTES - 1),
        (HEADER, 0),
    ],
)
def test_a_length_out_of_bounds_is_refused_before_its_bytes_come(before: bytes, number: int) -> None:
    for pieces in ([before + length(number)], single(before + length(number))):
        with pytest.raises(FormatError) as refused:
            read(pieces)
        assert not isinstance(refused.value, TruncatedError)


def test_a_length_that_goes_on_too_long_is_refused_at_the_byte_that_tells() -> None:
    decoder = CarDecoder()
    decoder.feed(HEADER + b"\x80\x80")
    with pytest.raises(FormatError, match="more than"):
        decoder.feed(b"\x80")


@pytest.mark.parametrize("longer", ["ba00", "ba8000"])
def test_a_length_has_one_form(longer: str) -> None:
    with pytest.raises(FormatError):
        read([bytes.fromhex(longer) + BY_HAND[1:]])
    with pytest.raises(FormatError):
        read([HEADER + b"\xa5\x00" + encode_section(*NODE)[1:]])
    with pytest.raises(FormatError):
        read([HEADER + b"\xa5\x80\x00" + encode_section(*NODE)[1:]])


def test_a_node_beyond_its_bound_is_refused_when_its_cid_is_here() -> None:
    start = length(CID_BYTES + MAX_NODE_BYTES + 1) + NODE[0].binary
    decoder = CarDecoder()
    decoder.feed(HEADER + start[:-1])
    with pytest.raises(FormatError, match="exceeds"):
        decoder.feed(start[-1:])


def test_a_cid_out_of_the_profile_is_refused_before_the_block_comes() -> None:
    sha2_512 = bytes.fromhex("01551320") + bytes(32)
    decoder = CarDecoder()
    with pytest.raises(CidError):
        decoder.feed(HEADER + length(MAX_SECTION_BYTES) + sha2_512)


def test_the_largest_blocks_are_read_and_larger_ones_not_written() -> None:
    largest = (Cid.of_block(bytes(MAX_CODED_BLOCK_BYTES)), bytes(MAX_CODED_BLOCK_BYTES))
    assert read([HEADER, encode_section(*largest)])[1] == [largest]
    with pytest.raises(FormatError):
        encode_section(largest[0], bytes(MAX_CODED_BLOCK_BYTES + 1))
    node = bytes(MAX_NODE_BYTES)
    assert read([HEADER, encode_section(Cid.of_node(node), node)])[1] == [(Cid.of_node(node), node)]
    with pytest.raises(FormatError):
        encode_section(Cid.of_node(node), bytes(MAX_NODE_BYTES + 1))


# --- headers -----------------------------------------------------------------------------------------------------------


def header(data: bytes) -> bytes:
    return length(len(data)) + data


LINKS: list[dagcbor.Value] = [NODE[0]]
SPOILT: dict[str, tuple[dagcbor.Value, type[FormatError]]] = {
    "no map": (LINKS, DagCborError),
    "no version": ({"roots": LINKS}, FormatError),
    "version that is true": ({"roots": LINKS, "version": True}, FormatError),
    "no roots": ({"version": 1}, FormatError),
    "empty roots": ({"roots": [], "version": 1}, FormatError),
    "a root that is text": ({"roots": [*LINKS, "x"], "version": 1}, FormatError),
    "an unknown field": ({"more": 1, "roots": LINKS, "version": 1}, FormatError),
    "version 2 with roots": ({"roots": LINKS, "version": 2}, UnknownVersionError),
    "CAR v2": ({"version": 2}, UnknownVersionError),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_header(name: str) -> None:
    value, error = SPOILT[name]
    with pytest.raises(FormatError) as refused:
        read([header(dagcbor.encode(value))])
    assert refused.type is error


def test_a_header_that_says_a_wrong_length_of_itself_is_no_truncated_file() -> None:
    for data in (HEADER[1:-1], HEADER[1:] + b"\x00", b""):
        with pytest.raises(DagCborError):
            read([header(data), encode_section(*NODE)])


def test_a_header_in_another_form_is_refused() -> None:
    root = "d82a582500" + NODE_CID
    for data in ("a26776657273696f6e0165726f6f747381" + root, "a265726f6f747381" + root + "6776657273696f6e1801"):
        with pytest.raises(DagCborError):
            read([header(bytes.fromhex(data))])


def test_roots_have_a_bound() -> None:
    for none_or_too_many in ([], [NODE[0]] * (MAX_CAR_HEADER_BYTES // CID_BYTES)):
        with pytest.raises(FormatError):
            encode_header(none_or_too_many)
    most = [NODE[0]] * 90
    assert read([encode_header(most)]) == (tuple(most), [])
