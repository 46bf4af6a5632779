"""``trust``: rules and explanations, files only, no daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pkv.artifact.read import Artifact
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv.trust.policy import Check
from tests.cli.conftest import Cli
from tests.support.artifacts import PUBLISHER
from tests.support.index import open_index
from tests.support.samples import CREATED, OTHER_PUBLISHER, PUBLISHER as SAMPLE_PUBLISHER, TOKEN_IDS, envelope, manifest


def test_trust_is_added_listed_and_removed(cli: Cli) -> None:
    assert cli("trust", "list", "--json").document == {"rules": []}
    assert "Nobody is trusted" in cli("trust", "list").err
    assert cli("trust", "add", PUBLISHER, "--note", "the docs team").out == f"now trusted: {PUBLISHER}\n"
    assert cli("trust", "add", PUBLISHER).out == f"trusted already: {PUBLISHER}\n"
    scope = ("--licence", "CC0-1.0", "--model", "ab" * 32, "--namespace", "public")
    scoped = cli("trust", "add", OTHER_PUBLISHER, *scope, "--json")
    assert scoped.document["added"] is True
    rule = scoped.document["rule"]
    assert (rule["action"], rule["licence"], rule["model"], rule["namespace"]) == ("accept", "CC0-1.0", "ab" * 32, "public")
    rejected = cli("trust", "reject", "*", "--licence", "proprietary", "--note", "not for us")
    assert rejected.out == "now rejected: anybody licence 'proprietary'\n"
    listed = cli("trust", "list").out.splitlines()
    assert [line.split()[:2] for line in listed] == [["accept", PUBLISHER], ["accept", OTHER_PUBLISHER], ["reject", "anybody"]]
    assert cli("trust", "remove", OTHER_PUBLISHER, "--licence", "MIT").out == f"no rule is about {OTHER_PUBLISHER}\n"
    assert cli("trust", "remove", OTHER_PUBLISHER, "--licence", "CC0-1.0", "--json").document == {"removed": [rule]}
    assert cli("trust", "remove", PUBLISHER).out == f"removed: accept {PUBLISHER}\n"
    assert cli("trust", "remove", PUBLISHER).out == f"no rule is about {PUBLISHER}\n"
    assert [entry["publisher"] for entry in cli("trust", "list", "--json").document["rules"]] == ["*"]


@pytest.mark.parametrize(
    "arguments",
    [("add", "did:key:z6Mkx"), ("add", "*"), ("add", PUBLISHER, "--model", "12"), ("reject", PUBLISHER, "--model", "SmolLM")],
)
def test_trust_refuses_what_is_no_rule(cli: Cli, home: Path, arguments: tuple[str, ...]) -> None:
    told = cli("trust", *arguments, "--json")
    assert (told.status, told.error["code"]) == (2, "usage")
    assert not HomeLayout(home).trust.exists()


def test_an_artifact_is_explained_step_by_step(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "tiny.envelope"
    file.write_bytes(envelope(manifest(expires=CREATED + 3600)).encode())
    told = cli("trust", "explain", file)
    assert told.status == 0
    assert f"p2pkv trust add {SAMPLE_PUBLISHER}" in told.out
    assert "refused, for 2 reasons" in told.out
    cli("trust", "add", SAMPLE_PUBLISHER)
    document = cli("trust", "explain", file, "--json").document
    assert [step["check"] for step in document["steps"]] == [*Check]
    assert [step["check"] for step in document["steps"] if not step["passed"]] == ["expiry"]
    assert document["steps"][3]["error"]["code"] == "trust.expired"
    file.write_bytes(envelope(manifest(expires=None)).encode())
    told = cli("trust", "explain", file)
    assert f"your rule accepts it: accept {SAMPLE_PUBLISHER}" in told.out
    assert f"accepted. To stop that: p2pkv trust reject {SAMPLE_PUBLISHER}" in told.out
    cli("trust", "reject", SAMPLE_PUBLISHER, "--licence", "CC0-1.0", "--note", "a test")
    told = cli("trust", "explain", file)
    assert f"no: your rule rejects it: reject {SAMPLE_PUBLISHER} licence 'CC0-1.0' (a test)" in told.out
    assert f"p2pkv trust remove {SAMPLE_PUBLISHER}" in told.out


def test_a_damaged_trust_file_is_a_fault_of_the_machine(cli: Cli, home: Path) -> None:
    home.mkdir()
    HomeLayout(home).trust.write_text("{")
    told = cli("trust", "list", "--json")
    assert (told.status, told.error["code"]) == (4, "store.io")


def test_a_newer_artifact_of_the_same_text_in_this_home_is_told(cli: Cli, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.envelope"
    file.write_bytes(envelope(manifest(expires=None)).encode())
    cli("trust", "add", SAMPLE_PUBLISHER)
    newer = Artifact(Cid.of_node(b"newer"), manifest(sequence=9), tuple(TOKEN_IDS), (manifest().last_chain_key,))
    with open_index(HomeLayout(home).index) as index:
        index.add_artifact(newer, [0])
    document = cli("trust", "explain", file, "--json").document
    assert document["accepted"]
    assert "sequence 1 is older than 9" in document["steps"][-1]["found"]


def test_it_is_told_when_this_home_last_heard_of_the_publisher(cli: Cli, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.envelope"
    file.write_bytes(envelope(manifest(expires=None)).encode())
    assert cli("trust", "explain", file, "--json").document["heard"] is None
    assert "last heard of it  never" in " ".join(cli("trust", "explain", file).out.split("\n"))
    StatementFiles(HomeLayout(home).statements).note_answers({SAMPLE_PUBLISHER: CREATED})
    assert cli("trust", "explain", file, "--json").document["heard"] == CREATED
    assert "2026-01-01 00:00 UTC" in cli("trust", "explain", file).out
