"""Publish, import and export of a real daemon: events to the last one, and what an interruption leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from p2pkv.formats.cid import Cid, Codec
from p2pkv.store import car_reading, staging as store_staging
from p2pkv.store.car_file import import_car
from p2pkv.store.staging import open_staging
from tests.node.conftest import events_of
from tests.support.artifacts import PUBLISHER, Sample
from tests.support.cars import whole, without
from tests.support.stores import Gate
from tests.support.town import Daemon, until


@pytest.fixture
def file(tmp_path: Path, sample: Sample) -> Path:
    path = tmp_path / "artifact.car"
    path.write_bytes(whole(sample))
    return path


async def artifacts(http: httpx.AsyncClient) -> list[str]:
    return [row["manifest_cid"] for row in (await http.get("/v1/artifacts")).json()["artifacts"]]


def steps(events: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(event["state"] for event in events if event["event"] == "progress"))


# --- publish -----------------------------------------------------------------------------------------------------------


async def test_publish_takes_over_what_is_staged_and_announces_it(
    daemon: Daemon, http: httpx.AsyncClient, sample: Sample
) -> None:
    with open_staging(daemon.home) as staging:
        for cid, data in sample.blocks.items():
            staging.write(cid, data)
        body = {"staging": staging.name, "manifest": str(sample.cid)}
        *progress, report = await events_of(http, body, "/v1/publish")
    assert report == {"event": "report", "manifest": str(sample.cid), "segments": 3}
    assert steps(progress) == ["verifying", "syncing to the disk"]
    size = sum(map(len, sample.blocks.values()))
    assert (progress[-1]["done_bytes"], progress[-1]["total_bytes"]) == (size, size)
    assert all(daemon.node.store.read(cid) == data for cid, data in sample.blocks.items())
    await daemon.announced()
    assert (await http.get("/v1/status")).json()["announcing"]["keys"] == 4


async def test_what_is_stored_need_not_be_staged(daemon: Daemon, http: httpx.AsyncClient, sample: Sample) -> None:
    stored = next(cid for cid in sample.blocks if cid.codec is Codec.RAW)
    daemon.node.store.write(stored, sample.blocks[stored])
    with open_staging(daemon.home) as staging:
        for cid, data in sample.blocks.items():
            if cid != stored:
                staging.write(cid, data)
        events = await events_of(http, {"staging": staging.name, "manifest": str(sample.cid)}, "/v1/publish")
    assert events[-1]["event"] == "report"


@pytest.mark.parametrize("missing", [Codec.RAW, Codec.DAG_CBOR])
async def test_publish_refuses_what_is_not_whole(
    daemon: Daemon, http: httpx.AsyncClient, sample: Sample, missing: Codec
) -> None:
    with open_staging(daemon.home) as staging:
        left_out = next(cid for cid in sample.blocks if cid.codec is missing)
        for cid, data in sample.blocks.items():
            if cid != left_out:
                staging.write(cid, data)
        (error,) = await events_of(http, {"staging": staging.name, "manifest": str(sample.cid)}, "/v1/publish")
    assert (error["event"], error["code"]) == ("error", "artifact.not_found")
    assert await artifacts(http) == []
    assert daemon.node.store.statistics().blocks == 0
    assert (await http.get("/v1/status")).json()["announcing"]["keys"] == 0


async def test_a_publisher_that_leaves_ends_the_takeover(
    daemon: Daemon, http: httpx.AsyncClient, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    read = store_staging._read_staged

    def hold(descriptor: int, record: Any) -> bytes:
        gate.wait()
        return read(descriptor, record)

    with open_staging(daemon.home) as staging:
        for cid, data in sample.blocks.items():
            staging.write(cid, data)
        monkeypatch.setattr(store_staging, "_read_staged", hold)
        body = {"staging": staging.name, "manifest": str(sample.cid)}
        await leave(daemon, http, "/v1/publish", body, gate)
        await until(lambda: not daemon.node._file_work.borrowed_tokens)
    assert await artifacts(http) == []
    assert daemon.node.store.holds.counts() == (0, 0)


async def leave(daemon: Daemon, http: httpx.AsyncClient, path: str, body: dict[str, Any], gate: Gate) -> None:
    """Ask for something, and go away when the work waits at the gate, which opens when the daemon has noticed."""
    scopes: list[trio.CancelScope] = []
    background = daemon.node.background

    def note(task: Callable[[], Awaitable[None]]) -> trio.CancelScope:
        scopes.append(background(task))
        return scopes[-1]

    daemon.node.background = note  # type: ignore[method-assign]
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(events_of, http, body, path)
                await until(gate.reached.is_set)
                scope.cancel()
        await until(lambda: scopes[0].cancel_called)
    finally:
        gate.open()
        daemon.node.background = background  # type: ignore[method-assign]


# --- import ------------------------------------------------------------------------------------------------------------


async def test_import_lists_serves_and_announces(daemon: Daemon, http: httpx.AsyncClient, file: Path, sample: Sample) -> None:
    *progress, report = await events_of(http, {"path": str(file)}, "/v1/import")
    size = sum(map(len, sample.blocks.values()))
    assert report == {
        "event": "report",
        "manifest": str(sample.cid),
        "publisher": PUBLISHER,
        "tokens": 600,
        "blocks": len(sample.blocks),
        "bytes": len(whole(sample)),
        "new_bytes": size,
    }
    assert steps(progress) == ["reading", "syncing to the disk"]
    assert await artifacts(http) == [str(sample.cid)]
    assert all(daemon.node.store.read(cid) == data for cid, data in sample.blocks.items())
    await daemon.announced()
    assert (await http.get("/v1/status")).json()["announcing"]["keys"] == 4


async def test_a_client_that_leaves_ends_its_import_and_the_next_goes_on(
    daemon: Daemon, http: httpx.AsyncClient, file: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    write = daemon.node.store.write
    written: list[Cid] = []

    def hold(cid: Cid, data: bytes) -> None:
        if len(written) == 3:
            gate.wait()
        written.append(cid)
        write(cid, data)

    monkeypatch.setattr(car_reading, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(daemon.node.store, "write", hold)
    await leave(daemon, http, "/v1/import", {"path": str(file)}, gate)
    await until(lambda: not daemon.node._file_work.borrowed_tokens)
    assert 3 < len(written) < len(sample.blocks)
    assert await artifacts(http) == []
    assert (await http.post("/v1/gc", json={})).json()["blocks"] == 0
    kept = sum(len(sample.blocks[cid]) for cid in written)
    (*_, report) = await events_of(http, {"path": str(file)}, "/v1/import")
    assert report["new_bytes"] == sum(map(len, sample.blocks.values())) - kept
    assert await artifacts(http) == [str(sample.cid)]


def incomplete(file: Path, sample: Sample) -> None:
    file.write_bytes(without(sample, next(cid for cid in sample.blocks if cid.codec is Codec.RAW)))


async def test_an_import_is_refused_as_an_event(daemon: Daemon, http: httpx.AsyncClient, file: Path, sample: Sample) -> None:
    incomplete(file, sample)
    (*_, error) = await events_of(http, {"path": str(file)}, "/v1/import")
    assert (error["event"], error["code"]) == ("error", "fetch.incomplete")
    daemon.node.trust.rules.remove(PUBLISHER)
    (error,) = await events_of(http, {"path": str(file)}, "/v1/import")
    assert (error["event"], error["code"], error["fault"]) == ("error", "trust.untrusted", "policy")
    (error,) = await events_of(http, {"path": str(file.parent / "nothing.car")}, "/v1/import")
    assert (error["event"], error["code"]) == ("error", "usage")
    assert await artifacts(http) == []


async def test_more_files_than_are_worked_on_at_once_wait_visibly(
    daemon: Daemon, http: httpx.AsyncClient, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    def hold(*arguments: Any, **options: Any) -> Any:
        gate.wait()
        return import_car(*arguments, **options)

    monkeypatch.setattr("p2pkv_node.node.import_car", hold)
    daemon.node._file_work.total_tokens = 1
    ended: list[list[dict[str, Any]]] = []

    async def run() -> None:
        ended.append(await events_of(http, {"path": str(file)}, "/v1/import"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await until(gate.reached.is_set)
        nursery.start_soon(run)
        await until(lambda: bool(daemon.node._file_work.statistics().tasks_waiting))
        gate.open()
    assert [steps(events)[0] for events in ended] == ["reading", "waiting for other files"]
    assert [events[-1]["event"] for events in ended] == ["report", "report"]


# --- export ------------------------------------------------------------------------------------------------------------


async def test_export_writes_a_file_that_imports(
    daemon: Daemon, http: httpx.AsyncClient, tmp_path: Path, sample: Sample
) -> None:
    await daemon.plant(sample.artifact, sample.blocks)
    target = tmp_path / "exported.car"
    *progress, report = await events_of(http, {"manifest": str(sample.cid), "path": str(target)}, "/v1/export")
    assert target.read_bytes() == whole(sample)
    assert report == {
        "event": "report",
        "manifest": str(sample.cid),
        "file": str(target),
        "tokens": 600,
        "blocks": len(sample.blocks),
        "bytes": len(whole(sample)),
    }
    assert steps(progress) == ["writing", "syncing to the disk"]
    target.with_name("again.car.part").write_bytes(whole(sample)[:-100])
    body = {"manifest": str(sample.cid), "path": str(tmp_path / "again.car")}
    events = await events_of(http, body, "/v1/export")
    assert steps(events) == ["comparing with what is there", "writing", "syncing to the disk"]
    assert (tmp_path / "again.car").read_bytes() == whole(sample)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


async def test_an_export_is_refused_as_an_event(
    daemon: Daemon, http: httpx.AsyncClient, tmp_path: Path, sample: Sample
) -> None:
    body = {"manifest": str(sample.cid), "path": str(tmp_path / "x.car")}
    (error,) = await events_of(http, body, "/v1/export")
    assert (error["event"], error["code"]) == ("error", "artifact.not_found")
    await daemon.plant(sample.artifact, {sample.cid: sample.blocks[sample.cid]}, held=())
    (error,) = await events_of(http, body, "/v1/export")
    assert (error["event"], error["code"]) == ("error", "fetch.incomplete")


NO_PATHS: list[Any] = [None, 5, "", "x.car", "./x.car", "~/x.car", "../x.car", "/x\0.car", "/\ud800.car"]


@pytest.mark.parametrize("path", NO_PATHS, ids=ascii)
async def test_paths_are_absolute(http: httpx.AsyncClient, sample: Sample, path: Any) -> None:
    for call, body in (("import", {"path": path}), ("export", {"manifest": str(sample.cid), "path": path})):
        answer = await http.post(f"/v1/{call}", content=json.dumps(body).encode())  # in ASCII, whatever the path
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "usage")
        assert "`path`" in answer.json()["error"]["message"]
