"""Calls of the control API as the clients build and read them, and what a report says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from p2pkv.artifact.slice import WHOLE, Slice
from p2pkv.client import calls
from p2pkv.client.report import PrefillReport
from p2pkv.errors import DaemonUnreachableError, P2pkvError, UntrustedPublisherError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_FILE_OFFSET
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location

CID = Cid.of_node(b"manifest")
BLOCK = Cid.of_block(b"block")


def test_what_is_asked_for() -> None:
    assert calls.artifact(CID) == calls.Call("GET", f"/v1/artifacts/{CID}")
    whole = {"manifest": str(CID), "patience_s": 5.0}
    assert calls.fetch_manifest(CID, 5.0, WHOLE, in_order=False).body == whole
    some = calls.fetch_manifest(CID, 5.0, Slice(3, range(2, 4)), in_order=True).body
    assert some == {**whole, "segments": 3, "layers": [2, 4], "in_order": True}
    assert calls.publish("name", CID).body == {"staging": "name", "manifest": str(CID)}
    assert calls.import_car(Path("/x.car")) == calls.Call("POST", "/v1/import", {"path": "/x.car"})
    assert calls.export_car(CID, Path("x.car")).body == {"manifest": str(CID), "path": str(Path("x.car").absolute())}
    assert calls.lease(CID, 5.0) == calls.Call("POST", "/v1/leases", {"manifest": str(CID), "seconds": 5.0})
    assert calls.renew("name", 5.0) == calls.Call("POST", "/v1/leases/name", {"seconds": 5.0})
    assert calls.release("name") == calls.Call("DELETE", "/v1/leases/name")
    assert calls.trust_add("did", "note") == calls.Call("POST", "/v1/trust", {"publisher": "did", "note": "note"})
    assert calls.trust_remove("did") == calls.Call("DELETE", "/v1/trust", {"publisher": "did"})


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
    for content in (b"", b"no JSON", b"[]", b"\xff", b"[" * 100_000):
        with pytest.raises(DaemonUnreachableError, match="without JSON"):
            calls.read_answer(httpx.Response(502, content=content))


def test_the_lines_of_a_fetch() -> None:
    for line in ("", ": a comment", "event: message"):
        assert calls.read_event(line) is None
    for event in (
        {"event": "matched", "manifest": str(CID), "blocks": {}},
        {"event": "segment", "index": 0, "blocks": {str(BLOCK): ["00000001.pack", 128, 5]}},
        {"event": "segment", "index": 0, "blocks": {}, "of_later": 1},
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
        '{"event": "matched", "manifest": 5, "blocks": {}}',
        '{"event": "matched", "manifest": "bafy"}',
        '{"event": "matched", "manifest": "bafy", "blocks": null}',
        '{"event": "matched", "manifest": "bafy", "blocks": []}',
        '{"event": "segment"}',
        '{"event": "segment", "index": 0}',
        '{"event": "segment", "index": 0, "blocks": [["00000001.pack", 128, 5]]}',
        '{"event": "segment", "index": -1, "blocks": {}}',
        '{"event": "segment", "index": "0", "blocks": {}}',
        '{"event": "segment", "index": true, "blocks": {}}',
        '{"event": "segment", "index": 0.0, "blocks": {}}',
        "[" * 100_000,
        "9" * 10_000,
    ],
    ids=lambda text: text[:60],
)
def test_an_event_that_is_none(text: str) -> None:
    with pytest.raises(DaemonUnreachableError) as caught:
        calls.read_event(f"data: {text}")
    assert "version" in caught.value.advice


# --- where blocks lie -----------------------------------------------------------------------------------------------------


def locations(*places: Any) -> dict[str, Any]:
    return {"event": "segment", "index": 0, "blocks": {f"block {number}": place for number, place in enumerate(places)}}


def test_the_places_of_blocks() -> None:
    places = [
        ["00000001.pack", 128, 5],
        None,
        ["123456789.pack", MAX_FILE_OFFSET, MAX_CODED_BLOCK_BYTES],
        ["00000000.pack", 0, 0],
    ]
    assert calls.read_locations(locations(*places)) == {
        "block 0": Location("00000001.pack", 128, 5),
        "block 2": Location("123456789.pack", MAX_FILE_OFFSET, MAX_CODED_BLOCK_BYTES),
        "block 3": Location("00000000.pack", 0, 0),
    }


NO_NAMES = [
    "",
    "x",
    "../x",
    "../00000001.pack",
    "/etc/passwd",
    "./00000001.pack",
    "00000001.pack/../../x",
    "00000001.pack/../../00000001.pack",
    "0000001.pack",
    "00000001.pack\n",
    "00000001.pack\0",
    " 00000001.pack",
    "00000001.packs",
    "00000001xpack",
    "-0000001.pack",
    "\u0660" * 8 + ".pack",  # digits, but not ASCII's
    5,
    True,
    None,
    ["00000001.pack"],
]
NO_NUMBERS = [-1, -(2**70), 2**63, 2**80, True, False, 1.0, 1e300, "1", None, [1], {}]
NO_SIZES = [*NO_NUMBERS, MAX_CODED_BLOCK_BYTES + 1]
NO_SHAPES = [
    *(True, 0, "00000001.pack", [], {}, ["00000001.pack"], ["00000001.pack", 128], ["00000001.pack", 128, 5, 6]),
    *([128, 5, "00000001.pack"], [["00000001.pack", 128, 5]], {"file": "00000001.pack", "offset": 128, "size": 5}),
]
NO_PLACES = [
    *([name, 128, 5] for name in NO_NAMES),
    *(["00000001.pack", offset, 5] for offset in NO_NUMBERS),
    *(["00000001.pack", 128, size] for size in NO_SIZES),
    *NO_SHAPES,
]


@pytest.mark.parametrize("place", NO_PLACES, ids=repr)
def test_what_is_no_place_in_the_folder_of_blocks(place: Any) -> None:
    """One such place among good ones is enough: whoever sent it is not what it should be."""
    with pytest.raises(DaemonUnreachableError) as caught:
        calls.read_locations(locations(["00000001.pack", 128, 5], place, None))
    assert "'block 1'" in caught.value.message
    assert "version" in caught.value.advice


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(NO_NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
pack_names = st.integers(0, 10**9).map("{:08}.pack".format)
places = st.tuples(pack_names, st.integers(0, MAX_FILE_OFFSET), st.integers(0, MAX_CODED_BLOCK_BYTES))
nearly_places = st.tuples(pack_names | st.sampled_from(NO_NAMES), st.integers() | json_values, st.integers() | json_values)


@given(st.dictionaries(st.text(max_size=8), st.none() | places | nearly_places | json_values, max_size=3))
def test_whatever_is_said_leads_into_packs_alone(blocks: dict[str, Any]) -> None:
    """Each event as it comes over the socket: either all of its places are places, or it is refused as a whole."""
    line = f"data: {json.dumps({'event': 'segment', 'index': 0, 'blocks': blocks})}"
    event = calls.read_event(line)
    assert event is not None
    try:
        found = calls.read_locations(event)
    except DaemonUnreachableError:
        return
    assert found.keys() == {cid for cid, place in blocks.items() if place is not None}
    for location in found.values():
        assert re.fullmatch(r"[0-9]{8,}\.pack", location.file, re.ASCII)
        assert {type(location.offset), type(location.size)} == {int}
        assert 0 <= location.offset < 2**63
        assert 0 <= location.size <= MAX_CODED_BLOCK_BYTES


@given(st.text(max_size=40) | json_values.map(json.dumps))
def test_a_line_is_an_event_or_one_error(text: str) -> None:
    try:
        event = calls.read_event(f"data: {text}")
    except P2pkvError:
        return
    assert event is not None
    assert event["event"] in ("matched", "segment", "progress", "report")


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
