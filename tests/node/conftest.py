"""A daemon in a town, a client of its control socket, a small artifact, and a bulk lane."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from p2pkv.store.home import HomeLayout
from p2pkv_node.bulk import BulkSettings, TlsBulkLane
from tests.support.artifacts import PUBLISHER, Sample, make_sample, model
from tests.support.lanes import DEADLINE_S, HOST, lane_threads, make_lane
from tests.support.town import Daemon, Town, open_town

TOKENS = list(range(1000, 1600))
PROMPT: dict[str, Any] = {"model_id": model().model_id.hex(), "dtype": "bf16", "token_ids": [*TOKENS, 1, 2]}


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(TOKENS, created=int(time.time()))


@pytest.fixture
async def daemon(town: Town) -> Daemon:
    return await town.start("daemon", trusted=[PUBLISHER])


@pytest.fixture
async def http(daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=str(HomeLayout(daemon.home).control_socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://p2pkv", timeout=20) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test, however it ends, leaves a lane's thread behind."""
    yield
    assert lane_threads() == []


@pytest.fixture
async def lane() -> AsyncIterator[TlsBulkLane]:
    """One node that is both provider and consumer."""
    with trio.fail_after(3 * DEADLINE_S):
        async with make_lane(BulkSettings(host=HOST)).running() as running:
            yield running


async def events_of(http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/fetch") -> list[dict[str, Any]]:
    """Return all events of one fetch, or of another call that answers with events."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.endswith("\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
