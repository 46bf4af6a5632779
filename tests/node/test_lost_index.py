"""A daemon whose index is lost lists, serves and announces what its packs hold."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from bench.processes import node_process
from p2pkv.client.sync import Client
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout
from p2pkv.store.store import open_store
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv.store.trust_file import TrustFile
from p2pkv_node import main
from p2pkv_node.config import NodeConfig
from p2pkv_node.node import open_node
from tests.support.artifacts import PUBLISHER, make_sample
from tests.support.lanes import HOST
from tests.support.node_command import node_command
from tests.support.stores import GATE_TIMEOUT_S


@pytest.mark.slow
def test_a_daemon_whose_index_is_garbage_serves_and_announces(tmp_path: Path) -> None:
    home, consumer = tmp_path / "home", tmp_path / "consumer"
    sample = make_sample(range(600), created=int(time.time()))
    with open_store(home) as store:
        for cid, data in sample.blocks.items():
            store.write(cid, data)
        store.index.add_artifact(sample.artifact, range(3))
        store.holds.pin("release", sample.cid)
    HomeLayout(home).index.write_bytes(os.urandom(10_000))
    HomeLayout(consumer).create()
    TrustFile(HomeLayout(consumer).trust).add(PUBLISHER, "", 0)
    with node_process(home) as node, node_process(consumer, bootstrap=[node.address]), Client(home) as client:
        status = client.status()
        assert (status["store"]["artifacts"], status["store"]["complete_artifacts"]) == (1, 1)
        assert status["announcing"]["keys"] == 4
        assert [(pin["name"], pin["manifest"]) for pin in client.pins()] == [("release", str(sample.cid))]
        with Client(consumer) as other:
            other.fetch(sample.cid, patience_s=30.0)
            assert other.status()["store"]["complete_artifacts"] == 1
    assert "file is not a database: what the packs hold is listed anew" in (home / "node.log").read_text()
    assert (home / "index.sqlite.damaged-1").stat().st_size == 10_000


async def test_a_start_that_makes_an_index_anew_ends_when_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Nothing is changed, the lock is free, and the next start does it."""
    sample = make_sample(range(600))
    with open_store(tmp_path) as store:
        for cid, data in sample.blocks.items():
            store.write(cid, data)
    garbage = os.urandom(10_000)
    HomeLayout(tmp_path).index.write_bytes(garbage)
    reading, cancelled, read = threading.Event(), threading.Event(), StoredBlocks.read

    def slowly(blocks: StoredBlocks, cid: Cid) -> bytes:
        reading.set()
        assert cancelled.wait(GATE_TIMEOUT_S)
        return read(blocks, cid)

    with monkeypatch.context() as patch:
        patch.setattr(StoredBlocks, "read", slowly)
        with trio.CancelScope() as starting:
            nursery.start_soon(cancel, reading, starting, cancelled)
            async with open_node(NodeConfig(tmp_path, listen=(f"/ip4/{HOST}/tcp/0",), bulk=False)):
                await trio.lowlevel.checkpoint()
    assert starting.cancelled_caught
    assert HomeLayout(tmp_path).index.read_bytes() == garbage
    with open_store(tmp_path) as store:
        assert store.index.counts() == (1, 1)


async def cancel(reading: threading.Event, starting: trio.CancelScope, cancelled: threading.Event) -> None:
    await trio.to_thread.run_sync(reading.wait)
    starting.cancel()
    cancelled.set()


def test_a_signal_ends_a_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()

    monkeypatch.setattr(main, "run_daemon", start)
    assert node_command("--home", tmp_path).status == 0
