"""What a publisher takes back reaches those who trust it, through whoever keeps it, and nobody else decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from p2pkv.errors import NotFoundError, RevokedError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import decode_did
from p2pkv.formats.revocations import EVERYTHING, Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import publisher_key
from p2pkv.limits import MAX_STATEMENT_PROVIDERS, STATEMENTS_PERIOD_S, STATEMENTS_RETRY_S, STATEMENTS_TIMEOUT_S
from p2pkv.swarm import statements
from p2pkv.swarm.report import FetchEvent, SegmentReady
from p2pkv.swarm.target import ManifestTarget
from sims.network import Link
from sims.node import SimNode
from tests.support.artifacts import KEY, PUBLISHER, Sample
from tests.support.samples import OTHER_KEY
from tests.support.sim_town import Town, prompt
from tests.support.statements import THIRD_KEY, did_of, revocations, succession

SCAN_S = 6.0  # a scan, and the way


def running(town: Town, *nodes: SimNode) -> None:
    for node in nodes:
        town.world.nursery.start_soon(node.statements.run)
        town.world.nursery.start_soon(node.announcer.run)


def taking_back(cid: Cid, sequence: int = 1) -> SignedStatement:
    items = (Revoked(Scope.MANIFEST, cid, "wrong tokenizer"),)
    return SignedStatement.sign(Revocations(publisher=PUBLISHER, sequence=sequence, created=0, items=items), KEY)


async def test_a_revocation_is_obeyed_within_the_period(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    mirror = await town.provider("mirror", sample)
    consumer = town.node("c", trusted=[PUBLISHER])
    publisher = town.node("publisher")
    running(town, mirror, consumer, publisher)
    assert (await consumer.fetch(prompt())).hit_tokens == 600
    await trio.sleep(100)
    publisher.records.hear(taking_back(sample.artifact.cid))
    await trio.sleep(STATEMENTS_PERIOD_S + 60)
    report = await consumer.fetch(prompt())
    assert (report.hit_tokens, [refusal.code for refusal in report.refusals]) == (0, ["trust.revoked"])
    with pytest.raises(RevokedError, match="wrong tokenizer"):
        await consumer.fetch(ManifestTarget(sample.artifact.cid))


async def test_it_is_passed_on_by_those_who_heard_of_it(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    publisher, first = town.node("publisher"), town.node("first", trusted=[PUBLISHER])
    publisher.records.hear(taking_back(sample.artifact.cid))
    running(town, publisher)
    await trio.sleep(SCAN_S)
    running(town, first)
    await trio.sleep(SCAN_S)
    assert PUBLISHER in first.records.known
    del town.records.by_key[publisher_key(decode_did(PUBLISHER))]["publisher"]
    second = town.node("second", trusted=[PUBLISHER])
    running(town, second)
    await trio.sleep(SCAN_S)
    assert second.records.known == first.records.known


async def test_a_fetch_asks_sooner(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    mirror, consumer = await town.provider("mirror", sample), town.node("c", trusted=[PUBLISHER])
    running(town, mirror, consumer)
    mirror.records.hear(revocations(1, 1, signer=KEY))
    await trio.sleep(STATEMENTS_RETRY_S + SCAN_S)
    assert consumer.records.known[PUBLISHER].sequence == 1
    mirror.records.hear(taking_back(sample.artifact.cid, sequence=2))
    await trio.sleep(STATEMENTS_RETRY_S + SCAN_S)
    assert consumer.records.known[PUBLISHER].sequence == 1
    await consumer.fetch(prompt())
    await trio.sleep(1)
    assert consumer.records.known[PUBLISHER].sequence == 2


async def test_an_old_list_hides_nothing(autojump_clock: MockClock, town: Town) -> None:
    """Of all who are asked one knows: nobody else's older list, or silence, takes its place."""
    old, new = revocations(1, 5, signer=KEY), revocations(2, 5, 9, signer=KEY)
    liars = [town.node(f"old{number}") for number in range(MAX_STATEMENT_PROVIDERS - 2)]
    for node in liars:
        node.records.hear(old)
    honest, silent, consumer = town.node("honest"), town.node("silent"), town.node("c", trusted=[PUBLISHER])
    honest.records.hear(new)

    async def say_nothing(channel: object) -> None:
        await trio.sleep_forever()

    silent.network.set_channel_handler(say_nothing)
    await silent.routing.announce(publisher_key(decode_did(PUBLISHER)))
    running(town, honest, *liars)
    await trio.sleep(SCAN_S)
    running(town, consumer)
    await trio.sleep(SCAN_S)
    assert consumer.records.known[PUBLISHER].statements == (new,)
    newer = revocations(3, 5, 9, 11, signer=KEY)
    honest.records.hear(newer)
    await trio.sleep(STATEMENTS_PERIOD_S + STATEMENTS_TIMEOUT_S)
    assert consumer.records.known[PUBLISHER].statements == (newer,)


async def test_what_a_liar_tells_changes_nothing(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    """Forged lists, and those of publishers that nobody asked about."""
    liar, consumer = town.node("liar"), await town.provider("c", sample, trusted=[PUBLISHER])
    forged = replace(revocations(1, EVERYTHING, signer=OTHER_KEY), key=bytes(KEY.verify_key))
    others = revocations(1, EVERYTHING, signer=THIRD_KEY)
    liar.context.statements = lambda publisher, known: [forged.encode(), b"nonsense", others.encode()]
    await liar.routing.announce(publisher_key(decode_did(PUBLISHER)))
    running(town, consumer)
    await trio.sleep(SCAN_S)
    assert consumer.records.known == {}
    assert (await consumer.fetch(prompt())).hit_tokens == 600


async def test_lists_that_do_not_fit_one_answer_all_arrive(autojump_clock: MockClock, town: Town) -> None:
    reason = "x" * 250
    lists = []
    for number in range(1, 4):
        items = tuple(Revoked(Scope.BEFORE, 1000 * number + at, reason) for at in range(400))
        statement = Revocations(publisher=PUBLISHER, sequence=number, created=0, items=items)
        lists.append(SignedStatement.sign(statement, KEY))
    holder, consumer = town.node("holder"), town.node("c", trusted=[PUBLISHER])
    for signed in lists:
        holder.records.hear(signed)
    running(town, holder)
    await trio.sleep(SCAN_S)
    running(town, consumer)
    await trio.sleep(SCAN_S)
    assert consumer.records.known[PUBLISHER].statements == tuple(lists)


async def test_a_successor_is_followed_in_turn(autojump_clock: MockClock, town: Town) -> None:
    holder, consumer = town.node("holder"), town.node("c", trusted=[PUBLISHER])
    holder.records.hear(succession(KEY, OTHER_KEY))
    holder.records.hear(revocations(1, 7, signer=OTHER_KEY))
    running(town, holder)
    await trio.sleep(SCAN_S)
    running(town, consumer)
    await trio.sleep(2 * SCAN_S)
    assert consumer.records.known[did_of(OTHER_KEY)].sequence == 1


async def test_nobody_is_asked_about_those_who_are_not_trusted(autojump_clock: MockClock, town: Town) -> None:
    holder, consumer = town.node("holder"), town.node("c")
    holder.records.hear(revocations(1, 7, signer=KEY))
    running(town, holder, consumer)
    await trio.sleep(STATEMENTS_PERIOD_S)
    assert consumer.records.known == {}


async def test_what_was_taken_back_is_not_served(autojump_clock: MockClock, town: Town, sample: Sample) -> None:
    mirror, consumer = await town.provider("mirror", sample), town.node("c", trusted=[PUBLISHER])
    mirror.context.withheld = frozenset({sample.artifact.cid})
    report = await consumer.fetch(prompt())
    assert (report.hit_tokens, report.refusals) == (0, ())
    with pytest.raises(NotFoundError):
        await consumer.fetch(ManifestTarget(sample.artifact.cid), patience_s=20)


async def test_when_somebody_answered_is_noted(autojump_clock: MockClock, town: Town) -> None:
    """Nobody knows a statement of the other publisher: that is no answer."""
    other = did_of(OTHER_KEY)
    holder, consumer = town.node("holder"), town.node("c", trusted=[PUBLISHER, other])
    holder.records.hear(revocations(1, 7, signer=KEY))
    running(town, holder)
    await trio.sleep(SCAN_S)
    running(town, consumer)
    await trio.sleep(2 * SCAN_S)
    assert consumer.records.answers == {PUBLISHER: consumer.context.wall_clock()}


@pytest.mark.parametrize("by_cid", [False, True])
async def test_a_fetch_that_is_under_way_ends_when_its_artifact_is_taken_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, town: Town, sample: Sample, by_cid: bool
) -> None:
    monkeypatch.setattr(statements, "STATEMENTS_SCAN_S", 0.5)
    await town.provider("mirror", sample, link=Link(up=8_000))
    consumer = town.node("c", trusted=[PUBLISHER])
    running(town, consumer)
    events: list[FetchEvent] = []

    def hear(event: FetchEvent) -> None:
        events.append(event)
        if isinstance(event, SegmentReady):
            consumer.records.hear(taking_back(sample.artifact.cid))

    if by_cid:
        with pytest.raises(RevokedError, match="wrong tokenizer"):
            await consumer.fetch(ManifestTarget(sample.artifact.cid), emit=hear)
    else:
        report = await consumer.fetch(prompt(), emit=hear)
        assert (report.hit_tokens, report.segments, report.artifact) == (0, 0, None)
        assert [(refusal.manifest, refusal.code) for refusal in report.refusals] == [(str(sample.cid), "trust.revoked")]
    assert 0 < sum(isinstance(event, SegmentReady) for event in events) < 3


async def test_a_fetch_goes_on_where_what_is_heard_is_of_something_else(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, town: Town, sample: Sample
) -> None:
    monkeypatch.setattr(statements, "STATEMENTS_SCAN_S", 0.5)
    await town.provider("mirror", sample, link=Link(up=8_000))
    consumer = town.node("c", trusted=[PUBLISHER])
    running(town, consumer)

    async def take_back() -> None:
        await trio.sleep(2)
        consumer.records.hear(taking_back(Cid.of_node(b"another")))

    town.world.nursery.start_soon(take_back)
    assert (await consumer.fetch(prompt())).hit_tokens == 600
    assert not consumer.context.reconsider
