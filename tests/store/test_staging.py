from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, IntegrityError, NotFoundError, StoreError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.pack import Record
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store, open_store
from tests.store import packs
from tests.store.builders import make_artifact, tokens
from tests.support.stores import damage_block

BLOCKS = {Cid.of_block(data): data for data in (bytes([number]) * 1000 for number in range(20))}
CIDS = list(BLOCKS)
FIRST = CIDS[0]

PUBLISHER = """
import sys
from pathlib import Path
from p2pkv.formats.cid import Cid
from p2pkv.store.pack import Record
from p2pkv.store.staging import open_staging
with open_staging(Path(sys.argv[1])) as staging:
    staging.write(Cid.of_block(b"from afar"), b"from afar")
    print(staging.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        yield store


def stage(home: Path, change: dict[Cid, bytes] | None = None) -> Iterator[str]:
    with open_staging(home) as staging:
        for cid, data in {**BLOCKS, **(change or {})}.items():
            staging.write(cid, data)
        yield staging.name


def staged_pack(store: Store, name: str) -> Path:
    return store.layout.staging / name / "blocks.pack"


def packs_of(store: Store) -> list[str]:
    return sorted(os.listdir(store.layout.blocks))


def test_staged_blocks_are_taken_over(store: Store, tmp_path: Path) -> None:
    with open_staging(tmp_path) as staging:
        for cid, data in BLOCKS.items():
            staging.write(cid, data)
            staging.write(cid, data)
        assert list(staging.cids) == CIDS
        store.adopt(staging.name, staging.cids)
        assert os.listdir(store.layout.staging / staging.name) == []
        store.adopt(staging.name, staging.cids)  # an answer may get lost, and the call is repeated
    assert os.listdir(store.layout.staging) == []
    assert len(packs_of(store)) == 1
    assert {cid: store.read(cid) for cid in CIDS} == BLOCKS
    assert store.statistics().blocks == len(BLOCKS)
    assert store.statistics().bytes == 1000 * len(BLOCKS)


def test_what_was_taken_over_is_sealed_and_there_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in stage(tmp_path):
            store.adopt(name, CIDS)
        (pack,) = store.layout.blocks.iterdir()
        assert pack.read_bytes() == packs.sealed(list(BLOCKS.values()), pack.read_bytes()[8:40])
        before = pack.stat()
    with open_store(tmp_path) as store:
        assert {cid: store.read(cid) for cid in CIDS} == BLOCKS
        assert packs_of(store) == [pack.name]
        assert pack.stat().st_mtime_ns == before.st_mtime_ns


def test_a_pack_that_is_taken_over_comes_after_the_current_one_and_before_the_next(store: Store, tmp_path: Path) -> None:
    store.write(FIRST, BLOCKS[FIRST])
    for name in stage(tmp_path):
        store.adopt(name, CIDS)
    store.write(FIRST, BLOCKS[FIRST])
    location = store.locate(FIRST)
    assert location is not None
    assert (location.file, packs_of(store)) == ("00000001.pack", ["00000001.pack", "00000002.pack"])
    assert store.statistics().bytes == 1000 * len(BLOCKS)


def test_one_damaged_block_and_nothing_is_taken_over(store: Store, tmp_path: Path) -> None:
    for name in stage(tmp_path, {CIDS[-1]: b"not what was hashed"}):
        for _ in range(2):
            with pytest.raises(IntegrityError, match=str(CIDS[-1])):
                store.adopt(name, CIDS)
        with pytest.raises(IntegrityError, match=str(CIDS[-1])):
            store.adopt(name, CIDS[:1])  # it would come with the pack
    assert not any(map(store.has, CIDS))
    assert packs_of(store) == []


def test_a_pack_with_a_torn_tail_gives_its_whole_blocks_alone(store: Store, tmp_path: Path) -> None:
    for name in stage(tmp_path):
        pack = staged_pack(store, name)
        os.truncate(pack, pack.stat().st_size - 100)
        with pytest.raises(NotFoundError, match=str(CIDS[-1])):
            store.adopt(name, CIDS)
        assert packs_of(store) == []
        store.adopt(name, CIDS[:-1])
    assert [store.has(cid) for cid in CIDS] == [True] * 19 + [False]
    assert {cid: store.read(cid) for cid in CIDS[:-1]} == {cid: BLOCKS[cid] for cid in CIDS[:-1]}


@pytest.mark.parametrize("wrong", [b"", b"no pack at all", os.urandom(5000), packs.head(), packs.table([])])
def test_what_is_no_pack_holds_nothing_and_leaves_nothing(store: Store, tmp_path: Path, wrong: bytes) -> None:
    for name in stage(tmp_path):
        staged_pack(store, name).write_bytes(wrong)
        with pytest.raises(NotFoundError, match=str(FIRST)):
            store.adopt(name, CIDS)
        for cid, data in BLOCKS.items():
            store.write(cid, data)
        store.adopt(name, CIDS)
    assert len(packs_of(store)) == 1
    assert store.statistics().blocks == len(BLOCKS)


def test_a_forged_table_leads_nobody_astray(store: Store, tmp_path: Path) -> None:
    forged = [Record(cid.binary, 2**63, 2**32 - 1) for cid in CIDS]
    for name in stage(tmp_path):
        pack = staged_pack(store, name)
        pack.write_bytes(packs.unsealed(list(BLOCKS.values())) + packs.table(forged))  # with the right salt
        store.adopt(name, CIDS)
    assert {cid: store.read(cid) for cid in CIDS} == BLOCKS


def test_links_folders_and_pipes_are_not_taken_for_packs(store: Store, tmp_path: Path) -> None:
    for name in stage(tmp_path):
        path = staged_pack(store, name)
        path.rename(tmp_path / "elsewhere")
        before = (tmp_path / "elsewhere").read_bytes()
        path.mkdir()
        with pytest.raises(StoreError):
            store.adopt(name, CIDS)
        path.rmdir()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError):
            store.adopt(name, CIDS)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(IntegrityError, match="no pack"):
            store.adopt(name, CIDS)
        assert (tmp_path / "elsewhere").read_bytes() == before
    assert not any(map(store.has, CIDS))
    assert packs_of(store) == []


def test_a_block_that_nobody_has_is_named(store: Store, tmp_path: Path) -> None:
    with open_staging(tmp_path) as staging:
        for cid in CIDS[1:]:
            staging.write(cid, BLOCKS[cid])
        with pytest.raises(NotFoundError, match=str(FIRST)):
            store.adopt(staging.name, CIDS)
        assert not any(map(store.has, CIDS))
        store.write(FIRST, BLOCKS[FIRST])
        store.adopt(staging.name, CIDS)
    assert {cid: store.read(cid) for cid in CIDS} == BLOCKS


def test_a_stored_block_that_is_damaged_is_not_taken_for_one_that_need_not_be_staged(store: Store, tmp_path: Path) -> None:
    store.write(FIRST, BLOCKS[FIRST])
    damage_block(tmp_path, FIRST, b"wrong")
    with open_staging(tmp_path) as staging:
        for cid in CIDS[1:]:
            staging.write(cid, BLOCKS[cid])
        with pytest.raises(IntegrityError, match=str(FIRST)):
            store.adopt(staging.name, CIDS)
        assert not any(map(store.has, CIDS))


@pytest.mark.parametrize("name", ["", ".", "..", "../blocks", "/etc", "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 31 + "/"])
def test_names_stay_inside_the_staging_folder(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        store.adopt(name, CIDS)


@pytest.mark.parametrize("stored", [False, True], ids=["all staged", "some stored"])
def test_packs_are_synced_before_they_are_moved_before_their_folder_before_the_index_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    artifact = make_artifact(tokens(2, 5))
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def note_rename(old: str, new: str) -> None:
        assert os.path.relpath(old, tmp_path) == f"staging/{staging.name}/blocks.pack"
        events.append("rename " + os.path.relpath(new, tmp_path))
        rename(old, new)

    first = next(iter(artifact.blocks))
    if stored:
        store.write(first, artifact.blocks[first])
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    store.database._writer.set_trace_callback(events.append)
    with open_staging(tmp_path) as staging:
        for cid, data in artifact.blocks.items():
            if cid != first or not stored:
                staging.write(cid, data)
        store.adopt(staging.name, list(artifact.blocks))
    moved = "00000002.pack" if stored else "00000001.pack"
    expected = [f"fsync staging/{staging.name}/blocks.pack", f"rename blocks/{moved}", "fsync blocks"]
    expected += ["fsync blocks/00000001.pack"] if stored else []
    assert events == [*expected, "fsync blocks"]
    store.index.add_artifact(artifact.opened, range(3), durable=True)
    statements = events[len(expected) + 1 :]
    assert statements[:2] == ["PRAGMA synchronous = FULL", "BEGIN IMMEDIATE"]
    assert statements[-1] == "COMMIT"
    store.database._writer.set_trace_callback(None)
    assert store.index.match(artifact.keys)[0].matched == 3


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_what_could_not_be_made_durable_is_not_taken_over(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name in stage(tmp_path):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            with pytest.raises(StoreError):
                store.adopt(name, CIDS)
        assert not any(map(store.has, CIDS))
        assert packs_of(store) == []
        store.adopt(name, CIDS)
    assert {cid: store.read(cid) for cid in CIDS} == BLOCKS


@pytest.mark.parametrize("fits", [0, 64, 1000, 5000])
def test_a_full_disk_is_named_and_leaves_no_folder(tmp_path: Path, fits: int) -> None:
    def write(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(descriptor, b"".join(buffers)[: fits - offset], offset)

    def stage_all() -> None:
        with open_staging(tmp_path, write=write) as staging:
            for cid, data in BLOCKS.items():
                staging.write(cid, data)

    with pytest.raises(DiskFullError):
        stage_all()
    assert os.listdir(HomeLayout(tmp_path).staging) == []


def test_a_block_that_did_not_fit_is_not_among_those_staged(store: Store, tmp_path: Path) -> None:
    full = False

    def write(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(descriptor, buffers, offset)

    with open_staging(tmp_path, write=write) as staging:
        for number, (cid, data) in enumerate(BLOCKS.items()):
            full = number == 5
            with pytest.raises(DiskFullError) if full else nullcontext():
                staging.write(cid, data)
        assert list(staging.cids) == [*CIDS[:5], *CIDS[6:]]
        full = False
        staging.write(CIDS[5], BLOCKS[CIDS[5]])
        store.adopt(staging.name, staging.cids)
    assert {cid: store.read(cid) for cid in CIDS} == BLOCKS


def test_a_start_clears_what_dead_publishers_left_and_spares_the_living(tmp_path: Path) -> None:
    staging = HomeLayout(tmp_path).staging
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            name = process.stdout.readline().decode().strip()
            with open_store(tmp_path) as store:
                assert os.listdir(staging) == [name]
            process.kill()
            process.wait(timeout=20)
            assert os.listdir(staging) == [name]
            (staging / "a stray file").write_text("")
            with open_store(tmp_path) as store:
                assert os.listdir(staging) == ["a stray file"]
                with pytest.raises(NotFoundError):
                    store.adopt(name, [Cid.of_block(b"from afar")])
        finally:
            process.kill()
