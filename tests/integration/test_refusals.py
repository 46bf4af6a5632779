"""Whatever is refused has its own stable code and says what to do; a prefill never raises for it, and is right anyway."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv.artifact.read import Artifact
from p2pkv.errors import (
    ExpiredError,
    IntegrityError,
    KeyFileError,
    NotFoundError,
    P2pkvError,
    StoreError,
    TruncatedError,
    UnknownVersionError,
    UntrustedPublisherError,
    WrongDtypeError,
    WrongModelError,
)
from p2pkv.formats import dagcbor
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.did import encode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.segment import Segment
from p2pkv.formats.tensors import Dtype
from p2pkv.limits import MAX_CLOCK_SKEW_S
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import read_publisher_key, write_publisher_key
from tests.integration.conftest import SHARED
from tests.support.crafted import Pieces, compute, sign_anything
from tests.support.llama import assert_right, build_model, cache_bytes
from tests.support.stores import cut_off as cut_off_pack
from tests.support.town import PUBLISHER, Town

STRANGER = SigningKey(bytes(range(1, 33)))
Sealed = tuple[Artifact, dict[Cid, bytes]]


def other_version(data: bytes, version: int = 2) -> bytes:
    """Return a node with another version, canonical otherwise."""
    return dagcbor.encode({**dagcbor.decode_map(data), "version": version})


def with_segment_version(pieces: Pieces) -> Sealed:
    node = other_version(pieces.blocks[pieces.manifest.segments[0]])
    cid = Cid.of_node(node)
    manifest = replace(pieces.manifest, segments=(cid, *pieces.manifest.segments[1:]))
    return Pieces(manifest, pieces.token_ids, {**pieces.blocks, cid: node}).signed()


def signed_by_stranger(pieces: Pieces) -> Sealed:
    return pieces.signed(STRANGER, publisher=encode_did(bytes(STRANGER.verify_key)))


def sealed_in_version(pieces: Pieces, what: str) -> Sealed:
    if what == "manifest":
        return pieces.seal(sign_anything(other_version(pieces.manifest.encode())))
    return pieces.seal(other_version(sign_anything(pieces.manifest.encode()).encode()))


def cut_off(pieces: Pieces) -> Sealed:
    return pieces.seal(sign_anything(pieces.manifest.encode()).encode()[:-20])


@dataclass(frozen=True)
class Case:
    """Something to offer, and what is to be said about it. ``fetch`` is where the wrong can be told without a prompt."""

    name: str
    offer: Callable[[Pieces], Sealed]
    error: type[P2pkvError]
    code: str
    advice: str
    fetch: bool = True


CASES = [
    Case("untrusted", signed_by_stranger, UntrustedPublisherError, "trust.untrusted", "p2pkv trust add did:key:z6Mk"),
    Case("expired", lambda p: p.signed(expires=int(time.time()) - 3600), ExpiredError, "trust.expired", "renew"),
    Case(
        "from the future",
        lambda p: p.signed(created=int(time.time()) + MAX_CLOCK_SKEW_S + 60),
        ExpiredError,
        "trust.expired",
        "check yours",
    ),
    Case("envelope cut off", cut_off, TruncatedError, "format.truncated", "copy or fetch it again"),
    Case("manifest version", lambda p: sealed_in_version(p, "manifest"), UnknownVersionError, "format.version", "upgrade"),
    Case("envelope version", lambda p: sealed_in_version(p, "envelope"), UnknownVersionError, "format.version", "upgrade"),
    Case("segment version", with_segment_version, UnknownVersionError, "format.version", "upgrade"),
    # A peer may offer what belongs to another model under our keys; an honest one never does.
    Case("wrong model", lambda p: p.signed(model_id=bytes(32)), WrongModelError, "model.mismatch", "load the model", False),
    Case("wrong dtype", lambda p: p.signed(dtype=Dtype.FP16), WrongDtypeError, "model.dtype", "dtype", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_each_refusal_has_its_code_and_says_what_to_do(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int], expected: bytes, case: Case
) -> None:
    provider, consumer = await town.start("provider"), await town.start("consumer")
    artifact, blocks = case.offer(pieces)
    await provider.plant(artifact, blocks)
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    assert cache_bytes(prefill.cache) == expected
    assert (prefill.report.hit_tokens, prefill.report.manifest) == (0, None)
    (refusal,) = prefill.report.refusals
    assert (refusal["manifest"], refusal["code"]) == (str(artifact.cid), case.code)
    assert case.advice in refusal["advice"]
    assert prefill.report.miss is not None
    assert case.code in prefill.report.miss
    assert case.code in str(prefill.report)
    assert prefill.report.peers_dropped == ()  # a peer that serves honest bytes of somebody's mistake is no liar
    if case.fetch:
        with pytest.raises(case.error) as caught:
            await consumer.client.fetch(artifact.cid)
        assert (type(caught.value), caught.value.code) == (case.error, case.code)
        assert case.advice in caught.value.advice


def test_the_errors_of_refusals_are_told_apart() -> None:
    """Each its own class; expired and from the future share one, and differ in what they advise."""
    errors = {case.name: (case.error, case.code) for case in CASES}
    assert len(set(errors.values())) == len(errors) - 3  # the three versions are one, and so are the two times
    assert len({case.advice for case in CASES if case.error is ExpiredError}) == 2


async def test_other_weights_under_the_same_name_are_never_found(
    town: Town, model: LlamaForCausalLM, document: list[int], prompt: list[int], expected: bytes
) -> None:
    """The model id is part of every key: the same text of another model is nobody's business."""
    other = build_model(torch.bfloat16, seed=1)
    same_weights_other_dtype = build_model(torch.float32)
    provider, consumer = await town.start("provider"), await town.start("consumer")
    for wrong in (other, same_weights_other_dtype):
        await provider.plant(*compute(wrong, document, name="tiny").signed())
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    assert cache_bytes(prefill.cache) == expected
    assert (prefill.report.hit_tokens, prefill.report.refusals, prefill.report.bytes_fetched) == (0, (), 0)
    assert "nothing published was found" in str(prefill.report)
    prefill = await consumer.client.prefill(other, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == SHARED
    assert_right(other, prompt, SHARED, prefill.cache)


async def test_nobody_has_it(town: Town, pieces: Pieces) -> None:
    consumer = await town.start("consumer")
    with pytest.raises(NotFoundError) as caught:
        await consumer.client.fetch(Cid.of_node(b"nobody's"), patience_s=20)
    assert caught.value.code == "artifact.not_found"
    assert "bootstrap" in caught.value.advice


# --- files that are cut off -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.DAG_CBOR], ids=["block", "node"])
async def test_a_pack_of_the_store_that_is_cut_off_is_refused_and_fetched_again(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int], expected: bytes, codec: Codec
) -> None:
    provider, consumer = await town.start("provider"), await town.start("consumer")
    await provider.plant(*pieces.signed())
    await consumer.plant(*pieces.signed())
    victim = pieces.cids(codec)[1]

    def cut() -> None:
        consumer.node.store.write(victim, pieces.blocks[victim])  # now it is the last one of its pack, and suffers alone
        cut_off_pack(consumer.home, victim)

    cut()
    with pytest.raises(IntegrityError) as caught:
        consumer.node.store.read(victim)
    assert (caught.value.code, "fetched again" in caught.value.advice) == ("integrity.hash", True)
    cut()
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == SHARED
    assert prefill.report.bytes_by_peer == {provider.peer_id: len(pieces.blocks[victim])}
    assert cache_bytes(prefill.cache) == expected


@pytest.mark.parametrize("kept", [0, 1, 20, 60, 86])
def test_a_key_file_that_is_cut_off(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "publisher.key"
    write_publisher_key(path, bytes(32))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(KeyFileError) as caught:
        read_publisher_key(path)
    assert caught.value.code == "key.unreadable"
    assert "cut off" in caught.value.advice


@pytest.mark.parametrize("part", ["envelope", "segment"])
def test_every_cut_of_a_node_is_refused(pieces: Pieces, part: str) -> None:
    _, blocks = pieces.signed()
    data = sign_anything(pieces.manifest.encode()).encode() if part == "envelope" else blocks[pieces.manifest.segments[0]]
    decode: Callable[[bytes], Any] = Envelope.decode if part == "envelope" else Segment.decode
    for length in range(0, len(data), 7):
        with pytest.raises(TruncatedError):
            decode(data[:length])


# --- versions of what lies on this machine --------------------------------------------------------------------------------


async def test_an_index_of_a_newer_p2pkv(town: Town, tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path / "newer")
    layout.create()
    connection = sqlite3.connect(layout.index)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(UnknownVersionError) as caught:
        await town.start("newer")
    assert caught.value.code == "format.version"
    assert "upgrade" in caught.value.advice


@pytest.mark.parametrize(
    ("content", "error", "code", "advice"),
    [
        (json.dumps({"version": 3, "rules": []}), UnknownVersionError, "format.version", "Upgrade"),
        ('{"version": 2, "rules": [', StoreError, "store.io", "Nobody is trusted until it is mended"),
    ],
    ids=["version", "cut-off"],
)
async def test_a_trust_file_that_cannot_be_read_trusts_nobody(
    town: Town,
    model: LlamaForCausalLM,
    pieces: Pieces,
    prompt: list[int],
    expected: bytes,
    content: str,
    error: type[P2pkvError],
    code: str,
    advice: str,
) -> None:
    provider, consumer = await town.start("provider"), await town.start("consumer")
    artifact, blocks = pieces.signed()
    await provider.plant(artifact, blocks)
    HomeLayout(consumer.home).trust.write_text(content)
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    assert cache_bytes(prefill.cache) == expected
    assert [refusal["code"] for refusal in prefill.report.refusals] == [code]
    for call in (
        lambda: consumer.client.fetch(artifact.cid),
        consumer.client.trust_list,
        lambda: consumer.client.trust_add(PUBLISHER),
    ):
        with pytest.raises(error) as caught:
            await call()
        assert caught.value.code == code
        assert advice in caught.value.advice
