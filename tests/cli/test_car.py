"""``export`` and ``import``: what was written is taken over whole, and anything else not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from p2pkv.cli import export
from p2pkv.formats.cid import Cid
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv_node.embedded import embedded_node
from tests.cli.artifacts import envelope_file, store
from tests.cli.conftest import Cli
from tests.cli.daemon import FakeDaemon, file_progress
from tests.support.artifacts import PUBLISHER, Sample, make_sample
from tests.support.cars import in_order, long_sample, signed, whole

NOW = int(time.time())
TOKENS = [number % 500 for number in range(600)]


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(TOKENS, created=NOW)


@pytest.fixture
def trusted(cli: Cli) -> None:
    assert cli("trust", "add", PUBLISHER).status == 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder / "artifact.car"


# --- export ------------------------------------------------------------------------------------------------------------


def test_export_writes_the_artifact_without_a_node(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    store(home, sample)
    written = cli("export", sample.cid, file, "--json")
    assert (written.status, written.err) == (0, "")
    assert file.read_bytes() == whole(sample)
    assert written.document == {
        "manifest": str(sample.cid),
        "file": str(file),
        "tokens": 600,
        "blocks": len(sample.blocks),
        "bytes": file.stat().st_size,
    }
    assert os.listdir(file.parent) == [file.name]


def test_export_tells_what_it_wrote_and_how_far_it_is(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    store(home, sample)
    written = cli("export", sample.cid, file)
    assert written.out.splitlines()[:2] == [f"manifest  {sample.cid}", f"file      {file}"]
    assert written.out.splitlines()[2].startswith("size      600 tokens, ")
    assert written.err.splitlines()[-1].startswith("syncing to the disk: 100 %, ")


def test_export_takes_an_envelope_file_whose_blocks_are_stored(
    cli: Cli, home: Path, tmp_path: Path, file: Path, sample: Sample
) -> None:
    assert cli("export", envelope_file(tmp_path, sample), file, "--json").error["code"] == "fetch.incomplete"
    store(home, sample, without=[sample.cid])
    assert cli("export", envelope_file(tmp_path, sample), file).status == 0
    assert file.read_bytes() == whole(sample)


@pytest.mark.parametrize("position", [1, 2, 5, -1])
def test_export_refuses_an_artifact_that_is_not_whole(cli: Cli, home: Path, file: Path, sample: Sample, position: int) -> None:
    store(home, sample, without=[in_order(sample)[position]])
    file.write_bytes(b"of before")
    told = cli("export", sample.cid, file, "--json")
    assert (told.status, told.error["code"]) == (4, "fetch.incomplete")
    assert f"p2pkv fetch {sample.cid}" in told.error["advice"]
    assert (file.read_bytes(), os.listdir(file.parent)) == (b"of before", [file.name])


def test_export_says_where_it_cannot_write(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    store(home, sample)
    assert cli("export", sample.cid, file.parent, "--json").error["code"] == "usage"
    assert cli("export", sample.cid, file / "no" / "folder", "--json").error["code"] == "store.io"


def test_an_interrupted_export_goes_on_with_its_part(
    cli: Cli, home: Path, file: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter(range(6))

    def read(blocks: StoredBlocks, cid: Cid) -> bytes:
        if next(reads, None) is None:
            raise KeyboardInterrupt
        return real(blocks, cid)

    real = StoredBlocks.read
    store(home, sample)
    with monkeypatch.context() as patched:
        patched.setattr(StoredBlocks, "read", read)
        told = cli("export", sample.cid, file, "--json")
    assert (told.status, told.error["code"]) == (130, "interrupted")
    assert "FILE.part" in told.error["advice"]
    assert os.listdir(file.parent) == [f"{file.name}.part"]
    assert cli("export", sample.cid, file).status == 0
    assert os.listdir(file.parent) == [file.name]
    assert file.read_bytes() == whole(sample)


# --- by the node -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trusted")
def test_a_real_node_takes_over_what_another_home_exported(
    cli: Cli, home: Path, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = long_sample([number % 500 for number in range(65_537)], created=NOW)
    store(tmp_path / "other", sample)
    assert cli("export", sample.cid, file, "--home", tmp_path / "other").status == 0
    with embedded_node(home):
        imported = cli("import", file, "--json")
        assert (imported.status, imported.err) == (0, "")
        assert imported.document == {
            "manifest": str(sample.cid),
            "publisher": PUBLISHER,
            "tokens": 65_537,
            "blocks": len(sample.blocks),
            "bytes": file.stat().st_size,
            "new_bytes": sum(map(len, sample.blocks.values())),
        }
        (row,) = cli("status", "--json").document["artifacts"]
        assert (row["manifest_cid"], row["complete"]) == (str(sample.cid), True)
        assert cli("verify", sample.cid).status == 0
        again = cli("import", file, "--json")
        assert (again.status, again.document["new_bytes"]) == (0, 0)
        monkeypatch.delattr(export, "write_car")  # it is the node that writes
        target = file.with_name("again.car")
        exported = cli("export", sample.cid, target, "--json")
        assert (exported.status, exported.err) == (0, "")
        assert exported.document == {
            "manifest": str(sample.cid),
            "file": str(target),
            "tokens": 65_537,
            "blocks": len(sample.blocks),
            "bytes": file.stat().st_size,
        }
        assert cli("export", Cid.of_node(b"nobody"), target, "--json").error["code"] == "artifact.not_found"
    assert target.read_bytes() == file.read_bytes()


def test_import_tells_what_it_took_over_and_how_far_it_is(cli: Cli, daemon: FakeDaemon, file: Path, sample: Sample) -> None:
    report = {
        "manifest": str(sample.cid),
        "publisher": PUBLISHER,
        "tokens": 600,
        "blocks": 9,
        "bytes": 2048,
        "new_bytes": 1024,
    }
    daemon.events = [file_progress(1024, 2048, "reading"), {"event": "report", **report}]
    imported = cli("import", file)
    assert imported.status == 0
    assert imported.out.splitlines() == [
        f"manifest   {sample.cid}",
        f"publisher  {PUBLISHER}",
        "size       600 tokens, 2.0 KiB, 1.0 KiB of it were not here already",
    ]
    assert imported.err.splitlines()[-1] == "reading: 50 %, 1.0 KiB of 2.0 KiB"
    assert daemon.requests == [("POST", "/v1/import", {"path": str(file)})]
    assert cli("import", file, "--json").document == report


def test_a_path_is_told_as_the_node_sees_it(
    cli: Cli, daemon: FakeDaemon, file: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.events = [{"event": "error", "code": "usage", "message": "there is no file"}]
    monkeypatch.chdir(file.parent)
    assert cli("import", "artifact.car", "--json").error["code"] == "usage"
    assert daemon.requests[-1][2] == {"path": str(file)}
    told = cli("import", os.fsdecode(b"\xff.car"), "--json")
    assert told.error["code"] == "usage"
    assert "UTF-8" in told.error["message"]


def test_a_node_that_ends_before_its_report(cli: Cli, daemon: FakeDaemon, file: Path) -> None:
    daemon.events = [file_progress(1024, 2048, "reading")]
    told = cli("import", file, "--json")
    assert (told.status, told.error["code"]) == (4, "daemon.unreachable")
    assert "resume" in told.error["advice"]


def test_import_needs_a_daemon_and_a_file(cli: Cli, home: Path, file: Path, tmp_path: Path) -> None:
    assert cli("import", file, "--home", tmp_path / "nobody", "--json").error["code"] == "daemon.unreachable"
    with embedded_node(home):
        assert cli("import", file, "--json").error["code"] == "usage"
        assert cli("import", file.parent, "--json").error["code"] == "usage"


REFUSED: dict[str, tuple[str, int, Callable[[Sample], bytes]]] = {
    "cut off": ("format.truncated", 3, lambda sample: whole(sample)[:-1]),
    "expired": ("trust.expired", 5, lambda sample: signed(sample, expires=NOW - 3600)),
    "untrusted": ("trust.untrusted", 5, lambda sample: whole(make_sample(TOKENS, key=SigningKey(bytes(32)), created=NOW))),
}


@pytest.mark.usefixtures("trusted")
def test_what_is_refused_is_not_listed(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    with embedded_node(home):
        for code, status, make in REFUSED.values():
            file.write_bytes(make(sample))
            told = cli("import", file, "--json")
            assert (told.out, told.error["code"], told.status) == ("", code, status)
        assert cli("status", "--json").document["artifacts"] == []
