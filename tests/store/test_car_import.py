"""Artifacts out of files: nothing believed, nothing listed before all is there, and going on where it was interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pkv.errors import (
    FormatError,
    NotFoundError,
    P2pkvError,
    UntrustedPublisherError,
    UsageError,
)
from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import encode
from p2pkv.formats.manifest import Manifest
from p2pkv.limits import WORK_LEASE_S
from p2pkv.store import car_file, car_reading
from p2pkv.store.car_file import CarArtifact, export_car, import_car
from p2pkv.store.progress import Progress, Step, ignore
from p2pkv.store.store import Store, open_store
from tests.support.artifacts import Sample
from tests.support.cars import (
    LONG,
    SAMPLE,
    SIZE,
    Left,
    after,
    assert_kept,
    blocks_of,
    car,
    changed,
    data_blocks,
    forged,
    hold,
    in_order,
    signed,
    whole,
    without,
)
from tests.support.stores import flip_block


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "home") as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder / "artifact.car"


def take(store: Store, file: Path, on_progress: Progress = ignore) -> CarArtifact:
    return import_car(store, file, judge=lambda manifest, cid: None, on_progress=on_progress)


def listed(store: Store) -> list[tuple[Cid, bool]]:
    return [(row.manifest_cid, row.complete) for row in store.index.artifacts()]


@pytest.mark.parametrize("sample", [SAMPLE, LONG], ids=["inline tokens", "a block of tokens"])
def test_an_import_stores_and_lists_all_of_it(store: Store, file: Path, sample: Sample) -> None:
    file.write_bytes(whole(sample))
    heard: list[tuple[Step, int, int]] = []
    imported = take(store, file, lambda *moment: heard.append(moment))
    size = file.stat().st_size
    new = sum(map(len, sample.blocks.values()))
    assert (imported.artifact.cid, imported.blocks) == (sample.cid, len(sample.blocks))
    assert (imported.file_bytes, imported.new_bytes) == (size, new)
    assert listed(store) == [(sample.cid, True)]
    assert {cid: store.read(cid) for cid in sample.blocks} == sample.blocks
    assert [step for step, *_ in heard] == [Step.READING] * (len(heard) - 1) + [Step.SYNCING]
    assert heard[-1][1:] == (size, size)
    assert store.holds.counts() == (0, 0)
    assert take(store, file).new_bytes == 0


def test_an_import_is_on_the_disk_before_it_is_listed(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, add = store.blocks.sync, store.index.add_artifact

    def note_sync(cids: object) -> None:
        events.append("sync")
        sync(cids)  # type: ignore[arg-type]

    def note_add(*arguments: object, **options: object) -> None:
        assert options == {"durable": True}
        events.append("list")
        add(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store.blocks, "sync", note_sync)
    monkeypatch.setattr(store.index, "add_artifact", note_add)
    file.write_bytes(whole(SAMPLE))
    take(store, file)
    assert events == ["sync", "list"]


@pytest.mark.parametrize("heard", [0, 1, 3])
def test_an_interrupted_import_goes_on_where_it_was(
    tmp_path: Path, file: Path, heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart and a collection: what was stored is not written again, and nothing is listed before the end."""
    monkeypatch.setattr(car_reading, "_PIECE_BYTES", len(whole(SAMPLE)) // 5)
    file.write_bytes(whole(SAMPLE))
    with open_store(tmp_path / "home") as store:
        with pytest.raises(Left):
            take(store, file, after(heard))
        stored = {cid for cid in SAMPLE.blocks if store.has(cid)}
        assert listed(store) == []
    with open_store(tmp_path / "home") as store:
        assert store.collector.collect().blocks == 0
        before = sum(len(SAMPLE.blocks[cid]) for cid in stored)
        assert 0 < before < SIZE
        assert take(store, file).new_bytes == SIZE - before
        assert listed(store) == [(SAMPLE.cid, True)]


def test_what_an_import_left_is_collected_when_its_lease_is_over(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_bytes(whole(SAMPLE))
    with pytest.raises(Left):
        take(store, file, after(0))
    assert store.collector.collect().blocks == 0
    clock = store.collector._clock
    monkeypatch.setattr(store.collector, "_clock", lambda: clock() + WORK_LEASE_S + 2)
    assert store.collector.collect().blocks == len(SAMPLE.blocks)


def test_an_import_is_not_collected_meanwhile(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(car_reading, "_PIECE_BYTES", 4096)
    file.write_bytes(whole(SAMPLE))
    take(store, file, lambda *_: assert_kept(store))
    assert {cid: store.read(cid) for cid in SAMPLE.blocks} == SAMPLE.blocks


def test_a_damaged_block_is_mended_by_an_import(store: Store, file: Path) -> None:
    hold(store, SAMPLE)
    file.write_bytes(whole(SAMPLE))
    victim = data_blocks(SAMPLE)[3]
    flip_block(Path(store.blocks.folder).parent, victim, 8 * 7)
    assert take(store, file).new_bytes == len(SAMPLE.blocks[victim])
    assert store.read(victim) == SAMPLE.blocks[victim]


@pytest.mark.parametrize("stored", [1, 4, -1])
def test_what_is_stored_may_be_missing_in_the_file(store: Store, file: Path, stored: int) -> None:
    there = in_order(SAMPLE)[stored]
    store.write(there, SAMPLE.blocks[there])
    file.write_bytes(without(SAMPLE, there))
    imported = take(store, file)
    assert (imported.blocks, imported.new_bytes) == (len(SAMPLE.blocks), SIZE - len(SAMPLE.blocks[there]))
    assert listed(store) == [(SAMPLE.cid, True)]


def test_nothing_is_stored_of_what_is_not_trusted(store: Store, file: Path) -> None:
    def refuse(manifest: Manifest, cid: Cid) -> None:
        raise UntrustedPublisherError(f"{manifest.publisher} is a stranger")

    file.write_bytes(whole(SAMPLE))
    with pytest.raises(UntrustedPublisherError):
        import_car(store, file, judge=refuse)
    assert store.statistics().blocks == 0
    assert store.holds.counts() == (0, 0)


def test_what_is_no_file(store: Store, file: Path) -> None:
    pipe = file.with_name("pipe")
    os.mkfifo(pipe)
    for path in (file, file.parent, file / "below", pipe, Path("/dev/zero")):
        with pytest.raises(UsageError, match="there is no file"):
            take(store, path)


STRANGER = (Cid.of_block(b"stranger"), b"stranger")
NO_ENVELOPE = encode({"kind": "something", "version": 1})
REFUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("format.truncated", lambda: b""),
    "no CAR": ("format.invalid", lambda: b"\xff" * 100),
    "cut off": ("format.truncated", lambda: whole(SAMPLE)[:-1]),
    "header alone": ("format.invalid", lambda: car([SAMPLE.cid], [])),
    "CAR v2": ("format.version", lambda: bytes.fromhex("0aa16776657273696f6e02") + whole(SAMPLE)),
    "garbage behind": ("format.invalid", lambda: whole(SAMPLE) + b"\0"),
    "wrong envelope": ("integrity.hash", lambda: changed(SAMPLE, in_order(SAMPLE)[0])),
    "wrong node": ("integrity.hash", lambda: changed(SAMPLE, in_order(SAMPLE)[2])),
    "wrong block": ("integrity.hash", lambda: changed(SAMPLE, in_order(SAMPLE)[-1])),
    "no root": ("format.invalid", lambda: without(SAMPLE, SAMPLE.cid)),
    "no node": ("fetch.incomplete", lambda: without(SAMPLE, in_order(SAMPLE)[3], *in_order(SAMPLE)[-2:])),
    "no block": ("fetch.incomplete", lambda: without(SAMPLE, in_order(SAMPLE)[-2])),
    "two roots": ("format.invalid", lambda: car([SAMPLE.cid, in_order(SAMPLE)[1]], blocks_of(SAMPLE))),
    "a block as root": ("format.invalid", lambda: car([STRANGER[0]], [STRANGER])),
    "a node as root": ("format.manifest", lambda: car([Cid.of_node(NO_ENVELOPE)], [(Cid.of_node(NO_ENVELOPE), NO_ENVELOPE)])),
    "a stranger's block": ("format.invalid", lambda: car([SAMPLE.cid], [*blocks_of(SAMPLE), STRANGER])),
    "blocks before nodes": (
        "format.invalid",
        lambda: car([SAMPLE.cid], [*blocks_of(SAMPLE)[:1], *blocks_of(SAMPLE)[:0:-1]]),
    ),
    "forged": ("integrity.signature", lambda: forged(SAMPLE)),
    "segments changed about": ("format.manifest", lambda: signed(SAMPLE, segments=SAMPLE.artifact.manifest.segments[::-1])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_not_listed(store: Store, file: Path, name: str) -> None:
    code, make = REFUSED[name]
    file.write_bytes(make())
    with pytest.raises(P2pkvError) as caught:
        take(store, file)
    assert caught.value.code == code
    assert listed(store) == []
    assert not store.has(STRANGER[0])


def test_a_block_of_tokens_comes_before_the_nodes(store: Store, file: Path) -> None:
    envelope, tokens, *rest = blocks_of(LONG)
    file.write_bytes(car([LONG.cid], [envelope, *rest, tokens]))
    with pytest.raises(FormatError, match="token ids"):
        take(store, file)
    assert listed(store) == []


def test_an_import_that_took_longer_than_its_lease_says_so_and_lists_nothing(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept: the lease may be over, and what it kept may be gone."""
    file.write_bytes(whole(SAMPLE))
    monkeypatch.setattr(car_file, "WORK_LEASE_S", -2.0)
    with pytest.raises(NotFoundError, match="lease"):
        take(store, file)
    assert listed(store) == []


def test_what_is_under_way_to_the_disk_is_bounded(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sync of a large file would else hold up whoever ends the work."""
    synced: list[int] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(car_file, "_SYNC_BYTES", SIZE // 4)
    monkeypatch.setattr(os, "fsync", note)
    file.write_bytes(whole(SAMPLE))
    take(store, file)
    of_import = len(synced)
    export_car(store, SAMPLE.cid, file)
    assert of_import > 2 * 3  # each time the pack and its folder
    assert len(synced) - of_import > 4


KILLED = """
import os, signal, sys
from pathlib import Path
from p2pkv.formats.cid import Cid
from p2pkv.store import car_file, car_reading
from p2pkv.store.store import open_store

left = int(sys.argv[4])

def hear(step, done, total):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

car_reading._PIECE_BYTES = 4096
with open_store(Path(sys.argv[2])) as store:
    if sys.argv[1] == "import":
        car_file.import_car(store, Path(sys.argv[3]), judge=lambda manifest, cid: None, on_progress=hear)
    else:
        (row,) = store.index.artifacts()
        car_file.export_car(store, row.manifest_cid, Path(sys.argv[3]), hear)
"""


@pytest.mark.parametrize("heard", [1, 5])
def test_a_kill_leaves_no_hidden_file_and_the_next_goes_on(tmp_path: Path, file: Path, heard: int) -> None:
    home = tmp_path / "home"

    def kill(what: str, path: Path) -> None:
        arguments = [sys.executable, "-c", KILLED, what, str(home), str(path), str(heard)]
        assert subprocess.run(arguments, check=False, timeout=50).returncode == -signal.SIGKILL

    file.write_bytes(whole(SAMPLE))
    kill("import", file)
    with open_store(home) as store:
        assert listed(store) == []
        here = sum(len(data) for cid, data in SAMPLE.blocks.items() if store.has(cid))
        assert 0 < here < SIZE
        assert take(store, file).new_bytes == SIZE - here
    target = file.with_name("target.car")
    kill("export", target)
    assert sorted(os.listdir(file.parent)) == [file.name, "target.car.part"]
    with open_store(home) as store:
        assert store.holds.counts()[1] <= 2  # those of import and export, which end by themselves
        export_car(store, SAMPLE.cid, target)
    assert sorted(os.listdir(file.parent)) == [file.name, target.name]
    assert target.read_bytes() == whole(SAMPLE)
    assert os.listdir(home / "staging") == []
