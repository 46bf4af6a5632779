"""An artifact that is taken back while a prefill loads it: nothing of it is in the cache."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from p2pkv import Client
from p2pkv.errors import FormatError, P2pkvError, RevokedError
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, matched, segments
from tests.support.llama import cache_bytes

REVOKED = RevokedError("its publisher took it back: wrong tokenizer (manifest)")


def refusal(sealed: Sealed, error: P2pkvError) -> dict[str, Any]:
    return {"manifest": str(sealed[0].cid), "code": error.code, "message": error.message, "advice": error.advice}


@pytest.mark.parametrize(("error", "hit"), [(REVOKED, 0), (FormatError("of a node"), 512)])
def test_what_the_daemon_refuses_by_policy_at_the_end_is_not_used(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    error: P2pkvError,
    hit: int,
) -> None:
    """What came before a later node turned out wrong is as good as it was."""
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0, 1), {**REPORT, "refusals": [refusal(sealed, error)]}])
    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == hit
    assert hit or "[trust.revoked]" in (prefill.report.miss or "")
    assert cache_bytes(prefill.cache) == expected


def test_nor_where_the_fetch_ends_with_that_error(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0, 1), {"event": "error", **REVOKED.to_dict()}])
    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 0
    assert "[trust.revoked]" in (prefill.report.miss or "")
    assert cache_bytes(prefill.cache) == expected
