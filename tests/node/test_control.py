"""The control API of a real daemon over its unix socket: every call, every event, and every body that is refused."""

from __future__ import annotations

import base64
import time
from typing import Any

import httpx
import pytest
import trio

from p2pkv import __version__
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.limits import MAX_REQUEST_BYTES, MAX_TRUST_NOTE_BYTES
from p2pkv.store.home import HomeLayout
from tests.node.conftest import PROMPT, events_of
from tests.support.artifacts import PUBLISHER, Sample, model
from tests.support.samples import manifest
from tests.support.town import Daemon, Town, until

OTHER_DID = encode_did(bytes(range(32)))


def error_of(answer: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = answer.json()["error"]
    assert error.keys() == {"code", "fault", "message", "advice"}
    assert error["advice"]
    return error


async def test_a_defect_of_the_daemon_is_said_as_every_error_and_logged(
    daemon: Daemon, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret details")

    monkeypatch.setattr(daemon.node.store.collector, "collect", fail)
    answer = await http.post("/v1/gc", json={})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
    assert "secret details" not in answer.text
    await until(lambda: "ZeroDivisionError: secret details" in caplog.text)
    assert (await http.get("/v1/status")).status_code == 200


# --- resources ------------------------------------------------------------------------------------------------------------


async def test_status(daemon: Daemon, http: httpx.AsyncClient, sample: Sample) -> None:
    await daemon.plant(sample.artifact, sample.blocks)
    status = (await http.get("/v1/status")).json()
    assert (status["version"], status["peer_id"], status["home"]) == (__version__, daemon.peer_id, str(daemon.home))
    assert status["addresses"] == list(daemon.node.network.addresses)
    assert len(status["connected_peers"]) == len(status["dht_peers"]) == 1  # the bootstrap node
    assert 0 <= status["uptime_s"] < 60
    assert (status["fetches"], status["banned_peers"], status["trusted_publishers"]) == (0, [], 1)
    size = sum(map(len, sample.blocks.values()))
    assert status["store"] == {
        "blocks": len(sample.blocks),
        "bytes": size,
        "artifacts": 1,
        "complete_artifacts": 1,
        "damaged_blocks": 0,
    }
    nothing = {
        "channels": 0,
        "blocks": 0,
        "bytes": 0,
        "refused": 0,
        "rate": 0.0,
        "outstanding_by_peer": {},
        "rate_by_peer": {},
    }
    assert status["served"] == nothing
    assert status["announcing"] == {"keys": 4, "announced": 4, "late_s": 0.0}


async def test_stats_tell_what_the_metrics_tell(town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    before = (await http.get("/v1/stats")).json()
    assert (before["prompt_tokens"], before["outcomes"]["complete"], before["room"]["store"]["blocks"]) == (0, 0, 0)
    await events_of(http, PROMPT)
    await until(lambda: daemon.node.fetches == 0)
    stats = (await http.get("/v1/stats")).json()
    assert (stats["prompt_tokens"], stats["hit_tokens"], stats["outcomes"]["complete"]) == (602, 600, 1)
    assert stats["lane_bytes"] + stats["stream_bytes"] == sum(map(len, sample.blocks.values()))
    assert (stats["room"]["store"]["blocks"], stats["room"]["leases"]) == (len(sample.blocks), 1)
    assert (stats["unready"], stats["served"]["bytes"]) == (None, 0)


async def test_artifacts_and_one_artifact(daemon: Daemon, http: httpx.AsyncClient, sample: Sample) -> None:
    assert (await http.get("/v1/artifacts")).json() == {"artifacts": []}
    await daemon.plant(sample.artifact, sample.blocks)
    (row,) = (await http.get("/v1/artifacts")).json()["artifacts"]
    assert (row["manifest_cid"], row["model_id"]) == (str(sample.cid), model().model_id.hex())
    assert (row["token_count"], row["segment_count"], row["complete"]) == (600, 3, True)
    found = (await http.get(f"/v1/artifacts/{sample.cid}")).json()
    assert base64.b64decode(found["envelope"]) == sample.blocks[sample.cid]
    assert (found["manifest"], found["token_block"]) == (str(sample.cid), None)


async def test_an_artifact_that_is_not_here_or_no_cid(http: httpx.AsyncClient) -> None:
    answer = await http.get(f"/v1/artifacts/{Cid.of_node(b'nobody')}")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "artifact.not_found")
    answer = await http.get("/v1/artifacts/not-a-cid")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "usage")


async def test_trust_is_added_listed_and_removed(daemon: Daemon, http: httpx.AsyncClient) -> None:
    theirs = manifest(publisher=OTHER_DID, created=int(time.time()), expires=None)

    def accepted() -> bool:
        return daemon.node.context.judge(theirs, Cid.of_node(b"")).accepted

    answer = await http.post("/v1/trust", json={"publisher": OTHER_DID, "note": "a friend"})
    assert (answer.status_code, answer.json()["added"]) == (201, True)
    assert answer.json()["rule"]["action"] == "accept"
    answer = await http.post("/v1/trust", json={"publisher": OTHER_DID})
    assert (answer.status_code, answer.json()["added"]) == (200, False)
    listed = (await http.get("/v1/trust")).json()["rules"]
    assert [rule["publisher"] for rule in listed] == [PUBLISHER, OTHER_DID]
    assert accepted()
    rejecting = {"action": "reject", "publisher": OTHER_DID, "model": theirs.model_id.hex()}
    assert (await http.post("/v1/trust", json=rejecting)).status_code == 201
    assert not accepted()
    for removed in (2, 0):
        answer = await http.request("DELETE", "/v1/trust", json={"publisher": OTHER_DID})
        assert len(answer.json()["removed"]) == removed
    assert not accepted()


# --- fetch ----------------------------------------------------------------------------------------------------------------


NONSENSE: list[dict[str, Any]] = [
    {"token_ids": None},
    {"token_ids": []},
    {"token_ids": ["1"]},
    {"token_ids": [True]},
    {"token_ids": [1.5]},
    {"token_ids": "1000"},
    {"shared": 0},
    {"shared": 603},
    {"shared": True},
    {"shared": "600"},
    {"model_id": "xyz"},
    {"model_id": "00"},
    {"model_id": None},
    {"dtype": "int8"},
    {"dtype": None},
    {"patience_s": 0},
    {"patience_s": -1},
    {"patience_s": True},
    {"patience_s": "long"},
    {"patience_s": 1e9},
    {"manifest": 5},
    {"in_order": 1},
    {"in_order": None},
    {"segments": 1},
    {"layers": [0, 1]},
    {"impatient": True},
    *({"quorum": value} for value in (0, 1, 17, -2, True, 2.0, "2", [2])),
]
NO_SLICES: list[dict[str, Any]] = [
    *({"segments": value} for value in (0, -1, 1.0, True, "1", [1], 2**40)),
    *({"layers": value} for value in (1, "0:1", [], [0], [0, 1, 2], [0, 0], [1, 0], [-1, 1], [0, 2**40], [0, 1.0])),
    *({"layers": value} for value in ([False, True], [None, 1], ["0", "1"], {"0": 1})),
    {"in_order": "yes"},
    {"impatient": 1},
    {"quorum": 2},
]


async def test_a_fetch_of_nonsense_is_refused_by_name(http: httpx.AsyncClient) -> None:
    for changes in NONSENSE:
        answer = await http.post("/v1/fetch", json={**PROMPT, **changes})
        assert answer.status_code == 400, changes
        error = error_of(answer)
        assert (error["code"], error["fault"]) == ("usage", "local"), changes
        assert f"`{next(iter(changes))}`" in error["message"], changes


async def test_a_slice_that_is_none_is_refused_by_name(http: httpx.AsyncClient) -> None:
    for changes in NO_SLICES:
        answer = await http.post("/v1/fetch", json={"manifest": str(Cid.of_node(b"nobody")), **changes})
        assert answer.status_code == 400, changes
        error = error_of(answer)
        assert (error["code"], error["fault"]) == ("usage", "local"), changes
        assert f"`{next(iter(changes))}`" in error["message"], changes


async def test_a_token_that_is_no_u32_is_refused_and_the_daemon_lives(http: httpx.AsyncClient) -> None:
    for token in (-1, 2**32, 2**80):
        answer = await http.post("/v1/fetch", json={**PROMPT, "token_ids": [1, token]})
        assert '"usage"' in answer.text, token
    assert (await http.get("/v1/status")).status_code == 200


# --- requests -------------------------------------------------------------------------------------------------------------


NO_BODIES = {
    "empty": (b"", "not JSON"),
    "cut off": (b"{", "not JSON"),
    "not UTF-8": (b"\xff\xfe", "not JSON"),
    "too deep": (b"[" * 200_000, "not JSON"),
    "a long number": (b'{"patience_s": ' + b"9" * 10_000 + b"}", "not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "text": (b'"text"', "not a JSON object"),
}


@pytest.mark.parametrize("path", ["/v1/fetch", "/v1/publish", "/v1/trust"])
async def test_a_body_that_is_none(http: httpx.AsyncClient, path: str) -> None:
    for name, (content, message) in NO_BODIES.items():
        answer = await http.post(path, content=content)
        assert answer.status_code == 400, name
        error = error_of(answer)
        assert (error["code"], message in error["message"]) == ("usage", True), name
    assert (await http.get("/v1/status")).status_code == 200


BAD_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/leases", {}),
    ("/v1/leases", {"manifest": "x", "seconds": 5}),
    *(("/v1/leases", {"manifest": str(Cid.of_node(b"")), "seconds": value}) for value in (0, -1, True, "5", None, 1e9)),
    ("/v1/leases/name", {"seconds": 0}),
    ("/v1/import", {}),
    ("/v1/export", {"path": "/x.car"}),
    ("/v1/export", {"path": "/x.car", "manifest": "x"}),
    ("/v1/publish", {}),
    ("/v1/publish", {"manifest": "x", "staging": "x"}),
    ("/v1/publish", {"manifest": 5, "staging": "x"}),
    ("/v1/publish", {"manifest": str(Cid.of_node(b""))}),
    ("/v1/trust", {}),
    ("/v1/trust", {"publisher": 1}),
    ("/v1/trust", {"publisher": "did:key:zNo"}),
    ("/v1/trust", {"publisher": OTHER_DID, "model": "12"}),
    ("/v1/trust", {"publisher": "*"}),
    ("/v1/trust", {"publisher": OTHER_DID, "note": "x" * (MAX_TRUST_NOTE_BYTES + 1)}),
]


async def test_a_call_with_a_bad_field(http: httpx.AsyncClient) -> None:
    for path, body in BAD_CALLS:
        answer = await http.post(path, json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "usage"), (path, body)


async def test_a_body_that_is_too_large_is_refused_before_all_of_it_is_sent(daemon: Daemon, http: httpx.AsyncClient) -> None:
    socket = await trio.open_unix_socket(str(HomeLayout(daemon.home).control_socket))
    with trio.fail_after(20):
        async with socket:
            head = f"POST /v1/fetch HTTP/1.1\r\nhost: p2pkv\r\ncontent-length: {4 * MAX_REQUEST_BYTES}\r\n\r\n"
            await socket.send_all(head.encode())
            await socket.send_all(bytes(MAX_REQUEST_BYTES + 1))
            answer = await socket.receive_some(2**16)
    assert answer.startswith(b"HTTP/1.1 400")
    assert (await http.get("/v1/status")).status_code == 200


async def test_unknown_paths_and_methods(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/nothing")).status_code == 404
    assert (await http.get("/v1/publish")).status_code == 405


async def test_shutdown(daemon: Daemon, http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/shutdown")).json() == {"stopping": True}
    await http.aclose()
    with trio.fail_after(5):
        await daemon.stop()
    assert not HomeLayout(daemon.home).control_socket.exists()
