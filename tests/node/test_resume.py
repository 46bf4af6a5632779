"""What was being fetched when a node ended goes on at its next start; what failed or was abandoned does not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pkv.errors import P2pkvError
from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv.units import KIB
from tests.support.artifacts import KEY, PUBLISHER, Sample, make_sample
from tests.support.town import Daemon, Town, until


@pytest.fixture
async def town(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Town]:
    town = Town(tmp_path, nursery)
    await town.start("bootstrap", mirror=False)
    yield town
    await town.close()


@pytest.fixture
def sample() -> Sample:
    return make_sample(list(range(3_000)), created=int(time.time()))


async def begin(daemon: Daemon, sample: Sample, nursery: trio.Nursery) -> None:
    """Let a client fetch, and wait until something is here."""
    begun = trio.Event()

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "progress" and event["done_bytes"]:
            begun.set()

    async def fetch() -> None:
        with suppress(P2pkvError):  # the daemon ended
            await daemon.client.fetch(sample.cid, patience_s=60.0, on_event=hear)

    nursery.start_soon(fetch)
    with trio.fail_after(20):
        await begun.wait()


async def test_a_download_goes_on_after_a_restart(town: Town, sample: Sample, nursery: trio.Nursery) -> None:
    provider = await town.start("provider", upload_limit=64 * KIB)
    await provider.plant(sample.artifact, sample.blocks)
    first = await town.start("consumer")
    await begin(first, sample, nursery)
    await first.stop()
    provider.node.server.scheduler = type(provider.node.server.scheduler)(trio.current_time())  # at full speed from here on
    second = await town.start("consumer")
    await until(lambda: second.node.store.index.counts() == (1, 1))
    assert all(second.node.store.read(cid) == data for cid, data in sample.blocks.items())
    await until(lambda: second.node.store.downloads.unfinished() == [])


async def test_what_was_abandoned_or_failed_does_not_go_on(town: Town, sample: Sample, nursery: trio.Nursery) -> None:
    provider = await town.start("provider", upload_limit=64 * KIB)
    await provider.plant(sample.artifact, sample.blocks)
    consumer = await town.start("consumer")
    async with trio.open_nursery() as client:
        await begin(consumer, sample, client)
        await until(lambda: consumer.node.store.downloads.unfinished() == [sample.cid])
        client.cancel_scope.cancel()
    await until(lambda: consumer.node.store.downloads.unfinished() == [])
    unknown = make_sample(list(range(10)))
    with pytest.raises(P2pkvError):
        await consumer.client.fetch(unknown.cid, patience_s=2.0)
    assert consumer.node.store.downloads.unfinished() == []


async def test_a_download_of_what_was_taken_back_meanwhile_does_not_go_on(
    town: Town, sample: Sample, nursery: trio.Nursery
) -> None:
    provider = await town.start("provider", upload_limit=64 * KIB)
    await provider.plant(sample.artifact, sample.blocks)
    first = await town.start("consumer")
    await begin(first, sample, nursery)
    await first.stop()
    items = (Revoked(Scope.MANIFEST, sample.cid, "wrong tokenizer"),)
    listed = Revocations(publisher=PUBLISHER, sequence=1, created=0, items=items)
    StatementFiles(HomeLayout(first.home).statements).hear(SignedStatement.sign(listed, KEY))
    second = await town.start("consumer")
    await until(lambda: second.node.store.downloads.unfinished() == [])
    assert second.node.store.index.counts()[1] == 0
    assert (second.node.context.tally.lane_bytes, second.node.context.tally.stream_bytes) == (0, 0)
