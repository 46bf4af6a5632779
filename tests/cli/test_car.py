"""``export`` and ``import``: what was written is taken over whole, and anything else not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey

from p2pkv.artifact.build import ArtifactBuilder, Terms
from p2pkv.artifact.read import open_artifact
from p2pkv.formats.car import encode_header, encode_section
from p2pkv.formats.cid import Cid
from p2pkv.formats.dagcbor import encode
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import layer_bytes
from p2pkv.keys import segment_bounds
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv_node.embedded import embedded_node
from tests.cli.artifacts import data_blocks, envelope_file, store
from tests.cli.conftest import Cli
from tests.cli.daemon import FakeDaemon
from tests.support.artifacts import KEY, PUBLISHER, Sample, make_sample, model
from tests.support.stores import flip_block

NOW = int(time.time())
TOKENS = [number % 500 for number in range(600)]
# One more than a manifest holds inline: the token ids are in a block of their own.
LONG = [number % 500 for number in range(65_537)]
PUBLISH = ("POST", "/v1/publish")

Blocks = list[tuple[Cid, bytes]]


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


def in_order(sample: Sample) -> list[Cid]:
    manifest = sample.artifact.manifest
    tokens = [manifest.tokens.cid] if manifest.tokens.cid is not None else []
    return [*dict.fromkeys([sample.cid, *tokens, *manifest.segments, *data_blocks(sample)])]


def blocks_of(sample: Sample) -> Blocks:
    return [(cid, sample.blocks[cid]) for cid in in_order(sample)]


def car(roots: list[Cid], blocks: Blocks) -> bytes:
    return encode_header(roots) + b"".join(encode_section(cid, data) for cid, data in blocks)


def whole(sample: Sample) -> bytes:
    return car([sample.cid], blocks_of(sample))


def left_in_staging(home: Path) -> list[str]:
    folder = HomeLayout(home).staging
    return os.listdir(folder) if folder.is_dir() else []


# --- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [TOKENS, LONG], ids=["inline tokens", "a block of tokens"])
def test_export_writes_envelope_tokens_nodes_and_blocks(
    cli: Cli, home: Path, file: Path, sample: Sample, tokens: list[int]
) -> None:
    if tokens is LONG:
        sample = long_sample()
    store(home, sample)
    written = cli("export", sample.cid, file, "--json")
    assert (written.status, written.err) == (0, "")
    assert file.read_bytes() == whole(sample)
    assert written.document == {
        "manifest": str(sample.cid),
        "file": str(file),
        "tokens": len(tokens),
        "blocks": len(sample.blocks),
        "bytes": file.stat().st_size,
    }
    assert os.listdir(file.parent) == [file.name]


def long_sample() -> Sample:
    """Return an artifact whose token ids are a block; the manifest alone does not open it."""
    blocks: dict[Cid, bytes] = {}
    description = model()
    builder = ArtifactBuilder(description, LONG, lambda cid, data: blocks.__setitem__(cid, bytes(data)))
    for start, end in pairwise(segment_bounds(len(LONG))):
        builder.add_segment([bytes(layer_bytes(g, end - start, description.dtype)) for g in description.layers])
    envelope = Envelope.sign(builder.finish(Terms(PUBLISHER, sequence=1, created=NOW), {}), KEY)
    blocks[envelope.cid] = envelope.encode()
    tokens = envelope.open().tokens.cid
    assert tokens is not None
    return Sample(open_artifact(envelope.cid, blocks[envelope.cid], blocks[tokens]), blocks)


def test_export_tells_what_it_wrote_and_how_far_it_is(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    store(home, sample)
    written = cli("export", sample.cid, file)
    assert written.out.splitlines()[:2] == [f"manifest  {sample.cid}", f"file      {file}"]
    assert written.out.splitlines()[2].startswith("size      600 tokens, ")
    assert written.err.splitlines()[-1].startswith("writing: 100 %, ")


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
    assert file.read_bytes() == b"of before"


def test_export_refuses_an_artifact_without_its_block_of_tokens(cli: Cli, home: Path, file: Path) -> None:
    sample = long_sample()
    store(home, sample, without=[in_order(sample)[1]])
    assert cli("export", sample.cid, file, "--json").error["code"] == "fetch.incomplete"


@pytest.mark.parametrize("position", [0, 1, -1])
def test_export_leaves_nothing_of_a_damaged_artifact(cli: Cli, home: Path, file: Path, sample: Sample, position: int) -> None:
    store(home, sample)
    flip_block(home, in_order(sample)[position], 8 * 7)
    told = cli("export", sample.cid, file, "--json")
    assert (told.status, told.error["code"]) == (3, "integrity.hash")
    assert os.listdir(file.parent) == []


def test_export_says_where_it_cannot_write(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    store(home, sample)
    assert cli("export", sample.cid, file.parent, "--json").error["code"] == "usage"
    assert cli("export", sample.cid, file / "no" / "folder", "--json").error["code"] == "store.io"


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("command", ["export", "import"])
def test_an_interrupted_command_leaves_nothing(
    cli: Cli, home: Path, daemon: FakeDaemon, file: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    reads = iter(range(6))

    def read(blocks: StoredBlocks, cid: Cid) -> bytes:
        if next(reads, None) is None:
            raise KeyboardInterrupt
        return real(blocks, cid)

    real = StoredBlocks.read
    store(home, sample)
    if command == "import":
        file.write_bytes(whole(sample))
    monkeypatch.setattr(StoredBlocks, "read", read)
    told = cli(*(["export", sample.cid, file] if command == "export" else ["import", file]), "--json")
    assert (told.status, told.error["code"]) == (130, "interrupted")
    assert os.listdir(file.parent) == ([file.name] if command == "import" else [])
    assert daemon.requests == []
    assert left_in_staging(home) == []


# --- import ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trusted")
def test_a_real_node_takes_over_what_another_home_exported(cli: Cli, home: Path, tmp_path: Path, file: Path) -> None:
    sample = long_sample()
    store(tmp_path / "other", sample)
    assert cli("export", sample.cid, file, "--home", tmp_path / "other").status == 0
    with embedded_node(home):
        imported = cli("import", file, "--json")
        assert (imported.status, imported.err) == (0, "")
        assert imported.document == {
            "manifest": str(sample.cid),
            "publisher": PUBLISHER,
            "tokens": len(LONG),
            "blocks": len(sample.blocks),
            "bytes": file.stat().st_size,
            "staged_bytes": sum(map(len, sample.blocks.values())),
        }
        (row,) = cli("status", "--json").document["artifacts"]
        assert (row["manifest_cid"], row["complete"]) == (str(sample.cid), True)
        assert cli("verify", sample.cid).status == 0
        again = cli("import", file, "--json")
        assert (again.status, again.document["staged_bytes"]) == (0, 0)
        assert cli("export", sample.cid, file.with_name("again.car")).status == 0
    assert file.with_name("again.car").read_bytes() == file.read_bytes()
    assert left_in_staging(home) == []


@pytest.mark.usefixtures("trusted")
def test_a_real_node_mends_a_damaged_block_by_an_import(cli: Cli, home: Path, file: Path, sample: Sample) -> None:
    store(home, sample)
    file.write_bytes(whole(sample))
    victim = data_blocks(sample)[3]
    flip_block(home, victim, 8 * 7)
    with embedded_node(home):
        imported = cli("import", file, "--json")
        assert (imported.status, imported.document["staged_bytes"]) == (0, len(sample.blocks[victim]))
        assert cli("verify", sample.cid).status == 0


@pytest.mark.usefixtures("trusted")
def test_import_hands_over_all_of_the_artifact_by_name(
    cli: Cli, home: Path, daemon: FakeDaemon, file: Path, sample: Sample
) -> None:
    daemon.answers[PUBLISH] = 201, {"manifest": str(sample.cid), "segments": 3}
    file.write_bytes(whole(sample))
    imported = cli("import", file)
    assert imported.status == 0
    assert imported.out.splitlines()[0] == f"manifest   {sample.cid}"
    assert imported.err.splitlines()[-1].startswith("reading: 100 %, ")
    ((method, path, body),) = daemon.requests
    assert (method, path) == PUBLISH
    assert body["manifest"] == str(sample.cid)
    assert body["cids"] == [str(cid) for cid in in_order(sample)]
    assert left_in_staging(home) == []


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("stored", [0, 1, 4, -1])
def test_what_is_stored_is_not_written_again_and_may_be_missing_in_the_file(
    cli: Cli, home: Path, daemon: FakeDaemon, file: Path, sample: Sample, stored: int
) -> None:
    daemon.answers[PUBLISH] = 201, {"manifest": str(sample.cid), "segments": 3}
    there = in_order(sample)[stored]
    store(home, sample, without=[cid for cid in sample.blocks if cid != there])
    left = [(cid, data) for cid, data in blocks_of(sample) if cid in (sample.cid,) or cid != there]  # the root always comes
    for blocks in (blocks_of(sample), left):
        file.write_bytes(car([sample.cid], blocks))
        imported = cli("import", file, "--json")
        assert imported.status == 0, imported
        assert imported.document["staged_bytes"] == sum(map(len, sample.blocks.values())) - len(sample.blocks[there])
        assert sorted(daemon.requests.pop()[2]["cids"]) == sorted(map(str, sample.blocks))


@pytest.mark.usefixtures("trusted")
def test_an_error_of_the_node_is_told_and_nothing_is_left(
    cli: Cli, home: Path, daemon: FakeDaemon, file: Path, sample: Sample
) -> None:
    daemon.answers[PUBLISH] = 507, {"error": {"code": "store.full", "message": "full"}}
    file.write_bytes(whole(sample))
    assert cli("import", file, "--json").error["code"] == "store.full"
    assert left_in_staging(home) == []


def test_import_needs_a_daemon_and_a_file(cli: Cli, daemon: FakeDaemon, file: Path, tmp_path: Path) -> None:
    assert cli("import", file, "--json").error["code"] == "usage"
    assert cli("import", file.parent, "--json").error["code"] == "usage"
    assert cli("import", file, "--home", tmp_path / "nobody", "--json").error["code"] == "daemon.unreachable"
    assert daemon.requests == []


def _changed(sample: Sample, cid: Cid) -> Blocks:
    return [(name, data[:-1] + bytes([data[-1] ^ 1]) if name == cid else data) for name, data in blocks_of(sample)]


def _without(sample: Sample, cid: Cid) -> Blocks:
    return [(name, data) for name, data in blocks_of(sample) if name != cid]


def _forged(sample: Sample) -> bytes:
    data = replace(Envelope.decode(sample.blocks[sample.cid]), signature=bytes(64)).encode()
    return car([Cid.of_node(data)], [(Cid.of_node(data), data), *blocks_of(sample)[1:]])


def _signed(sample: Sample, **changes: Any) -> bytes:
    data = Envelope.sign(replace(sample.artifact.manifest, **changes), KEY).encode()
    return car([Cid.of_node(data)], [(Cid.of_node(data), data), *blocks_of(sample)[1:]])


STRANGER = (Cid.of_block(b"stranger"), b"stranger")
NO_ENVELOPE = encode({"kind": "something", "version": 1})
REFUSED: dict[str, tuple[str, Callable[[Sample], bytes]]] = {
    "empty": ("format.truncated", lambda sample: b""),
    "no CAR": ("format.invalid", lambda sample: b"\xff" * 100),
    "cut off": ("format.truncated", lambda sample: whole(sample)[:-1]),
    "header alone": ("format.invalid", lambda sample: car([sample.cid], [])),
    "CAR v2": ("format.version", lambda sample: bytes.fromhex("0aa16776657273696f6e02") + whole(sample)),
    "garbage behind": ("format.invalid", lambda sample: whole(sample) + b"\0"),
    "wrong envelope": ("integrity.hash", lambda sample: car([sample.cid], _changed(sample, in_order(sample)[0]))),
    "wrong node": ("integrity.hash", lambda sample: car([sample.cid], _changed(sample, in_order(sample)[2]))),
    "wrong block": ("integrity.hash", lambda sample: car([sample.cid], _changed(sample, in_order(sample)[-1]))),
    "no root": ("format.invalid", lambda sample: car([sample.cid], _without(sample, sample.cid))),
    "no node": ("fetch.incomplete", lambda sample: car([sample.cid], _without(sample, in_order(sample)[3])[:-2])),
    "no block": ("fetch.incomplete", lambda sample: car([sample.cid], _without(sample, in_order(sample)[-2]))),
    "two roots": ("format.invalid", lambda sample: car([sample.cid, in_order(sample)[1]], blocks_of(sample))),
    "a block as root": ("format.invalid", lambda sample: car([STRANGER[0]], [STRANGER])),
    "a node as root": (
        "format.manifest",
        lambda sample: car([Cid.of_node(NO_ENVELOPE)], [(Cid.of_node(NO_ENVELOPE), NO_ENVELOPE)]),
    ),
    "a stranger's block": ("format.invalid", lambda sample: car([sample.cid], [*blocks_of(sample), STRANGER])),
    "blocks before nodes": (
        "format.invalid",
        lambda sample: car([sample.cid], [*blocks_of(sample)[:1], *blocks_of(sample)[:0:-1]]),
    ),
    "forged": ("integrity.signature", _forged),
    "segments changed about": (
        "format.manifest",
        lambda sample: _signed(sample, segments=sample.artifact.manifest.segments[::-1]),
    ),
    "expired": ("trust.expired", lambda sample: _signed(sample, expires=NOW - 3600)),
    "untrusted": ("trust.untrusted", lambda sample: whole(make_sample(TOKENS, key=SigningKey(bytes(32)), created=NOW))),
}


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_never_reaches_the_node(
    cli: Cli, home: Path, daemon: FakeDaemon, file: Path, sample: Sample, name: str
) -> None:
    daemon.answers[PUBLISH] = 201, {"manifest": str(sample.cid), "segments": 3}
    code, make = REFUSED[name]
    file.write_bytes(make(sample))
    told = cli("import", file, "--json")
    assert (told.out, told.error["code"]) == ("", code)
    assert told.status in (3, 4, 5)
    assert daemon.requests == []
    assert left_in_staging(home) == []


def test_a_block_of_tokens_comes_before_the_nodes(cli: Cli, daemon: FakeDaemon, file: Path) -> None:
    sample = long_sample()
    assert cli("trust", "add", PUBLISHER).status == 0
    envelope, tokens, *rest = blocks_of(sample)
    file.write_bytes(car([sample.cid], [envelope, *rest, tokens]))
    assert cli("import", file, "--json").error["code"] == "format.invalid"
    assert daemon.requests == []
