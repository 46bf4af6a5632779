"""Calls of the control API as the clients build and read them, and what a report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from p2pkv.client import calls
from p2pkv.client.report import PrefillReport
from p2pkv.errors import DaemonUnreachableError, P2pkvError, UntrustedPublisherError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.store.home import HomeLayout

CID = Cid.of_node(b"manifest")
BLOCK = Cid.of_block(b"block")


def test_what_is_asked_for() -> None:
    assert calls.artifact(CID) == calls.Call("GET", f"/v1/artifacts/{CID}")
    assert calls.fetch_manifest(CID, 5.0).body == {"manifest": str(CID), "patience_s": 5.0}
    assert calls.publish("name", CID, [BLOCK]).body == {"staging": "name", "manifest": str(CID), "cids": [str(BLOCK)]}
    assert calls.trust_add("did", "note") == calls.Call("POST", "/v1/trust", {"did": "did", "note": "note"})
    assert calls.trust_remove("did") == calls.Call("DELETE", "/v1/trust", {"did": "did"})


def test_no_socket_is_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachableError) as caught:
        calls.socket_of(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "p2pkv-node" in caught.value.advice
    HomeLayout(tmp_path).control_socket.touch()
    assert calls.socket_of(tmp_path) == HomeLayout(tmp_path).control_socket


def test_an_answer_is_its_json_or_the_error_it_reports() -> None:
    assert calls.read_answer(httpx.Response(200, json={"a": 1})) == {"a": 1}
    error = UntrustedPublisherError("nobody knows them", advice="Ask around.")
    with pytest.raises(UntrustedPublisherError) as caught:
        calls.read_answer(httpx.Response(403, json={"error": error.to_dict()}))
    assert (caught.value.message, caught.value.advice) == (error.message, error.advice)
    with pytest.raises(P2pkvError, match="something new"):
        calls.read_answer(httpx.Response(400, json={"error": {"code": "of.later", "message": "something new"}}))
    with pytest.raises(P2pkvError, match="answered 500"):
        calls.read_answer(httpx.Response(500, json={}))
    for content in (b"", b"no JSON", b"[]", b"\xff"):
        with pytest.raises(DaemonUnreachableError, match="without JSON"):
            calls.read_answer(httpx.Response(502, content=content))


def test_the_lines_of_a_fetch() -> None:
    for line in ("", ": a comment", "event: message"):
        assert calls.read_event(line) is None
    for event in (
        {"event": "matched", "manifest": str(CID)},
        {"event": "segment", "index": 0},
        {"event": "progress"},
        {"event": "report"},
    ):
        assert calls.read_event(f"data: {json.dumps(event)}") == event
    with pytest.raises(UsageError, match="wrong"):
        calls.read_event('data: {"event": "error", "code": "usage", "message": "wrong", "advice": "Do it right."}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"event": 5}',
        '{"event": "later"}',
        '{"event": "matched"}',
        '{"event": "matched", "manifest": 5}',
        '{"event": "segment"}',
        '{"event": "segment", "index": -1}',
        '{"event": "segment", "index": "0"}',
    ],
)
def test_an_event_that_is_none(text: str) -> None:
    with pytest.raises(DaemonUnreachableError) as caught:
        calls.read_event(f"data: {text}")
    assert "version" in caught.value.advice


def test_a_daemon_that_is_gone_is_told_from_one_that_is_stuck(tmp_path: Path) -> None:
    gone = calls.unreachable(httpx.ConnectError("refused"), tmp_path)
    stuck = calls.unreachable(httpx.ReadTimeout("late"), tmp_path)
    assert gone.code == stuck.code == "daemon.unreachable"
    assert "is not running" in gone.message
    assert "does not answer" in stuck.message
    assert "resume" in stuck.advice


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hit_tokens": 0}, "no hit for 3,774 tokens: nothing published was found"),
        ({"hit_tokens": 0, "miss": "it [a.code] Do so."}, "no hit for 3,774 tokens: it [a.code] Do so."),
        ({"hit_tokens": 3584, "times": {"loaded_s": 0.0312}}, "hit 3,584 of 3,774 tokens from the local store in 31 ms"),
        (
            {"hit_tokens": 3584, "bytes_by_peer": {"a": 2**20, "b": 2**20}, "times": {"loaded_s": 1.5}},
            "hit 3,584 of 3,774 tokens from 2 peers, 2.0 MiB in 1.50 s",
        ),
        (
            {"hit_tokens": 256, "bytes_by_peer": {"a": 512}, "times": {"loaded_s": 1.5}},
            "hit 256 of 3,774 tokens from 1 peer, 512 B in 1.50 s",
        ),
    ],
)
def test_what_a_report_says(fields: dict[str, Any], text: str) -> None:
    report = PrefillReport(prompt_tokens=3774, **fields)
    assert str(report) == text
    assert report.bytes_fetched == sum(fields.get("bytes_by_peer", {}).values())
