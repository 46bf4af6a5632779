"""The main road with real nodes: publish on one, trust and fetch on another, mend it there, generate on a third."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.processes import environment, node_process, wait_announced
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.segment import Segment
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks
from tests.cli.checkpoint import save_checkpoint
from tests.cli.conftest import Cli, Ran
from tests.support.stores import flip_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TEXT = "Call me Ishmael. Some years ago - never mind how long precisely. " * 10


def _damage_a_block(home: Path, manifest: str) -> None:
    blocks = StoredBlocks(HomeLayout(home).blocks)
    node = Envelope.decode(blocks.read(Cid.parse(manifest))).open().segments[1]
    flip_block(home, next(Segment.decode(blocks.read(node)).blocks()).cid, 8 * 11)


def _apart(home: Path, *arguments: object) -> Ran:
    """Run a command in a process of its own, as people do: that takes its time."""
    command = [sys.executable, "-m", "p2pkv.cli.app", *map(str, arguments), "--json"]
    ran = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=90, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def _document(ran: Ran) -> dict[str, Any]:
    assert (ran.status, ran.err) == (0, ""), ran
    return ran.document


def test_publish_trust_fetch_mend_and_generate(cli: Cli, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    text = tmp_path / "text"
    text.write_text(TEXT)
    question = ("--prompt-file", text, "--question", "Who?", "--max-new-tokens", 8)

    def run(home: Path, *arguments: object) -> Ran:
        return cli(*arguments, "--home", home, "--json")

    def done(home: Path, *arguments: object) -> dict[str, Any]:
        return _document(run(home, *arguments))

    with (
        node_process(tmp_path / "publisher") as publisher,
        node_process(tmp_path / "mirror", bootstrap=[publisher.address]) as mirror,
        node_process(tmp_path / "consumer", bootstrap=[publisher.address]) as consumer,
    ):
        did = done(publisher.home, "keygen")["did"]
        published = _document(_apart(publisher.home, "publish", model, text, "--expires", "1d", "--trust"))
        manifest = published["manifest"]
        assert published["tokens"] == len(TEXT)
        wait_announced(publisher)

        refused = run(mirror.home, "fetch", manifest)
        assert (refused.status, refused.error["code"], refused.out) == (5, "trust.untrusted", "")
        done(mirror.home, "trust", "add", did)
        fetched = done(mirror.home, "fetch", manifest)
        assert fetched["hit_tokens"] == len(TEXT)
        assert set(fetched["bytes_by_peer"]) == {publisher.peer_id}
        assert done(mirror.home, "verify", manifest)["complete_segments"] == 3
        assert done(mirror.home, "inspect", manifest)["usable"] is True
        assert done(mirror.home, "fetch", manifest)["bytes_by_peer"] == {}, "what is here is not fetched again"
        assert manifest in [artifact["manifest_cid"] for artifact in done(mirror.home, "status")["artifacts"]]

        _damage_a_block(mirror.home, manifest)
        found = run(mirror.home, "verify", manifest)
        assert found.status == 3
        assert [fault["code"] for fault in found.document["faults"]] == ["integrity.hash"]
        mended = done(mirror.home, "fetch", manifest)
        assert 0 < sum(mended["bytes_by_peer"].values()) < mended["local_bytes"]
        assert done(mirror.home, "verify", manifest)["ok"] is True

        cold = done(consumer.home, "generate", model, *question)
        assert cold["report"]["hit_tokens"] == 0
        assert {refusal["code"] for refusal in cold["report"]["refusals"]} <= {"trust.untrusted"}
        done(consumer.home, "trust", "add", did)
        warm = _document(_apart(consumer.home, "generate", model, *question))
        assert warm["report"]["hit_tokens"] == len(TEXT), warm
        assert warm["report"]["bytes_fetched"] > 0
        assert (warm["answer"], warm["token_ids"]) == (cold["answer"], cold["token_ids"])
        again = done(consumer.home, "generate", model, *question)
        assert (again["report"]["hit_tokens"], again["report"]["bytes_fetched"]) == (len(TEXT), 0)
        assert again["token_ids"] == cold["token_ids"]
        other_dtype = done(consumer.home, "generate", model, *question, "--dtype", "fp32")
        assert other_dtype["report"]["hit_tokens"] == 0
