"""The synchronous client: it never needs a daemon to answer, and never believes one."""

from __future__ import annotations

import gc
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv import Client, Prefill
from p2pkv.client.calls import read_envelope
from p2pkv.errors import DaemonUnreachableError, FormatError, ManifestError, NotFoundError, P2pkvError, UsageError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.did import encode_did
from p2pkv.formats.draft import encode_draft
from p2pkv.limits import MAX_CODED_BLOCK_BYTES, MAX_FILE_OFFSET
from p2pkv.store.home import HomeLayout
from p2pkv.store.location import Location
from p2pkv_node import embedded_node
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, blocks_of, matched, segments
from tests.support.crafted import Pieces
from tests.support.llama import assert_right, build_model, cache_bytes
from tests.support.stores import cut_off, flip_block

KEY = SigningKey(b"\x05" * 32)


# --- no daemon, or one that dies ------------------------------------------------------------------------------------------


def test_no_daemon_is_a_local_prefill_with_a_reason(
    tmp_path: Path, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    with Client(tmp_path) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
        assert cache_bytes(prefill.cache) == expected
        assert (prefill.report.hit_tokens, prefill.report.manifest) == (0, None)
        assert "[daemon.unreachable]" in str(prefill.report)
        assert {"loaded_s", "done_s"} <= prefill.report.times.keys()
        for call in (client.status, client.artifacts, client.trust_list, client.shutdown):
            with pytest.raises(DaemonUnreachableError):
                call()
        with pytest.raises(DaemonUnreachableError):
            client.publish(model, prompt, KEY)  # at once, and not after the computing


# httpcore leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_socket_without_a_daemon(
    tmp_path: Path, model: LlamaForCausalLM, prompt: list[int], expected: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = ScriptedDaemon(tmp_path)
    with daemon.running():
        pass
    daemon.socket.touch()  # what a killed daemon leaves
    with Client(tmp_path) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert cache_bytes(prefill.cache) == expected
    assert "[daemon.unreachable]" in (prefill.report.miss or "")
    caplog.clear()  # it keeps the error, and the error the socket
    gc.collect()


@pytest.mark.parametrize(("arrived", "hit"), [(0, 0), (1, 256), (2, 512), (3, SHARED)])
def test_a_daemon_that_dies_in_the_middle(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    arrived: int,
    hit: int,
) -> None:
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, *range(arrived)), None])
    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert cache_bytes(prefill.cache) == expected
    assert prefill.report.hit_tokens == hit
    assert (prefill.report.miss is None) is bool(hit)
    assert len(daemon.asked) == 1


def test_segments_may_come_in_any_order_and_count_from_the_start(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 2, 0), REPORT])
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 2, 2, 1, 0), REPORT])
    with Client(daemon.home) as client:
        for hit in (256, SHARED):
            prefill = client.prefill(model, prompt, shared=SHARED)
            assert prefill.report.hit_tokens == hit
            assert cache_bytes(prefill.cache) == expected


# --- a daemon that is not believed ----------------------------------------------------------------------------------------


NOT_HERE = {"event": "matched", "manifest": str(Cid.of_node(b"not here"))}
NONSENSE: dict[str, Callable[[Sealed], list[Any]]] = {
    "manifest-not-here": lambda sealed: [{**NOT_HERE, "blocks": [Cid.of_node(b"not here")]}, *segments(sealed, 0), REPORT],
    "manifest-without-a-place": lambda sealed: [{**NOT_HERE, "blocks": {}}, *segments(sealed, 0), REPORT],
    "no-cid": lambda sealed: [{**matched(sealed[0]), "manifest": "no CID"}, *segments(sealed, 0), REPORT],
    "no-blocks": lambda sealed: [{**matched(sealed[0]), "blocks": None}, *segments(sealed, 0), REPORT],
    "nothing-matched": lambda sealed: [*segments(sealed, 0, 1, 2), REPORT],
    "no-json": lambda sealed: ["data: {", REPORT],
    "too-deep": lambda sealed: ["data: " + "[" * 100_000, REPORT],
    "unknown": lambda sealed: [{"event": "later"}, REPORT],
    "negative": lambda sealed: [{"event": "segment", "index": -1, "blocks": {}}, REPORT],
    "empty": lambda sealed: [],
}


@pytest.mark.parametrize("events", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_a_miss(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    events: Callable[[Sealed], list[Any]],
) -> None:
    daemon.scripts += [events(sealed)] * 2
    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 0
    assert cache_bytes(prefill.cache) == expected


def test_a_segment_that_the_artifact_has_not(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0, 3, 10**9), REPORT])
    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 256
    assert cache_bytes(prefill.cache) == expected


def test_an_artifact_of_another_text_or_model(
    daemon: ScriptedDaemon, sealed: Sealed, pieces: Pieces, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    """The daemon says that they match; the client looks itself."""
    for artifact, blocks in (pieces.signed(model_id=bytes(32)), pieces.signed(last_chain_key=bytes(32))):
        daemon.hold(blocks)
        daemon.scripts.append([matched(artifact), *segments(sealed, 0, 1, 2), REPORT])
    other = [prompt[0] ^ 1, *prompt[1:]]
    good, _ = pieces.signed()
    with Client(daemon.home) as client:
        for code in ("model.mismatch", "format.manifest"):
            prefill = client.prefill(model, prompt, shared=SHARED)
            assert code in (prefill.report.miss or "")
            assert cache_bytes(prefill.cache) == expected
        daemon.scripts.append([matched(good), *segments(sealed, 0, 1, 2), REPORT])
        prefill = client.prefill(model, other, shared=SHARED)
    assert prefill.report.hit_tokens == 0
    assert_right(model, other, SHARED, prefill.cache)


def moved(location: Location, **changes: Any) -> list[Any]:
    return list(location._replace(**changes))


# What a daemon may say of a block that lies at ``good``, and how often the client then asks: a place without the block is one
# that rotted, and is asked for once more; what is no place at all is believed no second time.
PLACES: dict[str, tuple[int, Callable[[Location], Any]]] = {
    "gone": (2, lambda good: None),
    "another-pack": (2, lambda good: moved(good, file="99999999.pack")),
    "before": (2, lambda good: moved(good, offset=good.offset - 64)),
    "one-byte-on": (2, lambda good: moved(good, offset=good.offset + 1)),
    "behind-the-end": (2, lambda good: moved(good, offset=1 << 40)),
    "too-short": (2, lambda good: moved(good, size=good.size - 1)),
    "too-long": (2, lambda good: moved(good, size=good.size + 1)),
    "nothing": (2, lambda good: moved(good, size=0)),
    "largest-offset": (1, lambda good: moved(good, offset=MAX_FILE_OFFSET)),
    "beyond-every-file": (1, lambda good: moved(good, offset=1 << 63)),
    "larger-than-blocks": (1, lambda good: moved(good, size=MAX_CODED_BLOCK_BYTES + 1)),
    "outside": (1, lambda good: moved(good, file=f"../{good.file}")),
    "outside-by-a-folder": (1, lambda good: moved(good, file=f"00000001.pack/../../{good.file}")),
    "no-place": (1, lambda good: good.file),
}


@pytest.mark.parametrize(("asks", "place"), PLACES.values(), ids=PLACES.keys())
def test_a_block_that_is_not_where_the_daemon_says(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    asks: int,
    place: Callable[[Location], Any],
) -> None:
    """Nothing is read from it that is not the block, and nothing at all from outside of the folder of blocks."""
    segment = blocks_of(sealed, 1)
    victim = segment[-1]
    good = daemon.blocks.locate(victim)
    assert good is not None
    shutil.copy(HomeLayout(daemon.home).blocks / good.file, daemon.home / good.file)  # there it would be found
    wrong = {"event": "segment", "index": 1, "blocks": {**daemon.locate(segment), str(victim): place(good)}}
    script = [matched(sealed[0]), *segments(sealed, 0), wrong, *segments(sealed, 2), REPORT]
    daemon.scripts += [script, script]
    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED)
        assert cache_bytes(prefill.cache) == expected
        assert (prefill.report.hit_tokens, len(daemon.asked)) == (256, asks)
        daemon.scripts[:] = [script, [matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]]
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert cache_bytes(prefill.cache) == expected
    assert prefill.report.hit_tokens == (SHARED if asks == 2 else 256)


def test_a_pack_that_is_cut_off_while_it_is_read(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    """It costs the blocks behind the cut, and never the process that reads."""
    first = blocks_of(sealed, 1)[0]
    script = [matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]
    daemon.scripts += [script, script]

    def cut_then_mend(event: dict[str, Any]) -> None:
        if len(daemon.asked) == 1 and event["event"] == "matched":
            cut_off(daemon.home, first)
        if len(daemon.asked) == 1 and event["event"] == "report":
            daemon.hold(sealed[1])

    with Client(daemon.home) as client:
        prefill = client.prefill(model, prompt, shared=SHARED, on_event=cut_then_mend)
    assert cache_bytes(prefill.cache) == expected
    assert (prefill.report.hit_tokens, len(daemon.asked)) == (SHARED, 2)


def test_a_block_that_rots_is_asked_for_once_more(
    daemon: ScriptedDaemon, sealed: Sealed, pieces: Pieces, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    victim = pieces.cids(Codec.RAW)[5]
    script = [matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]
    with Client(daemon.home) as client:
        flip_block(daemon.home, victim, 77)
        daemon.scripts += [script, script]

        def mend(event: dict[str, Any]) -> None:
            if event["event"] == "report":
                daemon.blocks.write(victim, pieces.blocks[victim])

        prefill = client.prefill(model, prompt, shared=SHARED, on_event=mend)
        assert (prefill.report.hit_tokens, len(daemon.asked)) == (SHARED, 2)
        assert cache_bytes(prefill.cache) == expected
        flip_block(daemon.home, victim, 77)
        daemon.scripts += [script, script, script]
        prefill = client.prefill(model, prompt, shared=SHARED)
        assert (prefill.report.hit_tokens, len(daemon.asked)) == (256, 4)  # and not for ever
        assert cache_bytes(prefill.cache) == expected


def test_a_model_whose_weights_change_is_another_model(daemon: ScriptedDaemon, sealed: Sealed, prompt: list[int]) -> None:
    """Also between two calls, also in one value, also behind torch's back."""
    model = build_model()
    script = [matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]
    with Client(daemon.home) as client:
        daemon.scripts.append(script)
        assert client.prefill(model, prompt, shared=SHARED).report.hit_tokens == SHARED
        weight = model.model.layers[1].self_attn.k_proj.weight.data
        weight[0, 0] = flip_float(float(weight[0, 0]))
        daemon.scripts.append(script)
        prefill = client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 0
    assert_right(model, prompt, SHARED, prefill.cache)


def flip_float(value: float) -> float:
    """Return ``value`` with the last bit but some of its fp32 form flipped."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    found: float = struct.unpack("<f", struct.pack("<I", bits ^ 0x0040_0000))[0]
    return found


# --- calls that cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "shared"), [([], None), ([1, 2], 0), ([1, 2], 3), ([1, -2], None), ([1, 2**32], None)])
def test_a_prompt_that_is_none(tmp_path: Path, model: LlamaForCausalLM, tokens: list[int], shared: int | None) -> None:
    with Client(tmp_path) as client, pytest.raises(UsageError):
        client.prefill(model, tokens, shared=shared)


def test_a_prompt_of_one_token(tmp_path: Path, model: LlamaForCausalLM) -> None:
    with Client(tmp_path) as client:
        prefill = client.prefill(model, [5])
    assert prefill.cached_tokens == 0
    assert prefill.cache.get_seq_length() == 0


# --- against a real node --------------------------------------------------------------------------------------------------


def test_every_call_against_a_real_node(
    tmp_path: Path, model: LlamaForCausalLM, document: list[int], prompt: list[int], expected: bytes
) -> None:
    did = encode_did(bytes(KEY.verify_key))
    steps: list[tuple[int, int]] = []
    events: list[str] = []
    with embedded_node(tmp_path / "home") as node, Client(node.home) as client:
        assert client.artifacts() == []
        published = client.publish(
            model,
            document,
            KEY,
            model_name="tiny",
            licence="CC0-1.0",
            expires=4_000_000_000,
            on_progress=lambda done, total: steps.append((done, total)),
        )
        assert steps == [(256, SHARED), (512, SHARED), (SHARED, SHARED)]
        (row,) = client.artifacts()
        assert (row["manifest_cid"], row["model_name"], row["complete"]) == (str(published.manifest), "tiny", True)
        assert (row["publisher"], row["expires"]) == (did, 4_000_000_000)
        assert client.artifact(published.manifest)["manifest"] == str(published.manifest)
        untrusted = client.prefill(model, prompt, shared=SHARED)
        assert "[trust.untrusted]" in str(untrusted.report)
        assert client.trust_add(did, "me")
        assert not client.trust_add(did)
        assert [rule["publisher"] for rule in client.trust_list()] == [did]
        with pytest.raises(P2pkvError) as caught:
            client.trust_add("nobody")
        assert isinstance(caught.value, FormatError | UsageError)
        prefill: Prefill = client.prefill(model, prompt, shared=SHARED, on_event=lambda event: events.append(event["event"]))
        assert (prefill.report.hit_tokens, prefill.cached_tokens) == (SHARED, SHARED)
        assert str(prefill.report).startswith("hit 600 of 609 tokens from the local store in ")
        assert cache_bytes(prefill.cache) == cache_bytes(untrusted.cache) == expected
        assert events[-1] == "report"
        assert client.fetch(published.manifest)["hit_tokens"] == SHARED
        told: list[dict[str, Any]] = []
        report = client.fetch(published.manifest, segments=2, layers=range(1, 2), in_order=True, on_event=told.append)
        assert (report["segments"], report["hit_tokens"], report["layers"]) == (2, 512, [1, 2])
        assert [event["index"] for event in told if event["event"] == "segment"] == [0, 1]
        for outside in ({"segments": 4}, {"segments": 0}, {"layers": range(99, 100)}, {"layers": range(2, 1)}):
            with pytest.raises(UsageError):
                client.fetch(published.manifest, **outside)
        assert client.announce(published.manifest) >= 4, "three boundaries and the manifest"
        renewed = client.renew(published.manifest, KEY, expires=4_100_000_000)
        old, new = (read_envelope(client.artifact(cid)).open() for cid in (published.manifest, renewed))
        assert encode_draft(new) == encode_draft(old)
        assert (new.expires, new.licence) == (4_100_000_000, "CC0-1.0")
        assert new.sequence > old.sequence
        with pytest.raises(UsageError, match="does not follow"):
            client.renew(renewed, KEY, sequence=old.sequence)
        with pytest.raises(ManifestError):
            client.renew(renewed, SigningKey(bytes(32)))
        for missing in (client.announce, partial(client.renew, key=KEY)):
            with pytest.raises(NotFoundError):
                missing(Cid.of_node(b"nobody"))
        assert [row["manifest_cid"] for row in client.artifacts()][:1] == [str(renewed)]
        assert client.trust_remove(did)
        assert not client.trust_remove(did)
        client.shutdown()


def test_the_model_is_left_as_it_was(tmp_path: Path, model: LlamaForCausalLM, prompt: list[int]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Client(tmp_path) as client:
        client.prefill(model, prompt)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
