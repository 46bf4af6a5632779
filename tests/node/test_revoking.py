"""Real daemons: what a publisher takes back is neither used, served nor announced, by all who hear of it, also offline."""

from __future__ import annotations

import threading

import pytest
import trio

from p2pkv.errors import P2pkvError, RevokedError
from p2pkv.formats.cid import Cid
from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.formats.tensors import Dtype
from p2pkv.routing import followed
from p2pkv.store.home import HomeLayout
from p2pkv.store.index import ArtifactIndex, StoredArtifact
from p2pkv.store.statement_files import StatementFiles
from p2pkv.swarm import statements
from p2pkv.swarm.target import ManifestTarget, PromptTarget
from tests.node.conftest import TOKENS
from tests.support.artifacts import KEY, PUBLISHER, Sample, model
from tests.support.town import Daemon, Town, until

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "STATEMENTS_SCAN_S", 0.05)
    monkeypatch.setattr(followed, "STATEMENTS_PERIOD_S", 0.3)
    monkeypatch.setattr(followed, "STATEMENTS_RETRY_S", 0.3)


def take_back(daemon: Daemon, cid: Cid) -> None:
    """Do what ``p2pkv revoke`` does on the daemon's home."""
    items = (Revoked(Scope.MANIFEST, cid, "wrong tokenizer"),)
    listed = Revocations(publisher=PUBLISHER, sequence=1, created=0, items=items)
    StatementFiles(HomeLayout(daemon.home).statements).hear(SignedStatement.sign(listed, KEY))


async def prompt(daemon: Daemon) -> tuple[int, list[str]]:
    target = PromptTarget(model().model_id, Dtype.BF16, (*TOKENS, 1, 2))
    report = await daemon.node.fetch(target, lambda event: None, PATIENCE_S)
    return report.hit_tokens, [refusal.code for refusal in report.refusals]


async def announced_keys(daemon: Daemon) -> int:
    await daemon.announced()
    return daemon.node.announcer.statistics().keys


async def test_a_publishers_own_node_withholds_what_it_took_back(town: Town, sample: Sample) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    provider.node.announce(sample.artifact)
    assert await announced_keys(provider) > 1
    take_back(provider, sample.cid)
    await until(lambda: provider.node.context.withheld == {sample.cid})
    await until(lambda: provider.node.announcer.statistics().keys == 1)  # that of the publisher
    assert await prompt(provider) == (0, ["trust.revoked"])
    consumer = await town.start("consumer")
    with pytest.raises(P2pkvError) as caught:
        await consumer.node.fetch(ManifestTarget(sample.cid), lambda event: None, 5.0)
    assert caught.value.code in {"artifact.not_found", "trust.revoked"}


async def test_a_consumer_hears_of_it_and_obeys_it_offline_after_a_restart(town: Town, sample: Sample) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    consumer = await town.start("consumer")
    await consumer.node.fetch(ManifestTarget(sample.cid), lambda event: None, PATIENCE_S)
    assert await prompt(consumer) == (600, [])
    take_back(provider, sample.cid)
    await until(lambda: consumer.node.context.withheld == {sample.cid})
    assert await prompt(consumer) == (0, ["trust.revoked"])
    await provider.stop()
    await consumer.stop()
    again = await town.start("consumer", bootstrap=())
    assert again.node.context.withheld == {sample.cid}
    assert await prompt(again) == (0, ["trust.revoked"])
    with pytest.raises(RevokedError, match="wrong tokenizer"):
        await again.node.fetch(ManifestTarget(sample.cid), lambda event: None, PATIENCE_S)


async def test_what_was_taken_back_is_not_imported(town: Town, sample: Sample) -> None:
    daemon = await town.start("daemon")
    await daemon.plant(sample.artifact, sample.blocks)
    file = daemon.home / "a.car"
    await daemon.node.export_car(sample.cid, file)
    other = await town.start("other")
    take_back(other, sample.cid)
    with pytest.raises(RevokedError):
        await other.node.import_car(file)
    assert other.node.store.statistics().artifacts == 0


async def test_what_was_taken_back_is_not_announced_again(town: Town, sample: Sample) -> None:
    provider = await town.start("provider")
    await provider.plant(sample.artifact, sample.blocks)
    assert await provider.client.announce(sample.cid) > 1
    take_back(provider, sample.cid)  # the node has not looked yet
    with pytest.raises(RevokedError, match="wrong tokenizer"):
        await provider.client.announce(sample.cid)
    await until(lambda: provider.node.context.withheld == {sample.cid})
    with pytest.raises(RevokedError, match="wrong tokenizer"):
        await provider.client.announce(sample.cid)


async def test_what_is_met_while_the_stored_ones_are_looked_through_stays_withheld(
    town: Town, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = await town.start("provider")
    looking, met = threading.Event(), threading.Event()
    artifacts = ArtifactIndex.artifacts

    def look(index: ArtifactIndex, limit: int | None = None) -> list[StoredArtifact]:
        rows = artifacts(index, limit)
        looking.set()
        assert met.wait(10)
        return rows

    monkeypatch.setattr(ArtifactIndex, "artifacts", look)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(provider.node.obey)
        await until(looking.is_set)
        await provider.plant(sample.artifact, sample.blocks)
        take_back(provider, sample.cid)
        provider.node.announce(sample.artifact)
        met.set()
    assert provider.node.context.withheld == {sample.cid}
