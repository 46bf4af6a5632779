"""``verify=``: what a publisher signed is compared with what the model computes before anything of it is used."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from p2pkv import AsyncClient, Client
from p2pkv.artifact.read import Artifact
from p2pkv.client.verification import Level, Verify
from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.cache import layer_tensors
from p2pkv.errors import UsageError
from p2pkv.formats.cid import Cid
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, matched, segments
from tests.support.lies import one_bit, signed_values, whole
from tests.support.llama import assert_right, build_model, cache_bytes
from tests.support.town import PUBLISHER


def noised(model: LlamaForCausalLM, document: list[int]) -> Sealed:
    """Sign noise of a tenth on all values."""
    generator = torch.Generator().manual_seed(1)
    values = [
        (keys + 0.1 * torch.randn(keys.shape, generator=generator), values)
        for keys, values in layer_tensors(whole(model, document))
    ]
    return signed_values(model, document, values)


def script(sealed: Sealed) -> list[Any]:
    return [matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]


def prefill(daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], verify: str) -> Any:
    daemon.hold(sealed[1])
    daemon.scripts.append(script(sealed))
    with Client(daemon.home) as client:
        return client.prefill(model, prompt, shared=SHARED, verify=verify)


@pytest.mark.parametrize(("verify", "positions"), [("sample", 32), ("sample=5", 5), ("full", SHARED)])
def test_an_honest_artifact_is_used(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    verify: str,
    positions: int,
) -> None:
    found = prefill(daemon, sealed, model, prompt, verify)
    assert cache_bytes(found.cache) == expected
    assert found.report.hit_tokens == SHARED
    checked = found.report.verification
    assert (checked.passed, checked.publisher, checked.positions) == (True, PUBLISHER, positions)
    assert (checked.check is None) is (verify == "full")  # the same stack gives the same bits
    assert found.report.times["loaded_s"] <= found.report.times["verified_s"] <= found.report.times["done_s"]
    assert asdict(found.report)["verification"]["level"] == verify.split("=")[0]


def test_by_default_a_signature_is_enough(
    daemon: ScriptedDaemon, model: LlamaForCausalLM, document: list[int], prompt: list[int]
) -> None:
    """What this level does not see is used: it says who, not what."""
    found = prefill(daemon, noised(model, document), model, prompt, "signature")
    assert found.report.hit_tokens == SHARED
    assert found.report.verification is None
    assert "verified_s" not in found.report.times


@pytest.mark.parametrize("verify", ["sample", "sample=1", "full"])
def test_a_lie_is_not_used_and_the_publisher_is_named(
    daemon: ScriptedDaemon, model: LlamaForCausalLM, document: list[int], prompt: list[int], verify: str
) -> None:
    lie = noised(model, document)
    found = prefill(daemon, lie, model, prompt, verify)
    assert_right(model, prompt, SHARED, found.cache)
    report = found.report
    assert (report.hit_tokens, report.manifest) == (0, None)
    assert not report.verification.passed
    assert "[integrity.values]" in report.miss
    assert PUBLISHER in report.miss
    (refusal,) = report.refusals
    assert (refusal["manifest"], refusal["code"]) == (str(lie[0].cid), "integrity.values")
    assert f"p2pkv trust remove {PUBLISHER}" in refusal["advice"]
    assert len(daemon.asked) == 1  # asking again would bring the same values
    assert daemon.told[0]["hit_tokens"] == 0
    assert not report.peers_dropped


def test_a_single_bit_is_seen_by_full_alone(
    daemon: ScriptedDaemon, model: LlamaForCausalLM, document: list[int], prompt: list[int]
) -> None:
    lie = one_bit(model, document)
    assert prefill(daemon, lie, model, prompt, "sample=600").report.hit_tokens == SHARED
    found = prefill(daemon, lie, model, prompt, "full")
    assert_right(model, prompt, SHARED, found.cache)
    assert (found.report.hit_tokens, found.report.verification.check.values.tolerance.worst) == (0, 0.0)
    elsewhere = one_bit(model, document, {"torch": "another"})
    assert prefill(daemon, elsewhere, model, prompt, "full").report.hit_tokens == SHARED


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_where_nothing_was_loaded_nothing_is_verified(
    tmp_path: Path, model: LlamaForCausalLM, prompt: list[int], expected: bytes, verify: str
) -> None:
    with Client(tmp_path) as client:
        found = client.prefill(model, prompt, shared=SHARED, verify=verify)
    assert cache_bytes(found.cache) == expected
    assert found.report.verification is None


async def test_the_async_client_verifies_too(
    daemon: ScriptedDaemon, model: LlamaForCausalLM, document: list[int], prompt: list[int]
) -> None:
    lie = noised(model, document)
    daemon.hold(lie[1])
    daemon.scripts.append(script(lie))
    async with AsyncClient(daemon.home) as client:
        found = await client.prefill(model, prompt, shared=SHARED, verify="sample")
    assert found.report.verification is not None
    assert not found.report.verification.passed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("signature", Verify()),
        ("sample", Verify(Level.SAMPLE)),
        ("sample=1", Verify(Level.SAMPLE, 1)),
        ("sample=1024", Verify(Level.SAMPLE, 1024)),
        ("quorum", Verify(Level.QUORUM, quorum=2)),
        ("quorum=16", Verify(Level.QUORUM, quorum=16)),
        ("full", Verify(Level.FULL)),
    ],
)
def test_levels_are_read(text: str, expected: Verify) -> None:
    assert Verify.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "none", "Sample", "sample=", "sample=0", "sample=1025", "sample=-1", "sample=٣", "full=1", "sample=1\n"),
        *("quorum=", "quorum=0", "quorum=1", "quorum=17", "signature=1"),
    ],
)
def test_other_levels_are_refused_before_anything_happens(tmp_path: Path, model: LlamaForCausalLM, text: str) -> None:
    with Client(tmp_path) as client, pytest.raises(UsageError, match="no way to verify"):
        client.prefill(model, [1, 2, 3], verify=text)


def test_a_model_whose_tokens_cannot_be_recomputed_alone_is_told_at_once(tmp_path: Path) -> None:
    model = build_model(torch.float32)
    hf.geometry(model)
    model.config._attn_implementation = "flash_attention_2"
    with Client(tmp_path) as client, pytest.raises(UsageError, match="sdpa"):
        client.prefill(model, [1, 2, 3], verify="sample")


def test_an_artifact_is_compared_up_to_where_it_was_loaded(
    daemon: ScriptedDaemon,
    sealed: tuple[Artifact, dict[Cid, bytes]],
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
) -> None:
    daemon.scripts += [[matched(sealed[0]), *segments(sealed, 0), REPORT]] * 2
    with Client(daemon.home) as client:
        for verify, positions in (("sample=1000", 256), ("full", 256)):
            found = client.prefill(model, prompt, shared=SHARED, verify=verify)
            assert found.report.verification is not None
            assert (found.report.hit_tokens, found.report.verification.positions) == (256, positions)
            assert cache_bytes(found.cache) == expected
