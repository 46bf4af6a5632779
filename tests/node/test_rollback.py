"""Real daemons: whoever tells an old list, or offers an old manifest, turns nobody's time back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2pkv.artifact.read import open_artifact
from p2pkv.errors import RevokedError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.revocations import Revocations, Revoked, Scope
from p2pkv.formats.statement import SignedStatement
from p2pkv.formats.tensors import Dtype
from p2pkv.routing import followed
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv.swarm import statements
from p2pkv.swarm.report import FetchReport
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


def listed(sequence: int, *items: Revoked) -> SignedStatement:
    statement = Revocations(publisher=PUBLISHER, sequence=sequence, created=int(time.time()), items=items)
    return SignedStatement.sign(statement, KEY)


def tell(daemon: Daemon, signed: SignedStatement) -> None:
    """Put a list into the home of ``daemon``, from where it tells it to whoever asks."""
    StatementFiles(HomeLayout(daemon.home).statements).hear(signed)


def known_to(daemon: Daemon) -> tuple[SignedStatement, ...]:
    record = StatementFiles(HomeLayout(daemon.home).statements).get(PUBLISHER)
    return record.statements if record is not None else ()


def asked(daemon: Daemon) -> list[bytes]:
    """Return a list to which each question of a peer about a publisher is added from now on."""
    questions: list[bytes] = []
    answer = daemon.node.context.statements

    def note(publisher: bytes, known: Sequence[Cid]) -> Sequence[bytes]:
        questions.append(publisher)
        return answer(publisher, ())  # all that it has, though the peer says that it knows better

    daemon.node.context.statements = note
    return questions


async def asked_again(*questions: list[bytes]) -> None:
    """Wait until each was asked twice more: the first answer was heard by then."""
    before = [len(each) for each in questions]
    await until(lambda: all(len(each) >= seen + 2 for each, seen in zip(questions, before, strict=True)))


async def prompt(daemon: Daemon) -> FetchReport:
    target = PromptTarget(model().model_id, Dtype.BF16, (*TOKENS, 1, 2))
    return await daemon.node.fetch(target, lambda event: None, PATIENCE_S)


def signed_again(sample: Sample, sequence: int) -> Sample:
    """Return the same artifact under a manifest with another sequence number."""
    envelope = Envelope.sign(replace(sample.artifact.manifest, sequence=sequence), KEY)
    blocks = {cid: data for cid, data in sample.blocks.items() if cid != sample.cid} | {envelope.cid: envelope.encode()}
    return Sample(open_artifact(envelope.cid, envelope.encode()), blocks)


async def test_an_old_list_from_two_peers_takes_nothing_back(town: Town, sample: Sample) -> None:
    """Neither while the newer one is told as well, nor when nobody else is left, nor to a node that has just started."""
    other = Revoked(Scope.MANIFEST, Cid.of_node(b"\xa0"), "the first mistake")
    old, new = listed(1, other), listed(2, other, Revoked(Scope.MANIFEST, sample.cid, "wrong tokenizer"))
    liars = [await town.start(f"liar{number}", trusted=()) for number in range(2)]
    for liar in liars:
        tell(liar, old)
        await liar.plant(sample.artifact, sample.blocks)
    consumer = await town.start("consumer")
    await until(lambda: known_to(consumer) == (old,))
    assert (await prompt(consumer)).hit_tokens == 600

    publisher = await town.start("publisher")
    tell(publisher, new)
    await until(lambda: known_to(consumer) == (new,))
    questions = [asked(liar) for liar in liars]
    await publisher.stop()
    await asked_again(*questions)
    assert known_to(consumer) == (new,)
    assert [refusal.code for refusal in (await prompt(consumer)).refusals] == ["trust.revoked"]

    await consumer.stop()
    again = await town.start("consumer", bootstrap=(liars[0].address, liars[1].address))
    await asked_again(*questions)
    assert known_to(again) == (new,)
    assert (await prompt(again)).hit_tokens == 0
    with pytest.raises(RevokedError, match="wrong tokenizer"):
        await again.node.fetch(ManifestTarget(sample.cid), lambda event: None, PATIENCE_S)


async def test_an_old_manifest_after_a_newer_one(town: Town, sample: Sample) -> None:
    """A mirror that never forgets offers what its publisher replaced and took back."""
    newer = signed_again(sample, 2)
    mirror = await town.start("mirror", trusted=())
    await mirror.plant(sample.artifact, sample.blocks)
    publisher = await town.start("publisher")
    await publisher.plant(newer.artifact, newer.blocks)
    tell(publisher, listed(1, Revoked(Scope.BEFORE, 2, "replaced")))
    consumer = await town.start("consumer")
    await until(lambda: known_to(consumer) != ())
    report = await prompt(consumer)
    assert report.artifact is not None
    assert (report.hit_tokens, report.artifact.cid) == (600, newer.cid)

    await publisher.stop()
    await consumer.stop()
    again = await town.start("consumer", bootstrap=(mirror.address,))
    report = await prompt(again)
    assert report.artifact is not None
    assert (report.hit_tokens, report.artifact.cid) == (600, newer.cid)
    with pytest.raises(RevokedError, match="replaced"):
        await again.node.fetch(ManifestTarget(sample.cid), lambda event: None, PATIENCE_S)
    assert again.node.store.index.artifacts()[0].manifest_cid == newer.cid
