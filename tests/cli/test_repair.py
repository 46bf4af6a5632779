"""``verify --repair``: what rotted or is missing comes from peers again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv_node.embedded import embedded_node
from tests.cli.artifacts import store
from tests.cli.conftest import Cli
from tests.support.artifacts import KEY, PUBLISHER, Sample, make_sample
from tests.support.cars import data_blocks
from tests.support.stores import flip_block

SAMPLE = make_sample([number % 500 for number in range(600)], created=int(time.time()))


@pytest.fixture
def mirror(cli: Cli, home: Path, tmp_path: Path) -> Iterator[Sample]:
    """A node that fetched a sample from another, which still runs."""
    provider = tmp_path / "provider"
    file = tmp_path / "sample.car"
    store(tmp_path / "offline", SAMPLE)
    for folder in (provider, tmp_path / "offline", home):
        assert cli("trust", "add", PUBLISHER, "--home", folder).status == 0
    assert cli("export", SAMPLE.cid, file, "--home", tmp_path / "offline").status == 0
    with embedded_node(provider) as other, embedded_node(home, bootstrap=other.addresses[:1]):
        assert cli("import", file, "--home", provider).status == 0
        assert cli("fetch", SAMPLE.cid).status == 0
        yield SAMPLE


def test_a_whole_artifact_is_not_fetched_again(cli: Cli, mirror: Sample) -> None:
    told = cli("verify", mirror.cid, "--repair", "--json")
    assert (told.status, told.document["repaired"], told.document["ok"]) == (0, False, True)


@pytest.mark.parametrize("victim", [SAMPLE.cid, SAMPLE.artifact.manifest.segments[1], data_blocks(SAMPLE)[3]])
def test_what_is_damaged_is_fetched_again(cli: Cli, home: Path, mirror: Sample, victim: object) -> None:
    flip_block(home, victim, 8 * 7)  # type: ignore[arg-type]
    assert cli("verify", mirror.cid, "--json").status == 3
    told = cli("verify", mirror.cid, "--repair", "--json")
    assert (told.status, told.document["repaired"], told.document["ok"]) == (0, True, True)
    assert cli("verify", mirror.cid).status == 0


def test_what_nobody_has_any_more_stays_a_fault(cli: Cli, home: Path, tmp_path: Path) -> None:
    store(home, SAMPLE)
    assert cli("trust", "add", PUBLISHER).status == 0
    flip_block(home, data_blocks(SAMPLE)[3], 8 * 7)
    with embedded_node(home):
        told = cli("verify", SAMPLE.cid, "--repair", "--patience", "2", "--json")
    assert told.status == 4
    assert told.error["code"] in ("fetch.incomplete", "artifact.not_found")


def test_what_was_taken_back_is_not_mended(cli: Cli, home: Path, mirror: Sample) -> None:
    block = data_blocks(mirror)[3]
    flip_block(home, block, 8 * 7)
    items = (Revoked(Scope.MANIFEST, mirror.cid, "wrong tokenizer"),)
    listed = Revocations(publisher=PUBLISHER, sequence=1, created=0, items=items)
    StatementFiles(HomeLayout(home).statements).hear(SignedStatement.sign(listed, KEY))
    told = cli("verify", mirror.cid, "--repair", "--json")
    assert (told.status, told.error["code"]) == (5, "trust.revoked")
    codes = {fault["code"] for fault in cli("verify", mirror.cid, "--json").document["faults"]}
    assert codes == {"trust.revoked", "integrity.hash"}
