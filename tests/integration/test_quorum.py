"""Several publishers of one text on real nodes, of whom one lies."""

from __future__ import annotations

from pathlib import Path

import pytest
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv import Client, Prefill
from p2pkv.client.quorum import Agreement
from p2pkv_node import embedded_node
from tests.integration.conftest import SHARED, Ask
from tests.support.crafted import Pieces
from tests.support.lies import one_bit, resigned
from tests.support.llama import cache_bytes
from tests.support.statements import did_of, key
from tests.support.town import KEY, PUBLISHER, Daemon, Town, in_thread

OTHER, LIAR = key(401), key(402)
TRUSTED = [PUBLISHER, did_of(OTHER), did_of(LIAR)]


async def provide(town: Town, name: str, signer: SigningKey, model: LlamaForCausalLM, pieces: Pieces) -> Daemon:
    provider = await town.start(name, trusted=TRUSTED)
    honest = pieces.signed(KEY)
    sealed = resigned(one_bit(model, pieces.token_ids), LIAR) if signer is LIAR else resigned(honest, signer)
    await provider.plant(*(honest if signer is KEY else sealed))
    return provider


async def test_two_who_agree_outvote_one_who_lies(town: Town, model: LlamaForCausalLM, pieces: Pieces, ask: Ask) -> None:
    await provide(town, "a", KEY, model, pieces)
    alone = await town.start("alone", trusted=TRUSTED)
    report = await ask(alone, verify="quorum=2")
    assert (report.hit_tokens, report.refusals[0]["code"]) == (0, "trust.quorum")

    await provide(town, "liar", LIAR, model, pieces)
    report = await ask(await town.start("doubting", trusted=TRUSTED), verify="quorum=2")
    assert isinstance(report.verification, Agreement)
    (other,) = report.verification.witnesses
    assert {report.verification.publisher, other.publisher} == {PUBLISHER, did_of(LIAR)}
    assert (report.hit_tokens, other.disagrees) == (256, ((256, 512),))

    await provide(town, "b", OTHER, model, pieces)
    consumer = await town.start("consumer", trusted=TRUSTED)
    report = await ask(consumer, verify="quorum=2")
    assert isinstance(report.verification, Agreement)
    assert (report.hit_tokens, report.verification.publishers) == (SHARED, 2)
    assert report.verification.publisher in {PUBLISHER, did_of(OTHER)}
    assert all(heard.disagrees == ((256, 512),) for heard in report.verification.witnesses if heard.publisher == did_of(LIAR))


@pytest.mark.parametrize("quorum", [2, 3])
async def test_the_next_time_no_other_node_is_needed(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, ask: Ask, quorum: int
) -> None:
    providers = [await provide(town, "a", KEY, model, pieces), await provide(town, "b", OTHER, model, pieces)]
    consumer = await town.start("consumer", trusted=TRUSTED)
    assert (await ask(consumer, verify="quorum=2")).hit_tokens == SHARED
    for provider in providers:
        await provider.stop()
    report = await ask(consumer, verify=f"quorum={quorum}")
    assert (report.hit_tokens, report.bytes_fetched) == (SHARED if quorum == 2 else 0, 0)


async def test_a_program_with_a_node_of_its_own(
    town: Town, tmp_path: Path, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int], expected: bytes
) -> None:
    await provide(town, "a", KEY, model, pieces)
    await provide(town, "b", OTHER, model, pieces)

    def work() -> Prefill:
        with embedded_node(tmp_path / "embedded", bootstrap=town.bootstrap) as node, Client(node.home) as client:
            for did in TRUSTED:
                client.trust_add(did)
            return client.prefill(model, prompt, shared=SHARED, verify="quorum=2")

    found = await in_thread(work)
    assert (found.report.hit_tokens, cache_bytes(found.cache)) == (SHARED, expected)
    assert found.report.verification.publishers == 2
