"""What the status page's port tells of a daemon that is fetching, is lied to, or cannot do its work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from p2pkv.errors import DiskFullError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.tensors import LayerGeometry, LayerKind
from p2pkv.limits import FULL_DISK_BYTES, LATE_ANNOUNCEMENT_S, MAX_STATUS_NAME_CHARS
from p2pkv.store.blocks import BlockPacks
from p2pkv.store.downloads import Downloads
from p2pkv.store.store import open_store
from p2pkv.swarm.report import FetchState
from p2pkv.swarm.target import ManifestTarget, Target
from p2pkv_node import node
from p2pkv_node.network import Libp2pNetwork
from p2pkv_node.savings import ToldPrefill
from p2pkv_node.snapshot import STARTING
from p2pkv_node.transfers import Outcome
from p2pkv_node.web.app import web_app
from tests.node.conftest import PROMPT, events_of
from tests.support.artifacts import PUBLISHER, Sample, make_sample, model
from tests.support.stores import Gate, flip, tampering
from tests.support.town import Daemon, Town, until

STATES = (STARTING, *FetchState)


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
            assert status["fetches"] == {**dict.fromkeys(STATES, 0), "transferring blocks": 1}
            assert await metric(web, 'p2pkv_fetches_running{state="transferring blocks"}') == 1
            assert status["room"]["unfinished"] == await metric(web, "p2pkv_downloads_unfinished") == 1
            nursery.cancel_scope.cancel()
        await until(lambda: daemon.node.fetches == 0)
    finally:
        gate.open()
    status = await status_of(web)
    assert (status["transfers"], status["fetches"]) == ([], dict.fromkeys(STATES, 0))
    assert status["room"]["unfinished"] == 0
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
    assert [row["peer"] for row in status["peers"] if row["banned_until"]] == [liar.peer_id]
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


async def test_a_full_disk(daemon: Daemon, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    free = FULL_DISK_BYTES
    monkeypatch.setattr(daemon.node.store.collector, "free_bytes", lambda: free)
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


# --- room -------------------------------------------------------------------------------------------------------------------


async def test_the_quota_its_marks_and_what_is_kept(town: Town, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = 10_000_000
    small = (await town.start("small", web="127.0.0.1:0", quota=quota)).node
    for cid, data in sample.blocks.items():
        small.store.write(cid, data)
    small.store.index.add_artifact(sample.artifact, range(3))
    small.store.holds.pin("one", sample.cid)
    small.store.holds.pin("two", sample.cid)
    small.store.lease(sample.cid, 60)
    assert small.web_url is not None
    async with httpx.AsyncClient(base_url=small.web_url, timeout=20) as web:
        room = (await status_of(web))["room"]
        size = sum(map(len, sample.blocks.values()))
        assert (room["quota"], room["marks"], room["store"]["bytes"]) == (quota, {"high": quota, "low": 9_000_000}, size)
        assert (room["pins"], room["leases"], room["unfinished"]) == (2, 1, 0)
        names = ("store_quota_bytes", "store_high_mark_bytes", "store_low_mark_bytes", "store_pins", "store_leases")
        assert [await metric(web, f"p2pkv_{name}") for name in names] == [quota, quota, 9_000_000, 2, 1]
        (row,) = (await status_of(web))["artifacts"]
        assert (row["bytes"], row["shared_bytes"]) == (size, 0)
        monkeypatch.setattr(small.store.holds, "_clock", lambda: time.time() + 62)
        assert (await status_of(web))["room"]["leases"] == 0


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node looks at its store all the time."""
    monkeypatch.setattr(node, "_QUOTA_CHECK_S", 0.02)


@pytest.mark.usefixtures("watchful")
async def test_collections_are_counted_with_their_reason(
    daemon: Daemon, http: httpx.AsyncClient, web: httpx.AsyncClient, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    await daemon.plant(sample.artifact, sample.blocks)
    nothing = {
        "count": {"above the high mark": 0, "asked for": 0},
        "evicted": 0,
        "freed_bytes": 0,
        "last": None,
        "over_quota": False,
    }
    assert (await status_of(web))["collections"] == nothing
    assert (await http.post("/v1/gc", json={"dry_run": True})).status_code == 200
    assert (await status_of(web))["collections"] == nothing
    assert (await http.post("/v1/gc", json={})).status_code == 200
    assert (await status_of(web))["collections"]["count"] == {"above the high mark": 0, "asked for": 1}

    monkeypatch.setattr(daemon.node.store.collector, "_quota", 1)
    daemon.node.store.holds.pin("kept", sample.cid)
    await until(lambda: daemon.node.collections.statistics().over_quota)
    assert await metric(web, "p2pkv_over_quota") == 1
    daemon.node.store.holds.unpin("kept")
    await until(lambda: daemon.node.store.blocks.totals().blocks == 0)
    await until(lambda: not daemon.node.collections.statistics().over_quota)
    collections = (await status_of(web))["collections"]
    assert (collections["evicted"], collections["last"]["evicted"]) == (1, 1)
    assert collections["freed_bytes"] == collections["last"]["freed_bytes"] > 0
    assert collections["last"]["why"] == "above the high mark"
    assert abs(collections["last"]["at"] - time.time()) < 600
    assert await metric(web, 'p2pkv_collections_total{why="asked for"}') == 1
    assert await metric(web, "p2pkv_collected_artifacts_total") == 1
    assert await metric(web, "p2pkv_collected_bytes_total") == collections["freed_bytes"]
    at = await metric(web, 'p2pkv_last_collection_time_seconds{why="above the high mark"}')
    assert at == pytest.approx(collections["last"]["at"])


# --- prefills ---------------------------------------------------------------------------------------------------------------


async def test_a_loss_is_shown_as_one(daemon: Daemon, web: httpx.AsyncClient) -> None:
    savings = daemon.node.savings
    savings.add(ToldPrefill(b"\2" * 32, "cpu", 512, 0.5))
    assert (await status_of(web))["prefills"] == {"rated": 0, "unrated": 1, "computing_s": 0, "loading_s": 0, "saved_s": 0}
    savings.add(ToldPrefill(b"\1" * 32, "cpu", 0, 3.0, 1024.0))
    savings.add(ToldPrefill(b"\1" * 32, "cpu", 512, 1.0))
    assert (await status_of(web))["prefills"] == {
        "rated": 2,
        "unrated": 1,
        "computing_s": 0.5,
        "loading_s": 4.0,
        "saved_s": -3.5,
    }
    names = ("prefill_computing_seconds_total", "prefill_loading_seconds_total", "prefill_saved_seconds")
    assert [await metric(web, f"p2pkv_{name}") for name in names] == [0.5, 4.0, -3.5]
    assert await metric(web, 'p2pkv_prefills_total{rate="unknown"}') == 1


# --- waiting ----------------------------------------------------------------------------------------------------------------


async def test_downloads_of_the_last_run_wait_for_their_turn_in_sight(
    tmp_path: Path, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Cid.of_node(b"first"), Cid.of_node(b"second")
    with open_store(tmp_path / "again") as store:
        store.downloads.begin(first)
        Downloads(store.database, clock=lambda: time.time() + 9).begin(second)
    fetched: list[Target] = []
    gate = trio.Event()

    async def fetch(self: node.Node, target: Target, *_: object) -> None:
        fetched.append(target)
        await gate.wait()

    monkeypatch.setattr(node.Node, "fetch", fetch)
    daemon = await town.start("again", web="127.0.0.1:0")
    await until(lambda: bool(fetched))
    assert daemon.node.web_url is not None
    async with httpx.AsyncClient(base_url=daemon.node.web_url, timeout=20) as web:
        status = await status_of(web)
        assert (status["queue"], status["queued"], status["room"]["unfinished"]) == ([str(second)], 1, 2)
        assert await metric(web, "p2pkv_downloads_queued") == 1
        gate.set()
        await until(lambda: fetched == [ManifestTarget(first), ManifestTarget(second)])
        assert (await status_of(web))["queue"] == []


async def test_it_is_told_since_when_a_fetch_waits_for_room(
    town: Town,
    daemon: Daemon,
    http: httpx.AsyncClient,
    web: httpx.AsyncClient,
    sample: Sample,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    full = True

    def write(cid: Cid, data: bytes) -> None:
        if full:
            raise DiskFullError("no space is left")
        BlockPacks.write(daemon.node.store.blocks, cid, data)

    monkeypatch.setattr(daemon.node.store.blocks, "write", write)
    monkeypatch.setattr(daemon.node.store.collector, "free_bytes", lambda: 0 if full else 2**30)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(events_of, http, {"manifest": str(sample.cid)})
        await until(lambda: [t.state for t in daemon.node.transfers.running.values()] == [FetchState.DISK_FULL])
        (transfer,) = (await status_of(web))["transfers"]
        assert (transfer["state"], transfer["detail"]) == ("disk full", "0 B are free; it goes on by itself with 8.0 MiB")
        since = daemon.node.transfers.running[transfer["number"]].since
        assert 0 <= transfer["state_seconds"] <= transfer["seconds"]
        assert await metric(web, 'p2pkv_fetches_running{state="disk full"}') == 1
        await until(lambda: trio.current_time() - since > 1.5)  # it has looked for room again, and said so
        (transfer,) = (await status_of(web))["transfers"]
        assert transfer["state_seconds"] > 1.5
        full = False
    assert daemon.node.transfers.outcomes[Outcome.COMPLETE] == 1
