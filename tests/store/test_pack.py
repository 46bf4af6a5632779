"""The format of a pack: what is written, what a torn or damaged file is taken for, and that no file is believed too much."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.formats.cid import Cid
from p2pkv.formats.hashing import digest
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, READY_STEP_BYTES
from p2pkv.store import pack as pack_module
from p2pkv.store.pack import Contents, PackWriter, Record, bury, seal
from tests.store import packs
from tests.store.damages import opened, read_pack as read
from tests.store.packs import UNIT, head, header, record, records_of, sealed, table, unsealed

# An odd size, a multiple of the alignment, one less and one more, and nothing at all.
BLOCKS = [b"one block", bytes(range(64)), b"\x01" * 63, b"\x02" * 65, b""]
RECORDS = records_of(BLOCKS)
SECOND = RECORDS[1].offset - UNIT  # where the second record begins


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "00000001.pack"


def write(path: Path, blocks: Sequence[bytes], *, close: bool = True) -> PackWriter:
    writer = PackWriter(os.fspath(path))
    for data in blocks:
        writer.append(Cid.of_block(data), memoryview(data))
    if close:
        writer.close()
    return writer


# --- what is written ------------------------------------------------------------------------------------------------------


def test_the_format_is_the_one_described(path: Path) -> None:
    writer = write(path, BLOCKS, close=False)
    salt = path.read_bytes()[8:40]
    assert path.read_bytes() == unsealed(BLOCKS, salt)
    assert writer.size == path.stat().st_size
    assert read(path) == Contents(RECORDS, writer.size, False)
    assert writer.seal() == Contents(RECORDS, writer.size, False)
    writer.close()
    assert path.read_bytes() == sealed(BLOCKS, salt)
    assert read(path) == Contents(RECORDS, writer.size, True)


def test_every_pack_has_its_own_salt(tmp_path: Path) -> None:
    write(tmp_path / "a", [])
    write(tmp_path / "b", [])
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_a_pack_takes_no_other_file_s_place(path: Path) -> None:
    path.write_bytes(b"here first")
    with pytest.raises(FileExistsError):
        PackWriter(os.fspath(path))
    assert path.read_bytes() == b"here first"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(1, 200))
def test_what_is_written_however_slowly_is_found_by_the_walk_and_by_the_table(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], step: int
) -> None:
    path = tmp_path_factory.mktemp("packs") / "pack"

    def write_some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[:step], offset)

    writer = PackWriter(os.fspath(path), write=write_some)
    places = [writer.append(Cid.of_block(data), memoryview(data)) for data in blocks]
    walked = read(path)
    writer.seal()
    writer.close()
    assert read(path) == walked._replace(sealed=True)
    assert walked.records == records_of(blocks)
    assert [found.offset for found in walked.records] == places
    assert all(place % UNIT == 0 for place in places)
    assert [path.read_bytes()[found.offset :][: found.size] for found in walked.records] == blocks


def test_a_write_that_writes_nothing_is_an_error_and_no_endless_loop(path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        PackWriter(os.fspath(path), write=lambda descriptor, buffers, offset: 0)
    assert not path.exists()


@pytest.mark.parametrize("truncates", [True, False], ids=["truncated", "even truncating fails"])
def test_a_write_that_fails_anywhere_leaves_the_pack_at_its_last_whole_record(
    path: Path, truncates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: int | None = None

    def write_up_to(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if allowed is None:
            return os.pwritev(descriptor, buffers, offset)
        if offset >= end + allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(descriptor, b"".join(buffers)[: end + allowed - offset], offset)

    def no_truncate(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = PackWriter(os.fspath(path), write=write_up_to)
    for data in BLOCKS:
        writer.append(Cid.of_block(data), memoryview(data))
    end, before = writer.size, path.read_bytes()
    data = b"x" * 100
    for count in range(UNIT + len(data)):
        allowed = count
        with monkeypatch.context() as patched:
            if not truncates:
                patched.setattr(os, "ftruncate", no_truncate)
            with pytest.raises(OSError, match="No space left"):
                writer.append(Cid.of_block(data), memoryview(data))
        assert writer.size == end
        assert read(path) == Contents(RECORDS, end, False)
        assert path.read_bytes()[:end] == before
        assert path.stat().st_size == end or not truncates
    allowed = None
    assert writer.append(Cid.of_block(b"small"), memoryview(b"small")) == end + UNIT
    assert read(path).records == records_of([*BLOCKS, b"small"])
    writer.seal()
    writer.close()
    assert path.read_bytes() == sealed([*BLOCKS, b"small"], path.read_bytes()[8:40])


# --- making ready ---------------------------------------------------------------------------------------------------------


def test_room_that_is_ready_is_no_record_and_is_given_back(path: Path) -> None:
    most = 3 * READY_STEP_BYTES
    writer = write(path, BLOCKS[:2], close=False)
    assert [writer.make_ready(most) for _ in range(4)] == [True, True, False, False]
    assert path.stat().st_size == most
    assert read(path) == Contents(RECORDS[:2], writer.size, False)
    for data in BLOCKS[2:]:
        writer.append(Cid.of_block(data), memoryview(data))
    assert read(path) == Contents(RECORDS, writer.size, False)
    writer.close()
    with opened(path) as descriptor:
        assert seal(descriptor).records == RECORDS
    assert path.read_bytes() == sealed(BLOCKS, path.read_bytes()[8:40])


def test_making_ready_goes_on_after_a_full_disk_and_ends_with_the_pack(path: Path) -> None:
    full = False

    def write_unless_full(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(descriptor, buffers, offset)

    writer = PackWriter(os.fspath(path), write=write_unless_full)
    assert not writer.make_ready(writer.size)
    assert writer.make_ready(2 * READY_STEP_BYTES)
    full = True
    with pytest.raises(OSError, match="No space left"):
        writer.append(Cid.of_block(BLOCKS[0]), memoryview(BLOCKS[0]))
    assert path.stat().st_size == writer.size
    full = False
    assert writer.make_ready(2 * READY_STEP_BYTES)
    assert path.stat().st_size == 2 * READY_STEP_BYTES
    writer.append(Cid.of_block(BLOCKS[0]), memoryview(BLOCKS[0]))
    assert read(path).records == RECORDS[:1]
    writer.close()


def test_a_system_that_cannot_be_asked_for_pages_makes_nothing_ready(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    writer = write(path, BLOCKS, close=False)
    assert not writer.make_ready(READY_STEP_BYTES)
    assert path.stat().st_size == writer.size
    writer.close()


# --- torn files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", [0, 1000], ids=["cut off", "zeros after it"])
def test_a_pack_that_is_torn_anywhere_is_walked_up_to_its_last_whole_record(path: Path, ready: int) -> None:
    whole = unsealed(BLOCKS)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut] + bytes(ready))
        contents = read(path)
        assert not contents.sealed
        # With room ready behind it, a record counts from its header on, and its hash tells.
        fits = [found for found in RECORDS if (found.offset if ready else found.offset + found.size) <= cut]
        assert contents.records[: len(fits)] == fits
        assert len(contents.records) - len(fits) <= (1 if ready else 0)
        with opened(path) as descriptor:
            assert seal(descriptor) == contents
        kept = path.read_bytes()
        assert read(path) == contents._replace(sealed=bool(contents.end))
        if contents.end and not ready:
            assert kept == sealed(BLOCKS[: len(fits)], kept[8:40])


def test_a_sealed_pack_that_is_torn_anywhere_in_its_table_is_walked(path: Path) -> None:
    whole = sealed(BLOCKS)
    end = len(unsealed(BLOCKS))
    for cut in range(end, len(whole)):
        path.write_bytes(whole[:cut])
        assert read(path) == Contents(RECORDS, end, False)


def test_a_seal_that_fails_costs_no_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write(path, BLOCKS, close=False)
    before = path.read_bytes()

    def fail(descriptor: int, buffers: Sequence[bytes], offset: int) -> None:
        os.pwrite(descriptor, b"".join(buffers)[:100], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pack_module, "write_at", fail)
        with pytest.raises(OSError, match="No space left"):
            writer.seal()
    assert path.read_bytes() == before
    writer.seal()
    writer.close()
    assert read(path) == Contents(RECORDS, len(before), True)


# --- damage ---------------------------------------------------------------------------------------------------------------


def test_any_flipped_bit_of_a_table_or_salt_leads_to_the_walk_and_equal_contents(path: Path) -> None:
    whole = sealed(BLOCKS)
    end = len(unsealed(BLOCKS))
    matters = range(end, len(whole) - UNIT + 40)  # the rest of the trailer is zeros that nobody reads
    for place in [*range(8, 40), *range(end, len(whole))]:
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            assert read(path) == Contents(RECORDS, end, place not in matters and place >= 40)


@pytest.mark.parametrize(
    "wrong",
    [
        header(bytes(36), 64),
        header(RECORDS[1].cid, 64, tag=b"BLCk"),
        header(RECORDS[1].cid, 64, tag=bytes(4)),
        header(b"\x02" + RECORDS[1].cid[1:], 64),
        header(b"\x01\x56" + RECORDS[1].cid[2:], 64),
        header(b"\x01\x55\x13" + RECORDS[1].cid[3:], 64),
        header(b"\x01\x55\x1e\x21" + RECORDS[1].cid[4:], 64),
        header(RECORDS[1].cid, MAX_CODED_BLOCK_BYTES + 1),
        header(RECORDS[1].cid, 2**32 - 1),
        header(RECORDS[1].cid, 2**32 - 1, tag=b"DEAD"),
        header(RECORDS[1].cid, 10_000),
    ],
)
@pytest.mark.parametrize("room", [0, MAX_CODED_BLOCK_BYTES + UNIT], ids=["short", "long"])
def test_a_header_that_is_none_ends_the_walk(path: Path, wrong: bytes, room: int) -> None:
    whole = unsealed(BLOCKS)
    path.write_bytes(whole[:SECOND] + wrong + whole[SECOND + UNIT :])
    if room:
        os.truncate(path, len(whole) + room)
    contents = read(path)
    if room and wrong == header(RECORDS[1].cid, 10_000):  # its zeros could be a block; only the hash tells
        assert contents.records == [RECORDS[0], RECORDS[1]._replace(size=10_000)]
    else:
        assert contents == Contents(RECORDS[:1], SECOND, False)


def test_any_flipped_bit_of_a_header_spares_what_comes_before(path: Path) -> None:
    whole = unsealed(BLOCKS)
    for place in range(SECOND, SECOND + UNIT):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            contents = read(path)
            assert contents.records[0] == RECORDS[0]
            check_inside(contents, len(damaged))


@pytest.mark.parametrize("first", [b"", b"p2pkvPK", b"p2pkvPK2", b"P2PKVPK1", bytes(8)])
def test_a_file_that_does_not_begin_like_a_pack_holds_nothing(path: Path, first: bytes) -> None:
    path.write_bytes(first + (unsealed(BLOCKS)[8:] if len(first) == 8 else b""))
    assert read(path) == Contents([], 0, False)


def forge(records: list[Record]) -> bytes:
    """Return the table that somebody writes who knows everything but the salt."""
    entries = table(records)[:-UNIT]
    return entries + packs.padded(b"TABL" + len(records).to_bytes(4, "big") + digest(bytes(32) + entries))


@pytest.mark.parametrize(
    "records", [[], [RECORDS[0]], [Record(RECORDS[0].cid, 2**64 - 1, 2**32 - 1)], [Record(bytes(36), 0, 0)]]
)
@pytest.mark.parametrize("make", [forge, table], ids=["no salt", "the salt of another pack"])
def test_a_block_that_ends_like_a_table_is_a_block(
    path: Path, records: list[Record], make: Callable[[list[Record]], bytes]
) -> None:
    forged = make(records)
    evil = bytes(-len(forged) % UNIT) + forged
    writer = write(path, [*BLOCKS, evil], close=False)
    expected = records_of([*BLOCKS, evil])
    assert path.read_bytes().endswith(forged)
    assert read(path) == Contents(expected, writer.size, False)
    with opened(path) as descriptor:
        bury(descriptor, expected[0])
    assert read(path) == Contents(expected[1:], writer.size, False)
    writer.close()


def check_inside(contents: Contents, size: int) -> None:
    for found in contents.records:
        assert found.offset >= 2 * UNIT
        assert found.offset + found.size <= size
        assert found.size <= MAX_CODED_BLOCK_BYTES
        Cid.from_bytes(found.cid)


@st.composite
def almost_packs(draw: st.DrawFn) -> bytes:
    """Return what is nearly a pack: pieces that belong in one, in any order, with a stretch of it overwritten."""
    piece = st.one_of(
        st.binary(max_size=200),
        st.sampled_from([head(), bytes(64), bytes(1000), table([]), table(RECORDS), forge(RECORDS), table(RECORDS)[-64:]]),
        st.binary(max_size=200).map(record),
        st.builds(
            header,
            st.one_of(st.sampled_from(RECORDS).map(lambda found: found.cid), st.binary(min_size=36, max_size=36)),
            st.integers(0, 2**32 - 1),
            st.sampled_from([b"BLCK", b"DEAD", b"TABL"]),
        ),
    )
    data = bytearray(draw(st.sampled_from([b"", head()])) + b"".join(draw(st.lists(piece, max_size=6))))
    place = draw(st.integers(0, len(data)))
    wrong = draw(st.binary(max_size=16))
    data[place : place + len(wrong)] = wrong
    return bytes(data)


@settings(deadline=None, max_examples=400)
@given(st.one_of(st.binary(max_size=1000), almost_packs()))
def test_no_bytes_at_all_break_reading_or_lead_out_of_the_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("packs") / "pack"
    path.write_bytes(data)
    # What is sealed with the salt was sealed by this machine, and its table is believed.
    contents = read(path)
    if not contents.sealed:
        check_inside(contents, len(data))
        assert contents.end <= len(data) + UNIT - 1
        with opened(path) as descriptor:
            assert seal(descriptor) == contents
        assert read(path) == contents._replace(sealed=bool(contents.end))


# --- burying --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [unsealed, sealed])
@pytest.mark.parametrize("victim", RECORDS)
def test_a_record_that_is_buried_stays_so_and_costs_no_other(
    path: Path, make: Callable[[Sequence[bytes]], bytes], victim: Record
) -> None:
    path.write_bytes(make(BLOCKS))
    expected = Contents([found for found in RECORDS if found != victim], len(unsealed(BLOCKS)), make is sealed)
    for _ in range(2):
        with opened(path) as descriptor:
            bury(descriptor, victim)
        assert read(path) == expected
    with opened(path) as descriptor:
        seal(descriptor)
    assert read(path) == expected._replace(sealed=True)


def test_damage_that_goes_on_into_the_next_header_costs_no_block_behind_it(path: Path) -> None:
    path.write_bytes(sealed(BLOCKS))
    with opened(path) as descriptor:
        bury(descriptor, RECORDS[0])
        os.pwrite(descriptor, bytes(UNIT), RECORDS[1].offset - UNIT)
        bury(descriptor, RECORDS[2])
    assert read(path).records == [RECORDS[1], *RECORDS[3:]]


def test_a_pack_that_still_grows_can_bury(path: Path) -> None:
    writer = write(path, BLOCKS, close=False)
    assert writer.make_ready(2 * READY_STEP_BYTES)
    with opened(path) as descriptor:
        bury(descriptor, RECORDS[1])
    writer.append(Cid.of_block(b"more"), memoryview(b"more"))
    writer.close()
    assert read(path).records == [RECORDS[0], *records_of([*BLOCKS, b"more"])[2:]]
