"""``verify=quorum=k``: what fewer than k accepted publishers signed alike is not used, whatever the daemon says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv import AsyncClient, Client
from p2pkv.client.quorum import Agreement
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.store.home import HomeLayout
from p2pkv.store.statement_files import StatementFiles
from p2pkv.store.trust_file import TrustFile
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, matched, segments
from tests.support.crafted import Pieces, compute
from tests.support.lies import one_bit, resigned
from tests.support.llama import assert_right, cache_bytes, random_tokens
from tests.support.statements import did_of, key, succession
from tests.support.town import KEY, PUBLISHER

OTHER, LIAR, THIRD = key(301), key(302), key(303)


def trust(daemon: ScriptedDaemon, *keys: SigningKey) -> None:
    for signer in keys or (KEY, OTHER, LIAR, THIRD):
        TrustFile(HomeLayout(daemon.home).trust).add(did_of(signer), "", 0)


def witness(sealed: Sealed, nodes: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    artifact = sealed[0]
    return {
        "event": "witness",
        "manifest": str(artifact.cid),
        "blocks": [artifact.cid, *(artifact.manifest.segments[index] for index in nodes)],
    }


def script(daemon: ScriptedDaemon, main: Sealed, *witnesses: dict[str, Any], of: Sequence[int] = (0, 1, 2)) -> None:
    daemon.scripts.append([matched(main[0]), *segments(main, *of), *witnesses, REPORT])


def prefill(daemon: ScriptedDaemon, model: LlamaForCausalLM, prompt: list[int], verify: str = "quorum=2") -> Any:
    with Client(daemon.home) as client:
        return client.prefill(model, prompt, shared=SHARED, verify=verify)


@pytest.fixture(scope="module")
def same(sealed: Sealed) -> Sealed:
    """The same values, signed by another publisher."""
    return resigned(sealed, OTHER)


@pytest.fixture(scope="module")
def third(sealed: Sealed) -> Sealed:
    return resigned(sealed, THIRD)


@pytest.fixture(scope="module")
def lie(model: LlamaForCausalLM, document: list[int]) -> Sealed:
    """Values of which one differs, in the second segment."""
    return resigned(one_bit(model, document), LIAR)


@pytest.fixture(autouse=True)
def _held(daemon: ScriptedDaemon, same: Sealed, third: Sealed, lie: Sealed) -> None:
    for sealed in (same, third, lie):
        daemon.hold(sealed[1])


def test_what_two_signed_alike_is_loaded(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    trust(daemon)
    script(daemon, sealed, witness(same))
    found = prefill(daemon, model, prompt)
    assert cache_bytes(found.cache) == expected
    assert (found.report.hit_tokens, found.report.miss) == (SHARED, None)
    assert daemon.asked[0]["quorum"] == 2
    checked = found.report.verification
    assert (checked.passed, checked.publisher, checked.positions, checked.publishers) == (True, PUBLISHER, SHARED, 2)
    (heard,) = checked.witnesses
    assert (heard.publisher, heard.manifest, heard.other_stack) == (did_of(OTHER), str(same[0].cid), {})
    assert (heard.agrees, heard.disagrees) == (((0, SHARED),), ())
    assert asdict(found.report)["verification"]["witnesses"][0]["agrees"] == ((0, SHARED),)
    assert f"{did_of(OTHER)} agrees on tokens 0 to 600" in str(checked)


def test_a_liar_is_named_and_two_who_agree_are_enough(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    same: Sealed,
    lie: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
) -> None:
    trust(daemon)
    script(daemon, sealed, witness(lie), witness(same))
    found = prefill(daemon, model, prompt)
    assert (found.report.hit_tokens, cache_bytes(found.cache)) == (SHARED, expected)
    liar, honest = found.report.verification.witnesses
    assert (liar.publisher, liar.agrees, liar.disagrees) == (did_of(LIAR), ((0, 256), (512, SHARED)), ((256, 512),))
    assert (honest.publisher, honest.disagrees) == (did_of(OTHER), ())
    assert found.report.verification.publishers == 2
    assert len(daemon.asked) == 1


def test_the_hit_ends_where_fewer_agree(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, lie: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    script(daemon, sealed, witness(lie), witness(same))
    found = prefill(daemon, model, prompt, "quorum=3")
    assert_right(model, prompt, SHARED, found.cache)
    assert (found.report.hit_tokens, found.report.verification.positions) == (256, 256)
    assert found.report.verification.publishers == 3
    assert daemon.told[0]["hit_tokens"] == 256


@pytest.mark.parametrize(("wanted", "count"), [(2, 1), (3, 2)])
def test_without_a_quorum_everything_is_computed(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    same: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    wanted: int,
    count: int,
) -> None:
    trust(daemon)
    script(daemon, sealed, *([witness(same)] if count == 2 else []))
    found = prefill(daemon, model, prompt, f"quorum={wanted}")
    assert (found.report.hit_tokens, found.report.manifest, cache_bytes(found.cache)) == (0, None, expected)
    checked = found.report.verification
    assert (checked.passed, checked.positions, checked.publishers, checked.quorum) == (False, 0, count, wanted)
    (refusal,) = found.report.refusals
    assert (refusal["manifest"], refusal["code"]) == (str(sealed[0].cid), "trust.quorum")
    assert f"of the {wanted} publishers that have to agree {count} signed" in found.report.miss
    assert "smaller quorum" in refusal["advice"]
    assert len(daemon.asked) == 1


def test_what_a_quorum_signed_is_taken_where_a_liar_was_found_first(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    same: Sealed,
    lie: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
) -> None:
    """One liar is not enough to take it away."""
    trust(daemon)
    script(daemon, lie, witness(sealed), witness(same))
    script(daemon, sealed)
    found = prefill(daemon, model, prompt)
    assert (found.report.hit_tokens, cache_bytes(found.cache)) == (SHARED, expected)
    assert daemon.asked[1] == {"manifest": str(sealed[0].cid), "patience_s": 60.0, "segments": 3, "impatient": True}
    checked = found.report.verification
    assert (checked.publisher, checked.positions) == (PUBLISHER, SHARED)
    (liar,) = [heard for heard in checked.witnesses if heard.disagrees]
    assert (liar.publisher, liar.disagrees) == (did_of(LIAR), ((256, 512),))
    assert "verified_s" not in found.report.times


def test_the_second_attempt_may_bring_less(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, lie: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    script(daemon, lie, witness(sealed), witness(same))
    script(daemon, sealed, of=[0])
    found = prefill(daemon, model, prompt)
    assert_right(model, prompt, SHARED, found.cache)
    assert (found.report.hit_tokens, len(daemon.asked)) == (256, 2)


def test_a_block_that_rotted_is_fetched_again_before_anything_else(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    trust(daemon)
    broken = {"event": "segment", "index": 1, "blocks": {}}
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0), broken, witness(same), REPORT])
    script(daemon, sealed, witness(same))
    found = prefill(daemon, model, prompt)
    assert (found.report.hit_tokens, cache_bytes(found.cache), len(daemon.asked)) == (SHARED, expected, 2)


# --- who counts -----------------------------------------------------------------------------------------------------------


def assert_not_counted(
    daemon: ScriptedDaemon, main: Sealed, event: dict[str, Any], model: LlamaForCausalLM, prompt: list[int], code: str | None
) -> Agreement:
    script(daemon, main, event)
    found = prefill(daemon, model, prompt)
    assert_right(model, prompt, SHARED, found.cache)
    assert found.report.hit_tokens == 0
    codes = [refusal["code"] for refusal in found.report.refusals]
    assert codes == ([code] if code is not None else []) + ["trust.quorum"]
    checked = found.report.verification
    assert isinstance(checked, Agreement)
    assert checked.publishers == 1
    return checked


def test_who_is_not_accepted_does_not_count(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon, KEY)
    assert assert_not_counted(daemon, sealed, witness(same), model, prompt, "trust.untrusted").witnesses == ()


def test_an_artifact_whose_own_publisher_is_not_accepted_is_not_used(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, third: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon, OTHER)
    script(daemon, sealed, witness(same), witness(third))
    found = prefill(daemon, model, prompt)
    assert found.report.hit_tokens == 0
    assert "trust.untrusted" in found.report.miss


def test_another_artifact_of_the_same_publisher_does_not_count(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    again = resigned(sealed, KEY, licence="another")
    daemon.hold(again[1])
    assert again[0].cid != sealed[0].cid
    assert assert_not_counted(daemon, sealed, witness(again), model, prompt, None).witnesses == ()


def test_a_second_artifact_of_a_witness_does_not_count(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    again = resigned(sealed, OTHER, licence="another")
    daemon.hold(again[1])
    script(daemon, sealed, witness(same), witness(again))
    found = prefill(daemon, model, prompt, "quorum=3")
    assert (found.report.hit_tokens, found.report.verification.publishers) == (0, 2)


def test_a_key_that_follows_another_is_no_second_publisher(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    StatementFiles(HomeLayout(daemon.home).statements).hear(succession(KEY, OTHER, last=2**50))
    assert assert_not_counted(daemon, sealed, witness(same), model, prompt, None).witnesses == ()


def test_a_forged_manifest_does_not_count(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    envelope = Envelope.decode(same[1][same[0].cid])
    forged = replace(envelope, signature=envelope.signature[:-1] + bytes([envelope.signature[-1] ^ 1])).encode()
    cid = Cid.of_node(forged)
    daemon.hold({cid: forged})
    event = witness((replace(same[0], cid=cid), {}))
    assert_not_counted(daemon, sealed, event, model, prompt, "integrity.signature")


def test_nodes_under_another_text_do_not_count(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], document: list[int], pieces: Pieces
) -> None:
    """Whoever signs a text can list any nodes: each says itself where it belongs."""
    trust(daemon)
    other = compute(model, [*document[:-1], document[-1] ^ 1])
    lying = Pieces(replace(other.manifest, segments=pieces.manifest.segments), other.token_ids, pieces.blocks)
    claim = lying.signed(OTHER, publisher=did_of(OTHER))
    daemon.hold(claim[1])
    script(daemon, sealed, witness(claim))
    found = prefill(daemon, model, prompt)
    assert_right(model, prompt, SHARED, found.cache)
    # The text is the same for two whole segments, and so are the nodes; the tail is not.
    assert (found.report.hit_tokens, found.report.verification.publishers) == (512, 2)


def test_a_node_in_anothers_place_takes_the_whole_manifest_along(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], pieces: Pieces
) -> None:
    trust(daemon)
    first, second, third = pieces.manifest.segments
    claim = pieces.signed(OTHER, publisher=did_of(OTHER), segments=(first, third, second))
    daemon.hold(claim[1])
    assert assert_not_counted(daemon, sealed, witness(claim), model, prompt, "format.manifest").witnesses == ()


def test_nodes_that_are_not_here_do_not_count(
    daemon: ScriptedDaemon, sealed: Sealed, lie: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    trust(daemon)
    script(daemon, sealed, witness(lie, nodes=[2]))
    found = prefill(daemon, model, prompt)
    # The first node is the same as the artifact's own, and so it is here.
    assert (found.report.hit_tokens, found.report.verification.witnesses[0].disagrees) == (256, ())


def test_a_longer_text_counts_as_far_as_it_is_the_same(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], document: list[int]
) -> None:
    trust(daemon)
    longer = compute(model, [*document, *random_tokens(200, seed=5)]).signed(OTHER, publisher=did_of(OTHER))
    daemon.hold(longer[1])
    script(daemon, sealed, witness(longer, nodes=[0, 1]))
    found = prefill(daemon, model, prompt)
    assert_right(model, prompt, SHARED, found.cache)
    assert found.report.hit_tokens == 512
    assert found.report.verification.witnesses[0].agrees == ((0, 512),)


def test_another_stack_that_disagrees_is_told(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], document: list[int]
) -> None:
    trust(daemon)
    other = resigned(one_bit(model, document, {**sealed[0].manifest.producer, "torch": "9.9"}), OTHER)
    daemon.hold(other[1])
    script(daemon, sealed, witness(other))
    found = prefill(daemon, model, prompt)
    (heard,) = found.report.verification.witnesses
    assert (found.report.hit_tokens, heard.other_stack) == (256, {"torch": "9.9"})
    assert "disagrees on tokens 256 to 512 (on another stack: torch 9.9)" in str(heard)


def test_by_default_nobody_else_is_asked_for(
    daemon: ScriptedDaemon, sealed: Sealed, same: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    script(daemon, sealed, witness(same))
    found = prefill(daemon, model, prompt, "signature")
    assert "quorum" not in daemon.asked[0]
    assert (found.report.hit_tokens, found.report.verification) == (SHARED, None)


async def test_the_async_client_counts_too(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    same: Sealed,
    lie: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
) -> None:
    trust(daemon)
    script(daemon, lie, witness(sealed), witness(same))
    script(daemon, sealed)
    async with AsyncClient(daemon.home) as client:
        found = await client.prefill(model, prompt, shared=SHARED, verify="quorum")
    assert (found.report.hit_tokens, cache_bytes(found.cache)) == (SHARED, expected)
