"""A program tells its daemon how a prefill went, and depends on no answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv import AsyncClient, Client, Prefill
from p2pkv.formats.did import encode_did
from p2pkv_node import embedded_node
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, matched, segments
from tests.support.llama import cache_bytes, random_tokens

KEY = SigningKey(b"\x05" * 32)


def check(told: dict[str, Any], prefill: Prefill, hit: int) -> None:
    """What is told is what the report says, and no more."""
    report = prefill.report
    expected = {"device": "cpu", "hit_tokens": hit, "loading_s": report.times["loaded_s"], "tokens_per_s": report.tokens_per_s}
    assert {name: value for name, value in told.items() if name != "model_id"} == expected
    assert len(bytes.fromhex(told["model_id"])) == 32
    assert report.hit_tokens == hit


def test_a_miss_tells_how_fast_this_machine_computes_and_a_hit_what_it_had(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    daemon.scripts += [[REPORT], [matched(sealed[0]), *segments(sealed, 0), REPORT]]
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT])
    with Client(daemon.home) as client:
        for number, hit in enumerate((0, 256, SHARED)):
            prefill = client.prefill(model, prompt, shared=SHARED)
            assert len(daemon.told) == number + 1
            check(daemon.told[-1], prefill, hit)
            assert (prefill.report.tokens_per_s is not None) is (hit == 0)
    assert {told["model_id"] for told in daemon.told} == {daemon.asked[0]["model_id"]}


def test_what_was_computed_is_too_little_to_tell(daemon: ScriptedDaemon, model: LlamaForCausalLM) -> None:
    daemon.scripts += [[REPORT], [REPORT]]
    with Client(daemon.home) as client:
        for length in (100, 512):
            assert client.prefill(model, random_tokens(length)).report.tokens_per_s is None


def test_the_asynchronous_client_tells_the_same(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT])

    async def work() -> Prefill:
        async with AsyncClient(daemon.home) as client:
            return await client.prefill(model, prompt, shared=SHARED)

    prefill = trio.run(work)
    (told,) = daemon.told
    check(told, prefill, SHARED)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.timeout(20)  # far below what other calls wait for their answer
def test_a_daemon_that_is_stuck_is_not_waited_for(
    daemon: ScriptedDaemon, model: LlamaForCausalLM, prompt: list[int], expected: bytes, asynchronous: bool
) -> None:
    daemon.scripts.append([REPORT])
    daemon.answers = threading.Event()

    async def work() -> Prefill:
        async with AsyncClient(daemon.home) as client:
            return await client.prefill(model, prompt, shared=SHARED)

    try:
        if asynchronous:
            prefill = trio.run(work)
        else:
            with Client(daemon.home) as client:
                prefill = client.prefill(model, prompt, shared=SHARED)
        assert cache_bytes(prefill.cache) == expected
    finally:
        daemon.answers.set()


def test_nobody_is_told_where_nobody_answered(daemon: ScriptedDaemon, model: LlamaForCausalLM, prompt: list[int]) -> None:
    daemon.scripts.append([None])
    with Client(daemon.home) as client:
        assert client.prefill(model, prompt, shared=SHARED).report.hit_tokens == 0
    assert daemon.told == []


def test_a_real_node_sums_what_it_is_told(
    tmp_path: Path, model: LlamaForCausalLM, document: list[int], prompt: list[int]
) -> None:
    with embedded_node(tmp_path / "home") as node, Client(node.home) as client:
        client.trust_add(encode_did(bytes(KEY.verify_key)))
        miss = client.prefill(model, prompt, shared=SHARED).report
        client.publish(model, document, KEY)
        hit = client.prefill(model, prompt, shared=SHARED).report
        assert (miss.hit_tokens, hit.hit_tokens) == (0, SHARED)
        assert miss.tokens_per_s is not None
        figures = client.stats()["prefills"]
    assert (figures["rated"], figures["unrated"]) == (2, 0)
    assert figures["computing_s"] == pytest.approx(SHARED / miss.tokens_per_s)
    assert figures["loading_s"] == pytest.approx(miss.times["loaded_s"] + hit.times["loaded_s"])
    assert figures["saved_s"] == pytest.approx(figures["computing_s"] - figures["loading_s"])
