"""A private artifact on real nodes: whoever carries it learns nothing of it, and whoever was granted it loads every bit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from libp2p.network.stream.net_stream import NetStream
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv.artifact.granting import Granted, grant_to
from p2pkv.artifact.private import Privacy
from p2pkv.connectors.hf import api as hf
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.formats.statement import SignedStatement
from p2pkv.keys import segment_bounds
from p2pkv.limits import MAX_CLOCK_SKEW_S, SEGMENT_TOKENS
from p2pkv.store.grants import GrantFiles
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import write_publisher_key
from tests.integration.conftest import SHARED
from tests.support.llama import assert_right, random_tokens
from tests.support.private import NAMESPACE, find_secrets, secrets_of
from tests.support.town import KEY, Daemon, Town

READER = SigningKey(bytes(range(50, 82)))


@pytest.fixture
def overheard(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All bytes that any node of the town reads from any stream, behind Noise: exchange, DHT, everything."""
    heard: list[bytes] = []
    read = NetStream.read

    async def listen(self: NetStream, n: int | None = None) -> bytes:
        data = await read(self, n)
        heard.append(data)
        return data

    monkeypatch.setattr(NetStream, "read", listen)
    return heard


def values_of(model: LlamaForCausalLM, tokens: list[int]) -> list[bytes]:
    """Return the neutral bytes of each segment and layer."""
    cache = hf.open_cache(model)
    found: list[bytes] = []

    def keep(start: int, end: int) -> None:
        layers = range(len(hf.geometry(model).layers))
        found.extend(bytes(memoryview(hf.extract_layer(cache, layer, start, end)).cast("B")) for layer in layers)

    hf.prefill(model, tokens, cache, hf.canonical_steps(len(tokens)), on_step=keep)
    return found


def files_of(home: Path, *without: Path) -> Iterator[bytes]:
    for path in home.rglob("*"):
        if path.is_file() and not any(path.is_relative_to(folder) for folder in without):
            yield path.read_bytes()


def granted_by(publisher: Daemon, manifest: Cid, reader: SigningKey, *, key: SigningKey = KEY, **terms: Any) -> bytes:
    """Return a signed grant, made out of what the publisher's home keeps."""
    own = GrantFiles(publisher.home).get(manifest)
    now = int(time.time())
    grant = grant_to(
        Granted(own, own.artifact_key(key)),
        encode_did(bytes(reader.verify_key)),
        ephemeral=secrets.token_bytes(32),
        **{"sequence": 1, "created": now, "expires": None, **terms},
    )
    return SignedStatement.sign(grant, key).encode()


def make_reader(daemon: Daemon, *grants: bytes, key: SigningKey = READER) -> None:
    write_publisher_key(HomeLayout(daemon.home).publisher_key, bytes(key))
    for grant in grants:
        GrantFiles(daemon.home).add(grant)


async def test_mirrors_carry_what_they_cannot_read(
    town: Town, model: LlamaForCausalLM, document: list[int], prompt: list[int], overheard: list[bytes]
) -> None:
    publisher = await town.start("publisher", bulk=False)
    staged = await publisher.publish(model, document, namespace=NAMESPACE)
    own = GrantFiles(publisher.home).get(staged.manifest)
    privacy = Privacy(NAMESPACE, own.artifact_key(KEY))
    mirror = await town.start("mirror", bulk=False)
    assert (await mirror.client.fetch(staged.manifest))["complete"]
    await mirror.announced()
    reader = await town.start("reader", bulk=False)
    make_reader(reader, granted_by(publisher, staged.manifest, READER, expires=int(time.time()) + 60))
    await publisher.stop()
    before = len(overheard)
    prefill = await reader.client.prefill(model, prompt, shared=SHARED)

    report = prefill.report
    assert (report.hit_tokens, report.manifest, report.miss) == (SHARED, str(staged.manifest), None)
    assert set(report.bytes_by_peer) == {mirror.peer_id}
    assert_right(model, prompt, SHARED, prefill.cache)
    known = list(secrets_of(privacy, hf.model_id_of(model), document, values_of(model, document)))
    assert len(known) > 2000
    heard = b"".join(overheard)
    stored = b"".join(files_of(HomeLayout(mirror.home).blocks))
    assert find_secrets(stored + known[-1][1] + b"end", known) == [known[-1][0]], "the test would find a secret"
    assert staged.manifest.binary in heard
    assert len(b"".join(overheard[before:])) > staged.bytes, "the test sees what travels"
    assert find_secrets(heard, known) == []
    assert len(stored) > staged.bytes
    for daemon, own_files in ((mirror, ()), (publisher, (HomeLayout(publisher.home).grants,)), (reader, ())):
        assert find_secrets(b"".join(files_of(daemon.home, *own_files)), known) == []

    # Who knows the text and has no grant finds nothing, though the mirror stands beside.
    stranger = await town.start("stranger", bulk=False)
    missed = await stranger.client.prefill(model, prompt, shared=SHARED)
    assert (missed.report.hit_tokens, missed.report.manifest) == (0, None)
    assert_right(model, prompt, SHARED, missed.cache)
    # Who has the artifact and the text, but another's grant, does not ask for it by what it knows.
    thief = await town.start("thief", bulk=False)
    make_reader(thief, granted_by(publisher, staged.manifest, READER), key=SigningKey(bytes(32)))
    assert (await thief.client.prefill(model, prompt, shared=SHARED)).report.hit_tokens == 0


async def test_a_grant_helps_as_far_as_the_prompt_is_the_same(
    town: Town, model: LlamaForCausalLM, document: list[int]
) -> None:
    publisher = await town.start("publisher")
    staged = await publisher.publish(model, document, namespace=NAMESPACE)
    reader = await town.start("reader")
    make_reader(reader, granted_by(publisher, staged.manifest, READER))
    other = [*document[: SEGMENT_TOKENS + 5], *random_tokens(300, seed=7)]
    prefill = await reader.client.prefill(model, other)
    assert (prefill.report.hit_tokens, prefill.report.manifest) == (SEGMENT_TOKENS, str(staged.manifest))
    assert_right(model, other, None, prefill.cache)
    assert segment_bounds(SHARED)[1] == SEGMENT_TOKENS


@pytest.mark.parametrize("why", ["expired", "not the publisher's", "nobody has it"])
async def test_what_is_granted_in_vain_is_computed_and_not_looked_up(
    town: Town, model: LlamaForCausalLM, document: list[int], prompt: list[int], overheard: list[bytes], why: str
) -> None:
    """Looking a private text up by its chain keys would tell others that it is there."""
    publisher = await town.start("publisher", bulk=False)
    staged = await publisher.publish(model, document, namespace=NAMESPACE)
    reader = await town.start("reader", bulk=False)
    grant, code = granted_by(publisher, staged.manifest, READER), "artifact.not_found"
    if why == "expired":
        code = "grant.expired"
        grant = granted_by(publisher, staged.manifest, READER, expires=int(time.time()) - MAX_CLOCK_SKEW_S - 5)
    elif why == "not the publisher's":
        code = "grant.invalid"
        forger = SigningKey(bytes([9]) * 32)
        own = GrantFiles(publisher.home).get(staged.manifest)
        forged = SignedStatement.decode(grant).open(type(own))
        did = encode_did(bytes(forger.verify_key))
        grant = SignedStatement.sign(type(own)(**{**fields_of(forged), "publisher": did}), forger).encode()
    else:
        await publisher.stop()
    make_reader(reader, grant)
    prefill = await reader.client.prefill(model, prompt, shared=SHARED, patience_s=1.0)
    assert prefill.report.hit_tokens == 0
    assert code in (prefill.report.miss or "")
    assert_right(model, prompt, SHARED, prefill.cache)
    keys = [pair for pair in secrets_of(Privacy(b"", bytes(32)), hf.model_id_of(model), prompt) if "chain key" in pair[0]]
    assert find_secrets(b"".join(overheard), keys) == []


def fields_of(statement: Any) -> dict[str, Any]:
    from dataclasses import fields

    return {field.name: getattr(statement, field.name) for field in fields(statement)}
