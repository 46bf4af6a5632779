"""A private artifact on real nodes: published on one, carried by another, read on a third when the first is gone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.processes import node_process
from p2pkv.store.home import HomeLayout
from tests.cli.checkpoint import save_checkpoint
from tests.cli.conftest import Cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
TEXT = "Call me Ishmael. Some years ago - never mind how long precisely. " * 10


def test_publish_privately_mirror_grant_and_generate(cli: Cli, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    text, grant = tmp_path / "text", tmp_path / "book.grant"
    text.write_text(TEXT)
    question = ("--prompt-file", text, "--question", "Who?", "--max-new-tokens", 8)

    def run(home: Path, *arguments: object) -> dict[str, object]:
        ran = cli(*arguments, "--home", home, "--json")
        assert ran.status == 0, ran
        return ran.document

    with node_process(tmp_path / "mirror") as mirror, node_process(tmp_path / "reader", bootstrap=[mirror.address]) as reader:
        reader_did = run(reader.home, "keygen")["did"]
        computed = run(reader.home, "generate", model, *question)
        with node_process(tmp_path / "publisher", bootstrap=[mirror.address]) as publisher:
            did = run(publisher.home, "keygen")["did"]
            run(publisher.home, "namespace", "create", "team")
            published = run(publisher.home, "publish", model, text, "--private", "team")
            assert published["private"]
            manifest = published["manifest"]
            run(publisher.home, "grant", manifest, reader_did, "--expires", "1d", "--out", grant)
            run(mirror.home, "trust", "add", did)
            deadline = time.monotonic() + 60
            while True:
                announcing = run(publisher.home, "status")["announcing"]
                assert isinstance(announcing, dict)
                if announcing["announced"]:
                    break
                assert time.monotonic() < deadline, announcing
                time.sleep(0.1)
            assert announcing["keys"] == 1, "its manifest CID alone"
            assert run(mirror.home, "fetch", manifest)["complete"]
        assert run(mirror.home, "verify", manifest)
        run(reader.home, "grants", "add", grant)
        run(reader.home, "trust", "add", did)
        answered = run(reader.home, "generate", model, *question)
        report = answered["report"]
        assert isinstance(report, dict)
        assert (report["hit_tokens"], report["manifest"]) == (len(TEXT), manifest)
        assert set(report["bytes_by_peer"]) == {mirror.peer_id}
        assert answered["token_ids"] == computed["token_ids"]
    for home in (mirror.home, reader.home, publisher.home):
        for path in home.rglob("*"):
            assert not path.is_file() or TEXT[:24].encode() not in path.read_bytes(), path
    assert not HomeLayout(mirror.home).grants.exists()
