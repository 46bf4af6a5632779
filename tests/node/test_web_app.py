"""What the status page's port tells of a daemon that is fetching, is lied to, or cannot do its work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio

from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.limits import FULL_DISK_BYTES, LATE_ANNOUNCEMENT_S, MAX_STATUS_NAME_CHARS
from p2pkv_node.network import Libp2pNetwork
from p2pkv_node.transfers import Outcome
from p2pkv_node.web import snapshot
from p2pkv_node.web.app import web_app
from p2pkv_node.web.guard import Guard
from tests.node.conftest import PROMPT, events_of
from tests.support.artifacts import PUBLISHER, Sample, make_sample, model
from tests.support.stores import Gate, flip, tampering
from tests.support.town import Daemon, Town, until


@pytest.fixture
async def daemon(town: Town) -> Daemon:
    return await town.start("daemon", trusted=[PUBLISHER], web="127.0.0.1:0")


@pytest.fixture
async def web(daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    assert daemon.node.web_url is not None
    async with httpx.AsyncClient(base_url=daemon.node.web_url, timeout=20) as client:
        yield client


async def status_of(web: httpx.AsyncClient) -> dict[str, Any]:
    answer = await web.get("/status.json")
    assert answer.status_code == 200
    status: dict[str, Any] = answer.json()
    return status


async def metric(web: httpx.AsyncClient, name: str) -> float:
    (line,) = (line for line in (await web.get("/metrics")).text.splitlines() if line.startswith(f"{name} "))
    return float(line.rpartition(" ")[2])


# --- transfers --------------------------------------------------------------------------------------------------------------


async def test_a_transfer_is_seen_while_it_runs_and_counted_when_it_is_abandoned(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, web: httpx.AsyncClient, sample: Sample
) -> None:
    gate = Gate()

    def hold(cid: Cid, data: bytes) -> bytes:
        if cid.codec is Codec.RAW:
            gate.wait()
        return data

    provider = await town.start("provider", serve_from=tampering(hold))
    await provider.plant(sample.artifact, sample.blocks)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(events_of, http, {"manifest": str(sample.cid)})
            await until(gate.reached.is_set)
            status = await status_of(web)
            (transfer,) = status["transfers"]
            assert (transfer["prompt_tokens"], transfer["manifest"]) == (None, str(sample.cid))
            assert (transfer["model_name"], transfer["state"]) == ("tiny", "transferring blocks")
            assert transfer["detail"].startswith("waiting for ")
            assert transfer["seconds"] > 0
            assert transfer["done_bytes"] < transfer["total_bytes"]
            assert provider.peer_id in {peer["peer"] for peer in transfer["peers"]}
            assert status["fetches"] == await metric(web, "p2pkv_fetches_running") == 1
            nursery.cancel_scope.cancel()
        await until(lambda: daemon.node.fetches == 0)
    finally:
        gate.open()
    status = await status_of(web)
    assert (status["transfers"], status["fetches"]) == ([], 0)
    assert status["outcomes"] == {outcome.value: int(outcome is Outcome.ABANDONED) for outcome in Outcome}


async def test_bytes_are_counted_by_the_way_they_came(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, web: httpx.AsyncClient
) -> None:
    """Blocks that are worth a lane come over it, nodes over the stream."""
    geometry = LayerGeometry(LayerKind.FULL, kv_heads=4, k_dim=64, v_dim=64)
    large = make_sample(range(600), description=replace(model(), layers=(geometry,) * 2), created=int(time.time()))
    provider = await town.start("provider")
    await provider.plant(large.artifact, large.blocks)
    assert (await events_of(http, {"manifest": str(large.cid)}))[-1]["complete"]
    status = await status_of(web)
    raw = sum(len(data) for cid, data in large.blocks.items() if cid.codec is Codec.RAW)
    assert 0 < status["lane_bytes"] <= raw
    assert status["lane_bytes"] + status["stream_bytes"] == sum(map(len, large.blocks.values()))
    assert await metric(web, 'p2pkv_received_bytes_total{path="lane"}') == status["lane_bytes"]


async def test_part_of_an_artifact(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, web: httpx.AsyncClient, sample: Sample
) -> None:
    """Its provider has the first of three segments."""
    provider = await town.start("provider")
    keep = sample.artifact.open_segment(0, sample.blocks[sample.artifact.manifest.segments[0]])
    first = {ref.cid for ref in keep.blocks()}
    blocks = {cid: data for cid, data in sample.blocks.items() if cid.codec is not Codec.RAW or cid in first}
    await provider.plant(sample.artifact, blocks, [0])
    report = (await events_of(http, {**PROMPT, "patience_s": 20}))[-1]
    assert (report["segments"], report["hit_tokens"]) == (1, 256)
    status = await status_of(web)
    assert status["outcomes"] == {outcome.value: int(outcome is Outcome.PARTIAL) for outcome in Outcome}
    assert (status["prompt_tokens"], status["hit_tokens"]) == (602, 256)
    (row,) = status["artifacts"]
    assert (row["held_segments"], row["segment_count"], row["complete"]) == (1, 3, False)


async def test_a_liar_is_counted_and_shown_as_banned(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, web: httpx.AsyncClient, sample: Sample
) -> None:
    def lie(cid: Cid, data: bytes) -> bytes:
        return flip(data, 9) if cid.codec is Codec.RAW else data

    liar = await town.start("liar", serve_from=tampering(lie))
    await liar.plant(sample.artifact, sample.blocks)
    await events_of(http, {**PROMPT, "patience_s": 5})
    status = await status_of(web)
    assert status["blocks_refused"] == await metric(web, "p2pkv_refused_blocks_total") > 0
    assert [row["peer"] for row in status["peers"] if row["banned"]] == [liar.peer_id]
    assert await metric(web, "p2pkv_banned_peers") == 1


# --- artifacts --------------------------------------------------------------------------------------------------------------


async def test_pins_are_told_and_long_names_are_cut(daemon: Daemon, web: httpx.AsyncClient) -> None:
    long = make_sample(range(300), description=model("<b>" + "x" * 5000), created=int(time.time()))
    await daemon.plant(long.artifact, long.blocks)
    daemon.node.store.holds.pin("kept", long.cid)
    (row,) = (await status_of(web))["artifacts"]
    assert row["model_name"] == "<b>" + "x" * (MAX_STATUS_NAME_CHARS - 3) + "…"
    assert row["pins"] == ["kept"]


# --- readiness --------------------------------------------------------------------------------------------------------------


async def assert_not_ready(web: httpx.AsyncClient, reason: str) -> None:
    answer = await web.get("/readyz")
    assert answer.status_code == 503
    assert reason in answer.text
    assert (await web.get("/healthz")).status_code == 200


async def test_a_full_disk(web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    free = FULL_DISK_BYTES
    monkeypatch.setattr(snapshot, "free_bytes", lambda home: free)
    assert (await web.get("/readyz")).status_code == 200
    free -= 1
    await assert_not_ready(web, "The disk is full")
    assert "The disk is full" in (await status_of(web))["unready"]
    assert await metric(web, "p2pkv_ready") == 0
    assert await metric(web, "p2pkv_disk_free_bytes") == free


async def test_a_network_that_does_not_listen(web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Libp2pNetwork, "listening", ())
    await assert_not_ready(web, "The network does not listen.")


async def test_a_store_that_cannot_be_read(daemon: Daemon, web: httpx.AsyncClient) -> None:
    daemon.node.store.index._database.close()
    await assert_not_ready(web, "cannot count artifacts")
    for path in ("/status.json", "/metrics"):
        answer = await web.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "store.io"


async def test_a_node_that_is_stopping(daemon: Daemon) -> None:
    stop = trio.Event()
    transport = httpx.ASGITransport(web_app(daemon.node, stop))  # the port itself closes at once
    async with httpx.AsyncClient(transport=transport, base_url="http://p2pkv") as client:
        assert (await client.get("/readyz")).status_code == 200
        stop.set()
        await assert_not_ready(client, "The node is stopping.")


# --- announcing -------------------------------------------------------------------------------------------------------------


async def test_late_announcements_are_told(daemon: Daemon, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not (await status_of(web))["late"]
    figures = daemon.node.announcer.statistics()
    late = type(figures)(keys=3, announced=1, late_s=LATE_ANNOUNCEMENT_S + 1)
    monkeypatch.setattr(daemon.node.announcer, "statistics", lambda: late)
    status = await status_of(web)
    assert (status["late"], status["announcing"]) == (True, {"keys": 3, "announced": 1, "late_s": late.late_s})
    assert await metric(web, "p2pkv_announcement_late_seconds") == late.late_s


# --- the guard --------------------------------------------------------------------------------------------------------------


async def test_a_websocket_is_closed(daemon: Daemon) -> None:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    guard = Guard(web_app(daemon.node, trio.Event()), {"127.0.0.1:1"})
    await guard({"type": "websocket", "headers": [(b"host", b"127.0.0.1:1")]}, receive, send)
    assert said == [{"type": "websocket.close", "code": 1008}]
