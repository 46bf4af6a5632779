"""A node among its own collections: what is being published stays, what goes is announced no longer."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pkv.formats.cid import Cid
from p2pkv.ports import PeerAddress
from p2pkv.routing.boundaries import announce_keys
from p2pkv.store.collect import Collected
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.progress import Progress
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store, open_store
from p2pkv.swarm.context import Context, in_thread
from p2pkv.trust.policy import Decision
from p2pkv_node.collecting import Why
from p2pkv_node.config import NodeConfig
from p2pkv_node.node import Node
from sims.routing import MemoryRouting, ProviderRecords
from tests.support.artifacts import Sample, make_sample

ONE = make_sample(list(range(600)))
LONGER = make_sample([*range(600), *range(300)])  # shares two segments, and with them two boundaries


@pytest.fixture
async def node(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Node]:
    """A node of which only its store is real."""
    nothing: Any = None
    with open_store(tmp_path) as store:
        context = Context(
            network=nothing,
            routing=MemoryRouting(ProviderRecords(), PeerAddress("own")),
            store=store,
            catalog=store,
            judge=lambda manifest, cid: Decision(()),
            wall_clock=lambda: 0.0,
            rng=random.Random(0),
            offload=in_thread,
        )
        yield Node(NodeConfig(tmp_path), store, nothing, nothing, context, HomeTrust(store.layout), nursery)


async def publish(node: Node, sample: Sample) -> None:
    with open_staging(node.store.layout.home) as staging:
        for cid, data in sample.blocks.items():
            staging.write(cid, data)
        await node.publish(staging.name, sample.cid)


def keys(sample: Sample) -> set[bytes]:
    return set(announce_keys(sample.cid, len(sample.artifact.token_ids), sample.artifact.chain_keys))


async def test_what_is_being_published_is_not_collected(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Store.adopt

    def adopt_and_collect(store: Store, name: str, cids: Sequence[Cid], on_progress: Progress) -> None:
        adopt(store, name, cids, on_progress)
        assert store.collector.collect().blocks == 0

    monkeypatch.setattr(Store, "adopt", adopt_and_collect)
    await publish(node, ONE)
    assert (await node.collect()).blocks == 0
    assert all(node.store.read(cid) == data for cid, data in ONE.blocks.items())


async def test_what_goes_is_announced_no_longer_but_for_what_others_have(node: Node) -> None:
    await publish(node, ONE)
    await publish(node, LONGER)
    discarded: list[set[bytes]] = []
    node.announcer.discard = lambda keys: discarded.append(set(keys))  # type: ignore[method-assign]
    assert await node.remove(LONGER.cid)
    assert discarded == [keys(LONGER) - keys(ONE)]
    assert not await node.remove(LONGER.cid)


async def test_a_node_above_its_quota_makes_itself_smaller(node: Node, nursery: trio.Nursery) -> None:
    await publish(node, ONE)
    await publish(node, LONGER)
    node.store.collector._quota = sum(map(len, ONE.blocks.values())) + 1
    collect, done = node.collect, trio.Event()

    async def collect_and_tell(why: Why) -> Collected:
        collected = await collect(why=why)
        done.set()
        return collected

    node.collect = collect_and_tell  # type: ignore[method-assign, assignment]
    nursery.start_soon(node.keep_below_quota)
    with trio.fail_after(10):
        await done.wait()
    assert node.store.statistics().bytes <= node.store.collector._quota
    nursery.cancel_scope.cancel()
