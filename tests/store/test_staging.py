from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from p2pkv.errors import DiskFullError, IntegrityError, NotFoundError, StoreError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.ports import Buffer
from p2pkv.store.home import HomeLayout
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store, open_store
from tests.store.builders import make_artifact, tokens

BLOCKS = {Cid.of_block(data): data for data in (bytes([number]) * 1000 for number in range(20))}
CIDS = list(BLOCKS)
FIRST = CIDS[0]

PUBLISHER = """
import sys
from pathlib import Path
from p2pkv.formats.cid import Cid
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
    assert {cid: store.read(cid) for cid in CIDS} == BLOCKS
    assert store.statistics().blocks == len(BLOCKS)


def test_one_damaged_file_and_nothing_is_taken_over(store: Store, tmp_path: Path) -> None:
    for name in stage(tmp_path, {CIDS[-1]: b"not what was hashed"}):
        with pytest.raises(IntegrityError, match=str(CIDS[-1])):
            store.adopt(name, CIDS)
    assert not any(map(store.has, CIDS))


def test_links_and_folders_are_not_taken_for_blocks(store: Store, tmp_path: Path) -> None:
    for name in stage(tmp_path):
        path = store.layout.staging / name / str(FIRST)
        (tmp_path / "elsewhere").write_bytes(BLOCKS[FIRST])
        path.unlink()
        path.mkdir()
        with pytest.raises(IntegrityError):
            store.adopt(name, CIDS)
        path.rmdir()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError):
            store.adopt(name, CIDS)


def test_a_block_that_nobody_has_is_named(store: Store, tmp_path: Path) -> None:
    for name in stage(tmp_path):
        (store.layout.staging / name / str(FIRST)).unlink()
        with pytest.raises(NotFoundError, match=str(FIRST)):
            store.adopt(name, CIDS)
        assert not any(map(store.has, CIDS))
        store.write(FIRST, BLOCKS[FIRST])
        store.adopt(name, CIDS)


@pytest.mark.parametrize("name", ["", ".", "..", "../blocks", "/etc", "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 31 + "/"])
def test_names_stay_inside_the_staging_folder(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        store.adopt(name, CIDS)


def test_files_are_synced_before_folders_before_the_index_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make_artifact(tokens(2, 5))
    events: list[str] = []
    sync_names, fsync = store.blocks.sync_names, os.fsync

    def note_fsync(descriptor: int) -> None:
        events.append("fsync")
        fsync(descriptor)

    def note_sync_names(cids: Iterable[Cid]) -> None:
        events.append("folders")
        sync_names(cids)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(store.blocks, "sync_names", note_sync_names)
    store.index._writer.set_trace_callback(events.append)
    with open_staging(tmp_path) as staging:
        for cid, data in artifact.blocks.items():
            staging.write(cid, data)
        store.adopt(staging.name, staging.cids)
    store.index.add_artifact(artifact.opened, range(3), durable=True)
    files_synced = events.index("folders")
    assert events[:files_synced] == ["fsync"] * len(artifact.blocks)
    statements = events[len(events) - events[::-1].index("fsync") :]
    assert statements[:2] == ["PRAGMA synchronous = FULL", "BEGIN IMMEDIATE"]
    assert statements[-1] == "COMMIT"
    store.index._writer.set_trace_callback(None)
    assert store.index.match(artifact.keys)[0].matched == 3


def test_a_full_disk_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    def write(descriptor: int, data: Buffer) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError), open_staging(tmp_path, write=write) as staging:
        staging.write(FIRST, BLOCKS[FIRST])
    assert os.listdir(HomeLayout(tmp_path).staging) == []


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
