"""The events of a fetch over the control API: what happens, and where the blocks lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from p2pkv.artifact.read import open_artifact
from p2pkv.errors import IntegrityError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Tokens
from p2pkv.keys import encode_tokens
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location
from tests.node.conftest import PROMPT, TOKENS, events_of
from tests.support.artifacts import KEY, Sample
from tests.support.stores import Gate, flip_block, tampering
from tests.support.town import Daemon, Town, until


async def test_a_fetch_tells_all_that_happens(town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    events = await events_of(http, PROMPT)
    kinds = [event["event"] for event in events]
    assert set(kinds) == {"progress", "matched", "segment", "report"}
    assert kinds.index("matched") < kinds.index("segment") < kinds.index("report")
    assert kinds[-1] == "report"
    assert sorted(event["index"] for event in events if event["event"] == "segment") == [0, 1, 2]
    (matched,) = [event for event in events if event["event"] == "matched"]
    assert matched.pop("blocks").keys() == {str(sample.cid)}
    assert matched == {"event": "matched", "manifest": str(sample.cid), "hit_tokens": 600, "segments": 3}
    states = {event["state"] for event in events if event["event"] == "progress"}
    assert states <= {"looking up providers", "reading the manifest", "transferring blocks", "done"}
    assert {"transferring blocks", "done"} <= states
    report = events[-1]
    assert (report["manifest"], report["token_count"], report["hit_tokens"]) == (str(sample.cid), 600, 600)
    assert (report["segments"], report["local_bytes"], report["refusals"]) == (3, 0, [])
    assert report["bytes_by_peer"] == {provider.peer_id: sum(map(len, sample.blocks.values()))}
    assert report["rate_by_peer"].keys() == {provider.peer_id}
    assert {"first_provider_s", "manifest_s", "first_block_s", "done_s"} <= report["times"].keys()


def read_at(home: Path, place: tuple[str, int, int]) -> bytes:
    """Read what an event locates, as any program may that knows the home."""
    file, offset, size = place
    with (HomeLayout(home).blocks / file).open("rb") as pack:
        pack.seek(offset)
        return pack.read(size)


def places_of(events: list[dict[str, Any]]) -> list[tuple[Cid, Any]]:
    return [(Cid.parse(cid), place) for event in events for cid, place in event.get("blocks", {}).items()]


@pytest.mark.parametrize("inline", [True, False], ids=["tokens-in-the-manifest", "tokens-in-a-block"])
async def test_events_tell_where_blocks_lie(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample, inline: bool
) -> None:
    """All of the artifact is located once, at its exact bytes, whether it came or was here."""
    offered = sample if inline else with_token_block(sample)
    provider = await town.start("provider")
    await provider.plant(offered.artifact, offered.blocks)
    for local in (False, True):
        events = await events_of(http, PROMPT)
        assert events[-1]["hit_tokens"] == 600
        places = places_of(events)
        assert sorted(str(cid) for cid, _ in places) == sorted(map(str, offered.blocks))
        assert all(read_at(daemon.home, place) == offered.blocks[cid] for cid, place in places)
        (matched,) = [event for event in events if event["event"] == "matched"]
        assert len(matched["blocks"]) == (1 if inline else 2)
        for event in events:
            if event["event"] == "segment":
                node = offered.artifact.manifest.segments[event["index"]]
                named = offered.artifact.open_segment(event["index"], offered.blocks[node]).blocks()
                assert list(event["blocks"]) == [str(node), *(str(ref.cid) for ref in named)]
        assert (events[-1]["bytes_by_peer"] == {}) is local


def with_token_block(sample: Sample) -> Sample:
    """Return the artifact of the same text and blocks whose token ids lie in a block of their own."""
    ids = encode_tokens(sample.artifact.token_ids)
    cid = Cid.of_block(ids)
    envelope = Envelope.sign(replace(sample.artifact.manifest, tokens=Tokens(len(TOKENS), digest(ids), None, cid)), KEY)
    blocks = {known: data for known, data in sample.blocks.items() if known != sample.cid}
    return Sample(open_artifact(envelope.cid, envelope.encode(), ids), {**blocks, cid: ids, envelope.cid: envelope.encode()})


@pytest.mark.parametrize("what", ["manifest", "node", "block"])
async def test_a_block_that_vanished_has_no_place(
    daemon: Daemon, http: httpx.AsyncClient, sample: Sample, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It was found damaged between the daemon's check and the event: the client asks again."""
    await daemon.plant(sample.artifact, sample.blocks)
    node = sample.artifact.manifest.segments[1]
    (ref, *_) = sample.artifact.open_segment(1, sample.blocks[node]).blocks()
    victim = {"manifest": sample.cid, "node": node, "block": ref.cid}[what]
    locate = daemon.node.store.locate

    def locate_or_lose(cid: Cid) -> Location | None:
        if cid == victim:
            flip_block(daemon.home, victim, 9)
            with pytest.raises(IntegrityError):
                daemon.node.store.read(victim)
        return locate(cid)

    monkeypatch.setattr(daemon.node.store, "locate", locate_or_lose)
    places = dict(places_of(await events_of(http, PROMPT)))
    assert places.pop(victim) is None
    assert all(read_at(daemon.home, place) == sample.blocks[cid] for cid, place in places.items())


async def test_a_fetch_by_manifest_and_one_that_fails(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample
) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    events = await events_of(http, {"manifest": str(sample.cid)})
    assert events[-1]["hit_tokens"] == 600
    events = await events_of(http, {"manifest": str(Cid.of_node(b"nobody")), "patience_s": 10})
    assert events[-1]["event"] == "error"
    assert events[-1]["code"] == "artifact.not_found"
    assert events[-1]["advice"]


async def test_a_slice_and_then_the_rest(town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample) -> None:
    """A node that has some layers of each segment has no segment: it lists none as held and announces nothing."""
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    events = await events_of(http, {"manifest": str(sample.cid), "segments": 3, "layers": [1, 2], "in_order": True})
    report = events[-1]
    assert (report["segments"], report["hit_tokens"], report["layers"], report["complete"]) == (3, 600, [1, 2], False)
    told = [(event["index"], list(event["blocks"])) for event in events if event["event"] == "segment"]
    wanted = {
        index: sample.artifact.open_segment(index, sample.blocks[node]).layers[1]
        for index, node in enumerate(sample.artifact.manifest.segments)
    }
    nodes = sample.artifact.manifest.segments
    assert told == [(index, [str(nodes[index]), *(str(ref.cid) for ref in wanted[index])]) for index in range(3)]
    assert all(read_at(daemon.home, place) == sample.blocks[cid] for cid, place in places_of(events))
    assert daemon.node.store.index.match(sample.artifact.chain_keys)[0].held == b"\x00"
    assert not (await http.get("/v1/artifacts")).json()["artifacts"][0]["complete"]
    await until(lambda: daemon.node.fetches == 0)  # announcing comes at the very end
    assert daemon.node.announcer.statistics().keys == 0
    report = (await events_of(http, {"manifest": str(sample.cid), "segments": None, "layers": None}))[-1]
    assert (report["segments"], report["hit_tokens"], report["layers"], report["complete"]) == (3, 600, [0, 2], True)
    assert report["local_bytes"] == sum(ref.size for refs in wanted.values() for ref in refs)
    assert (await http.get("/v1/artifacts")).json()["artifacts"][0]["complete"]
    await until(lambda: daemon.node.announcer.statistics().keys == 4)


@pytest.mark.parametrize("outside", [{"segments": 4}, {"layers": [1, 3]}])
async def test_a_slice_that_the_artifact_has_not(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample, outside: dict[str, Any]
) -> None:
    await daemon.plant(sample.artifact, sample.blocks)
    (*_, error) = await events_of(http, {"manifest": str(sample.cid), **outside})
    assert (error["event"], error["code"], error["fault"]) == ("error", "usage", "local")
    (name,) = outside
    assert f"`{name}`" in error["message"]


async def test_a_client_that_goes_away_ends_its_fetch(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample
) -> None:
    gate = Gate()

    def hold(cid: Cid, data: bytes) -> bytes:
        if cid.codec is Codec.RAW:
            gate.wait()
        return data

    provider = await town.start("provider", serve_from=tampering(hold))
    await provider.plant(sample.artifact, sample.blocks)
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(events_of, http, PROMPT)
                await until(gate.reached.is_set)
                assert daemon.node.fetches == 1
                scope.cancel()
        await until(lambda: daemon.node.fetches == 0)
    finally:
        gate.open()
    assert (await http.get("/v1/status")).json()["fetches"] == 0
