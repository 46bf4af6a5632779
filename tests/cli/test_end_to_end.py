"""The main road with real processes: publish on one node, trust and fetch on another, mend it there, generate from both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.processes import NodeProcess, environment, node_process
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.segment import Segment
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks
from tests.cli.checkpoint import save_checkpoint
from tests.support.stores import flip_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TEXT = "Call me Ishmael. Some years ago - never mind how long precisely. " * 10


def _p2pkv(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p2pkv.cli.app", *map(str, arguments), "--json"]
    return subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=90, check=False)


def _done(home: Path, *arguments: object) -> dict[str, Any]:
    ran = _p2pkv(home, *arguments)
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def _failed(home: Path, *arguments: object) -> tuple[int, str]:
    ran = _p2pkv(home, *arguments)
    assert ran.stdout == "", ran
    return ran.returncode, json.loads(ran.stderr)["error"]["code"]


def _wait_announced(node: NodeProcess) -> None:
    deadline = time.monotonic() + 60
    while True:
        announcing = _done(node.home, "status")["announcing"]
        if announcing["announced"] == announcing["keys"]:
            return
        assert time.monotonic() < deadline, announcing


def _damage_a_block(home: Path, manifest: str) -> None:
    blocks = StoredBlocks(HomeLayout(home).blocks)
    node = Envelope.decode(blocks.read(Cid.parse(manifest))).open().segments[1]
    flip_block(home, next(Segment.decode(blocks.read(node)).blocks()).cid, 8 * 11)


def test_publish_trust_fetch_mend_and_generate(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    text = tmp_path / "text"
    text.write_text(TEXT)
    question = ("--prompt-file", text, "--question", "Who?", "--max-new-tokens", 8)
    with (
        node_process(tmp_path / "publisher") as publisher,
        node_process(tmp_path / "mirror", bootstrap=[publisher.address]) as mirror,
        node_process(tmp_path / "consumer", bootstrap=[publisher.address]) as consumer,
    ):
        did = _done(publisher.home, "keygen")["did"]
        published = _done(publisher.home, "publish", model, text, "--expires", "1d", "--trust")
        manifest = published["manifest"]
        assert published["tokens"] == len(TEXT)
        _wait_announced(publisher)

        assert _failed(mirror.home, "fetch", manifest) == (5, "trust.untrusted")
        _done(mirror.home, "trust", "add", did)
        fetched = _done(mirror.home, "fetch", manifest)
        assert fetched["hit_tokens"] == len(TEXT)
        assert set(fetched["bytes_by_peer"]) == {publisher.peer_id}
        assert _done(mirror.home, "verify", manifest)["complete_segments"] == 3
        assert _done(mirror.home, "inspect", manifest)["usable"] is True
        assert _done(mirror.home, "fetch", manifest)["bytes_by_peer"] == {}, "what is here is not fetched again"
        assert manifest in [artifact["manifest_cid"] for artifact in _done(mirror.home, "status")["artifacts"]]

        _damage_a_block(mirror.home, manifest)
        found = _p2pkv(mirror.home, "verify", manifest)
        assert found.returncode == 3
        assert [fault["code"] for fault in json.loads(found.stdout)["faults"]] == ["integrity.hash"]
        mended = _done(mirror.home, "fetch", manifest)
        assert 0 < sum(mended["bytes_by_peer"].values()) < mended["local_bytes"]
        assert _done(mirror.home, "verify", manifest)["ok"] is True

        cold = _done(consumer.home, "generate", model, *question)
        assert cold["report"]["hit_tokens"] == 0
        assert {refusal["code"] for refusal in cold["report"]["refusals"]} <= {"trust.untrusted"}
        _done(consumer.home, "trust", "add", did)
        warm = _done(consumer.home, "generate", model, *question)
        assert warm["report"]["hit_tokens"] == len(TEXT), warm
        assert warm["report"]["bytes_fetched"] > 0
        assert (warm["answer"], warm["token_ids"]) == (cold["answer"], cold["token_ids"])
        again = _done(consumer.home, "generate", model, *question)
        assert (again["report"]["hit_tokens"], again["report"]["bytes_fetched"]) == (len(TEXT), 0)
        assert again["token_ids"] == cold["token_ids"]
        other_dtype = _done(consumer.home, "generate", model, *question, "--dtype", "fp32")
        assert other_dtype["report"]["hit_tokens"] == 0
