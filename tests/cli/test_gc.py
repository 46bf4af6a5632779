"""``gc``, ``pin``, ``unpin``, ``pins`` and ``remove``, against a real node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.formats.car import encode_header, encode_section
from p2pkv_node.embedded import embedded_node
from tests.cli.conftest import Cli
from tests.support.artifacts import PUBLISHER, Sample, make_sample
from tests.support.cars import data_blocks

SAMPLE = make_sample([number % 500 for number in range(600)], created=int(time.time()))


@pytest.fixture
def stored(cli: Cli, home: Path, tmp_path: Path) -> Iterator[Sample]:
    """A sample that a running node lists."""
    order = dict.fromkeys([SAMPLE.cid, *SAMPLE.artifact.manifest.segments, *data_blocks(SAMPLE)])
    file = tmp_path / "sample.car"
    file.write_bytes(encode_header([SAMPLE.cid]) + b"".join(encode_section(cid, SAMPLE.blocks[cid]) for cid in order))
    assert cli("trust", "add", PUBLISHER).status == 0
    with embedded_node(home):
        assert cli("import", file).status == 0
        yield SAMPLE


def test_what_is_pinned_is_neither_removed_nor_forgotten(cli: Cli, stored: Sample) -> None:
    assert cli("pins").err.splitlines() == ["Nothing is pinned. Keep an artifact with `p2pkv pin MANIFEST`."]
    assert cli("pin", stored.cid, "--name", "release").out == f"pinned as release: {stored.cid}\n"
    assert cli("pin", stored.cid, "--name", "release").out == f"pinned as release already: {stored.cid}\n"
    (pin,) = cli("pins", "--json").document["pins"]
    assert (pin["name"], pin["manifest"]) == ("release", str(stored.cid))
    assert cli("pins").out.startswith(f"release  {stored.cid}  since ")
    refused = cli("remove", stored.cid, "--json")
    assert (refused.status, refused.error["code"]) == (2, "usage")
    assert "p2pkv unpin release" in refused.error["advice"]
    assert cli("unpin", "release").out == "1 pin taken away\n"
    assert cli("unpin", "release", "--json").document == {"name": "release", "removed": 0}


def test_what_is_removed_gives_its_room_back_with_the_next_collection(cli: Cli, stored: Sample) -> None:
    size = sum(map(len, stored.blocks.values()))
    assert cli("gc", "--dry-run", "--json").document["blocks"] == 0
    assert cli("remove", stored.cid).out == f"removed: {stored.cid}\n"
    assert cli("remove", stored.cid).status == 4
    told = cli("gc", "--dry-run", "--json").document
    assert (told["blocks"], told["bytes"], told["left"]) == (len(stored.blocks), size, 0)
    assert cli("gc", "--dry-run").out.splitlines()[0].startswith("would go")
    done = cli("gc", "--json").document
    assert (done["blocks"], done["evicted"], done["dry_run"]) == (len(stored.blocks), [], False)
    assert done["freed"] > 0
    assert cli("status", "--json").document["store"]["blocks"] == 0


@pytest.mark.parametrize("arguments", [("pin", "nonsense"), ("remove", "nonsense"), ("unpin", "x", "--manifest", "nonsense")])
def test_what_is_no_cid_is_refused(cli: Cli, stored: Sample, arguments: tuple[str, ...]) -> None:
    refused = cli(*arguments, "--json")
    assert (refused.status, refused.error["code"]) == (2, "usage")


def test_pinning_what_is_not_here_is_refused(cli: Cli, stored: Sample) -> None:
    other = make_sample(list(range(10)))
    assert cli("pin", other.cid, "--json").error["code"] == "artifact.not_found"
    assert cli("pin", stored.cid, "--name", "", "--json").error["code"] == "usage"
