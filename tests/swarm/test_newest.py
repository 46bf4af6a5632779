"""Of two artifacts of one publisher for one text the later one is fetched, whoever replays the older one."""

from __future__ import annotations

import pytest
from nacl.signing import SigningKey
from trio.testing import MockClock

from p2pkv.formats.did import encode_did
from p2pkv.swarm.report import FetchReport
from p2pkv.swarm.serve import Server
from sims.network import Link
from tests.support.artifacts import PUBLISHER, Sample, make_sample
from tests.support.sim_town import TOKENS, Town, prompt


@pytest.fixture(scope="module")
def old() -> Sample:
    return make_sample(TOKENS)


@pytest.fixture(scope="module")
def new() -> Sample:
    """The same text with other values: what was wrong with the old one is mended."""
    return make_sample(TOKENS, seed=1, sequence=2)


def told(report: FetchReport) -> list[tuple[str, str]]:
    return [(refusal.manifest, refusal.code) for refusal in report.refusals]


@pytest.mark.parametrize("seed", range(4))
async def test_one_knows_the_newer_and_many_replay_the_older(
    autojump_clock: MockClock, town: Town, old: Sample, new: Sample, seed: int
) -> None:
    for name in "abd":
        await town.provider(name, old)
    await town.provider("e", new)
    report = await town.node("c", trusted=[PUBLISHER], seed=seed).fetch(prompt())
    assert report.artifact is not None
    assert (report.hit_tokens, report.artifact.cid) == (600, new.cid)
    assert told(report) in ([], [(str(old.cid), "trust.superseded")])


async def test_the_newer_is_offered_second(autojump_clock: MockClock, town: Town, old: Sample, new: Sample) -> None:
    """Whatever is longer is awaited for a moment; who comes within it is heard."""
    await town.provider("near", old)
    await town.provider("far", new, link=Link(latency_s=0.02))
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.artifact is not None
    assert report.artifact.cid == new.cid
    assert told(report) == [(str(old.cid), "trust.superseded")]


async def test_one_that_is_here_already_is_not_replaced_by_an_older_one(
    autojump_clock: MockClock, town: Town, old: Sample, new: Sample
) -> None:
    for name in "abd":
        await town.provider(name, old)
    report = await (await town.provider("c", new, trusted=[PUBLISHER])).fetch(prompt())
    assert report.artifact is not None
    assert (report.hit_tokens, report.artifact.cid) == (600, new.cid)
    assert sum(report.bytes_by_peer.values()) in (0, len(old.blocks[old.cid])), "nothing but the older manifest"


async def test_another_publishers_higher_number_says_nothing(autojump_clock: MockClock, town: Town, new: Sample) -> None:
    other = SigningKey(b"\x09" * 32)
    theirs = make_sample(TOKENS, key=other, sequence=9)
    await town.provider("a", new)
    await town.provider("b", theirs)
    consumer = town.node("c", trusted=[PUBLISHER, encode_did(bytes(other.verify_key))])
    report = await consumer.fetch(prompt())
    assert report.hit_tokens == 600
    assert told(report) == []


async def test_a_newer_one_that_is_refused_leaves_the_older(autojump_clock: MockClock, town: Town, old: Sample) -> None:
    over = make_sample(TOKENS, seed=1, sequence=2, expires=1)
    await town.provider("a", old)
    await town.provider("b", over)
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.artifact is not None
    assert (report.hit_tokens, report.artifact.cid) == (600, old.cid)
    assert told(report) in ([], [(str(over.cid), "trust.expired")])


async def test_a_rival_that_never_comes_costs_a_moment(
    autojump_clock: MockClock, town: Town, old: Sample, new: Sample
) -> None:
    """Who offers what nobody sends cannot hold a fetch up."""
    for name in "ab":
        await town.provider(name, old)
    liar = await town.provider("liar", new)
    silent = Server(liar.context)
    silent.grant = lambda: None  # type: ignore[method-assign]  # it answers queries, and sends nothing
    liar.network.set_channel_handler(silent.serve)
    report = await town.node("c", trusted=[PUBLISHER]).fetch(prompt())
    assert report.artifact is not None
    assert (report.hit_tokens, report.artifact.cid) == (600, old.cid)
    assert report.times["manifest_s"] < 0.5
    assert told(report) == []
