"""The peers of a daemon as its operator sees them: by API and by command."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
import trio

from p2pkv.cli.peers import _lines
from p2pkv.formats.cid import Cid, Codec
from p2pkv.limits import BAN_SECONDS
from tests.node.conftest import PROMPT, events_of
from tests.support.artifacts import Sample
from tests.support.stores import Gate, tampering
from tests.support.town import Daemon, Town, until


async def rows_of(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in await daemon.client.peers()}


async def test_a_peer_that_is_connected_and_one_that_lied(town: Town, daemon: Daemon) -> None:
    other = await town.start("other", bulk=False)
    await daemon.node.network.connect(other.address)
    daemon.node.context.bans.ban(other.peer_id, trio.current_time())
    daemon.node.context.bans.ban("12D3KooWFarAway", trio.current_time())
    rows = await rows_of(daemon)
    row = rows[other.peer_id]
    assert row["connected"]
    assert abs(row["banned_until"] - time.time() - BAN_SECONDS) < 30
    assert other.address.partition("/p2p/")[0] in row["addresses"]
    assert (row["receiving_rate"], row["wanted_blocks"], row["sending_rate"], row["outstanding_bytes"]) == (0.0, 0, 0.0, 0)
    away = rows["12D3KooWFarAway"]
    assert (away["connected"], away["dht"], away["addresses"]) == (False, False, [])
    assert {row["peer"] for row in rows.values() if row["banned_until"] is None} == {town._daemons[0].peer_id}


async def test_what_is_on_its_way_is_seen_at_both_ends(
    town: Town, daemon: Daemon, http: httpx.AsyncClient, sample: Sample
) -> None:
    gate, served = Gate(), 0

    def hold(cid: Cid, data: bytes) -> bytes:
        nonlocal served
        if cid.codec is Codec.RAW:
            served += 1
            if served > 2:
                gate.wait()
        return data

    provider = await town.start("provider", bulk=False, serve_from=tampering(hold))
    await provider.plant(sample.artifact, sample.blocks)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(events_of, http, PROMPT)
            await until(gate.reached.is_set)
            ours = (await rows_of(daemon))[provider.peer_id]
            theirs = (await rows_of(provider))[daemon.peer_id]
            gate.open()
    finally:
        gate.open()
    assert ours["wanted_blocks"] > 0
    assert ours["connected"]
    assert theirs["outstanding_bytes"] > 0
    assert theirs["sending_rate"] > 0
    await until(lambda: not provider.node.server.statistics().rate_by_peer)  # nothing is kept of a peer that left


ROW: dict[str, Any] = {
    "peer": "12D3KooWOther",
    "connected": True,
    "dht": True,
    "banned_until": None,
    "receiving_rate": 2048.0,
    "wanted_blocks": 3,
    "snubbed": False,
    "sending_rate": 1024.0,
    "outstanding_bytes": 4096,
    "addresses": ["/ip4/192.0.2.1/tcp/4101"],
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "connected, DHT, from it 2.0 KiB/s, 3 blocks asked, to it 1.0 KiB/s, 4.0 KiB on the way"),
        ({"snubbed": True, "sending_rate": 0.1, "outstanding_bytes": 0}, "connected, DHT, from it silent, 3 blocks asked"),
        (
            {"connected": False, "dht": False, "wanted_blocks": 0, "sending_rate": 0.0, "outstanding_bytes": 0},
            "known",
        ),
    ],
)
def test_a_row_for_people(changes: dict[str, Any], line: str) -> None:
    assert _lines({**ROW, **changes}) == [f"12D3KooWOther  {line}", "  /ip4/192.0.2.1/tcp/4101"]


def test_a_ban_says_how_long_it_lasts() -> None:
    (line, *_) = _lines({**ROW, "banned_until": time.time() + 601, "wanted_blocks": 0})
    assert "banned for 10 min" in line
