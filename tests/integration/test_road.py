"""The whole road on real nodes: publish, mirror, find, fetch, verify, inject, and say what would have been said."""

from __future__ import annotations

from transformers import LlamaForCausalLM

from tests.support.llama import assert_right
from tests.support.town import Town


async def test_a_consumer_that_knows_a_bootstrap_address_alone(
    town: Town, model: LlamaForCausalLM, document: list[int], prompt: list[int]
) -> None:
    publisher = await town.start("publisher")
    staged = await publisher.publish(model, document)
    mirrors = [await town.start(f"mirror{number}") for number in range(2)]
    for mirror in mirrors:
        report = await mirror.client.fetch(staged.manifest)
        assert report["segments"] == 3
        await mirror.announced()
    consumer = await town.start("consumer")
    prefill = await consumer.client.prefill(model, prompt, shared=len(document))
    print(prefill.report, prefill.report)
    assert prefill.report.hit_tokens == len(document)
    assert_right(model, prompt, len(document), prefill.cache)
