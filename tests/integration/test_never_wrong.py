"""One flipped bit at each place on the way is refused, and the answer is right: the cache is the local one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from p2pkv.artifact.build import Terms
from p2pkv.client import calls
from p2pkv.client.publishing import stage_artifact
from p2pkv.errors import IntegrityError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.hashing import digest
from p2pkv.formats.manifest import Tokens
from p2pkv.formats.segment import Segment
from p2pkv.keys import encode_tokens
from p2pkv.ports import Buffer
from p2pkv.store.staging import open_staging
from p2pkv.store.store import Store
from p2pkv_node.bulk import TlsBulkLane
from sims.store import TamperedStore
from tests.integration.conftest import SHARED, Ask, is_block, provide
from tests.support.crafted import Pieces
from tests.support.llama import assert_right
from tests.support.staged import flip_staged
from tests.support.stores import Gate, flip, flip_block, tampering
from tests.support.town import KEY, PUBLISHER, Daemon, Town, in_thread

FIRST, MIDDLE, LAST = 0, 4096, -1
BITS = (FIRST, MIDDLE, LAST)


class Liar:
    """Flips ``bit`` of every block of the kind that ``about`` accepts; ``told`` is open once it has."""

    def __init__(self, about: Callable[[Cid], bool]) -> None:
        self.about = about
        self.bit = FIRST
        self.told = Gate()

    def __call__(self, cid: Cid, data: bytes) -> bytes:
        if not self.about(cid):
            return data
        self.told.open()
        return flip(data, self.bit)


# --- (a), (d): the provider's disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "index"), [(Codec.RAW, 5), (Codec.DAG_CBOR, 1)], ids=["block", "node"])
async def test_a_bit_on_the_providers_disk(town: Town, pieces: Pieces, ask: Ask, codec: Codec, index: int) -> None:
    provider = await provide(town, "rotten", pieces)
    victim = pieces.cids(codec)[index]
    consumer = await town.start("consumer")
    for number, bit in enumerate(BITS):
        provider.node.store.write(victim, pieces.blocks[victim])
        flip_block(provider.home, victim, bit)
        report = await ask(consumer)
        assert report.hit_tokens == 256  # the segment before the rotten one
        assert report.blocks_refused == 0  # it was not even sent
        assert provider.node.store.statistics().damaged_blocks == number + 1
    await provide(town, "healthy", pieces)
    assert (await ask(consumer)).hit_tokens == SHARED


async def test_a_bit_in_the_manifest_on_the_providers_disk(town: Town, pieces: Pieces, ask: Ask) -> None:
    provider = await provide(town, "rotten", pieces)
    artifact, _ = pieces.signed()
    flip_block(provider.home, artifact.cid, MIDDLE)
    report = await ask(await town.start("consumer"))
    assert report.hit_tokens == 0
    assert [refusal["code"] for refusal in report.refusals] == ["artifact.not_found"]
    assert provider.node.store.statistics().damaged_blocks == 1


# --- (b), (c), (d), (e): a peer that lies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "bulk"),
    [(Codec.RAW, False), (Codec.RAW, True), (Codec.DAG_CBOR, True)],
    ids=["block-over-the-stream", "block-over-the-bulk-lane", "node"],
)
async def test_a_bit_in_what_a_peer_sends(town: Town, pieces: Pieces, ask: Ask, codec: Codec, bulk: bool) -> None:
    artifact, _ = pieces.signed()
    liar = Liar(lambda cid: cid.codec is codec and cid != artifact.cid)
    peer = await provide(town, "liar", pieces, serve_from=tampering(liar), bulk=bulk)
    consumers = [await town.start(f"consumer{number}", bulk=bulk) for number in range(len(BITS))]
    for consumer, bit in zip(consumers, BITS, strict=True):
        liar.bit = bit
        report = await ask(consumer)
        assert report.hit_tokens == 0
        assert report.blocks_refused == 1
        assert report.peers_dropped == (peer.peer_id,)
        assert (await consumer.client.status())["banned_peers"] == [peer.peer_id]
        assert not any(consumer.node.store.has(cid) for cid in pieces.cids(codec))
    assert (blocks_over_lanes(peer) > 0) is (bulk and codec is Codec.RAW)
    await provide(town, "honest", pieces)
    for consumer in consumers:
        report = await ask(consumer)
        assert report.hit_tokens == SHARED
        assert peer.peer_id not in report.bytes_by_peer


@pytest.mark.parametrize("bulk", [False, True], ids=["stream", "bulk-lane"])
async def test_the_same_fetch_goes_on_with_another_peer(town: Town, pieces: Pieces, ask: Ask, bulk: bool) -> None:
    liar = Liar(is_block)

    def after_the_lie(cid: Cid, data: bytes) -> bytes:
        if is_block(cid):
            liar.told.wait()
        return data

    peer = await provide(town, "liar", pieces, serve_from=tampering(liar), bulk=bulk)
    honest = await provide(town, "honest", pieces, serve_from=tampering(after_the_lie), bulk=bulk)
    report = await ask(await town.start("consumer", bulk=bulk))
    assert report.hit_tokens == SHARED
    assert report.blocks_refused == 1
    assert report.peers_dropped == (peer.peer_id,)
    assert report.bytes_by_peer[honest.peer_id] >= sum(len(pieces.blocks[cid]) for cid in pieces.cids(Codec.RAW))


def envelope_bits(envelope: Envelope) -> dict[str, int]:
    """Return one bit of each part of an encoded envelope."""
    data = envelope.encode()
    return {
        "payload": 8 * (data.index(envelope.payload) + len(envelope.payload) // 2),
        "key": 8 * (data.index(envelope.key) + 7),
        "signature": 8 * (data.index(envelope.signature) + 7),
    }


async def test_a_peer_sends_another_envelope_than_the_cid_names(town: Town, pieces: Pieces, ask: Ask) -> None:
    artifact, blocks = pieces.signed()
    liar = Liar(lambda cid: cid == artifact.cid)
    peer = await provide(town, "liar", pieces, serve_from=tampering(liar))
    bits = envelope_bits(Envelope.decode(blocks[artifact.cid]))
    consumers = {part: await town.start(part) for part in bits}
    for part, consumer in consumers.items():
        liar.bit = bits[part]
        report = await ask(consumer)
        assert (report.hit_tokens, report.blocks_refused) == (0, 1)
        assert report.peers_dropped == (peer.peer_id,)
        assert [refusal["code"] for refusal in report.refusals] == ["artifact.not_found"]
        assert not consumer.node.store.has(artifact.cid)
    await provide(town, "honest", pieces)
    assert (await ask(consumers["signature"])).hit_tokens == SHARED


# --- (e): envelopes whose own CID is right --------------------------------------------------------------------------------


async def test_an_envelope_that_its_publisher_did_not_sign(town: Town, pieces: Pieces, ask: Ask) -> None:
    good, blocks = pieces.signed()
    forger = await town.start("forger")
    bits = envelope_bits(Envelope.decode(blocks[good.cid]))
    for bit in bits.values():
        await forger.plant(*pieces.seal(flip(blocks[good.cid], bit)))
    consumer = await town.start("consumer")
    report = await ask(consumer)
    assert report.hit_tokens == 0
    assert [refusal["code"] for refusal in report.refusals] == ["integrity.signature"] * len(bits)
    await provide(town, "honest", pieces)
    assert (await ask(consumer)).hit_tokens == SHARED  # all three forgeries are still on offer


def wrong_manifests(pieces: Pieces) -> dict[str, dict[str, Any]]:
    """Changes to a manifest that its publisher signs all the same: one bit each, but for the swapped segments."""
    manifest = pieces.manifest
    first, second, *rest = manifest.segments
    tokens = bytearray(encode_tokens(pieces.token_ids))
    tokens[4 * 300] ^= 1
    altered = bytes(tokens)
    return {
        "token id": {"tokens": Tokens(len(pieces.token_ids), digest(altered), altered, None)},
        "token digest": {"tokens": replace(manifest.tokens, digest=flip(manifest.tokens.digest, MIDDLE % 256))},
        "last chain key": {"last_chain_key": flip(manifest.last_chain_key, FIRST)},
        "segments": {"segments": (second, first, *rest)},
    }


@pytest.mark.parametrize("what", ["token id", "token digest", "last chain key", "segments"])
async def test_a_signed_manifest_that_contradicts_itself(town: Town, pieces: Pieces, ask: Ask, what: str) -> None:
    bad = await town.start("careless")
    await bad.plant(*pieces.signed(**wrong_manifests(pieces)[what]))
    consumer = await town.start("consumer")
    report = await ask(consumer)
    assert report.hit_tokens == 0
    assert [refusal["code"] for refusal in report.refusals] == ["format.manifest"]
    await provide(town, "honest", pieces)
    assert (await ask(consumer)).hit_tokens == SHARED


def with_node(pieces: Pieces, index: int, **changes: Any) -> Pieces:
    """Replace a segment's node by a changed one under its own right CID."""
    segments = list(pieces.manifest.segments)
    node = replace(Segment.decode(pieces.blocks[segments[index]]), **changes).encode()
    segments[index] = Cid.of_node(node)
    manifest = replace(pieces.manifest, segments=tuple(segments))
    return Pieces(manifest, pieces.token_ids, {**pieces.blocks, segments[index]: node})


@pytest.mark.parametrize("what", ["chain key", "size", "digest", "blocks of another length"])
async def test_a_signed_node_that_does_not_fit(town: Town, pieces: Pieces, ask: Ask, what: str) -> None:
    _, second, third = (Segment.decode(pieces.blocks[cid]) for cid in pieces.manifest.segments)
    (ref,), *others = second.layers
    changes: dict[str, dict[str, Any]] = {
        "chain key": {"chain_key": flip(second.chain_key, FIRST)},
        "size": {"layers": ((replace(ref, size=ref.size ^ 1),), *others)},
        "digest": {"layers": ((replace(ref, digest=flip(ref.digest, FIRST)),), *others)},
        "blocks of another length": {"layers": third.layers},
    }
    bad = await town.start("careless")
    await bad.plant(*with_node(pieces, 1, **changes[what]).signed())
    consumer = await town.start("consumer")
    report = await ask(consumer)
    assert report.hit_tokens == 0
    assert [refusal["code"] for refusal in report.refusals] == ["format.manifest"]
    assert report.peers_dropped == ()  # its bytes were what it said
    await provide(town, "honest", pieces)
    assert (await ask(consumer)).hit_tokens == SHARED


# --- (f): the consumer's own disk -----------------------------------------------------------------------------------------


class RottingStore(TamperedStore):
    """Flips a bit of the victim on the disk behind the daemon's back: right after a read that was good, or after a write."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, self._rot_after_read)
        self._home = store.layout.home
        self.victim: Cid | None = None
        self.bit = MIDDLE
        self.good_reads = 0  # that are left before it strikes
        self.writes = 0  # that it strikes after

    def _rot_after_read(self, cid: Cid, data: bytes) -> bytes:
        if cid == self.victim and self.good_reads:
            self.good_reads -= 1
            if not self.good_reads:
                flip_block(self._home, cid, self.bit)
        return data

    def write(self, cid: Cid, data: Buffer) -> None:
        super().write(cid, data)
        if cid == self.victim and self.writes:
            self.writes -= 1
            flip_block(self._home, cid, self.bit)


async def rotting_consumer(town: Town) -> tuple[Daemon, RottingStore]:
    stores: list[RottingStore] = []

    def serve_from(store: Store) -> RottingStore:
        stores.append(RottingStore(store))
        return stores[0]

    return await town.start("consumer", serve_from=serve_from), stores[0]


@pytest.mark.parametrize(
    ("kind", "bit"), [*(("block", bit) for bit in BITS), ("node", FIRST), ("node", LAST), ("manifest", MIDDLE)]
)
async def test_a_bit_on_the_own_disk_between_two_checks(town: Town, pieces: Pieces, ask: Ask, kind: str, bit: int) -> None:
    artifact, blocks = pieces.signed()
    provider = await provide(town, "provider", pieces)
    consumer, store = await rotting_consumer(town)
    assert (await ask(consumer)).hit_tokens == SHARED
    victim = {"block": pieces.cids(Codec.RAW)[5], "node": pieces.cids(Codec.DAG_CBOR)[1], "manifest": artifact.cid}[kind]
    # The daemon reads a block once, to check it; a node, and a manifest, once more to open it. Then the client reads it.
    store.victim, store.bit, store.good_reads = victim, bit, 1 if kind == "block" else 2
    report = await ask(consumer)
    assert store.good_reads == 0
    assert report.hit_tokens == SHARED  # the second attempt mends it
    assert report.bytes_by_peer == {provider.peer_id: len(blocks[victim])}
    assert consumer.node.store.read(victim) == blocks[victim]


async def test_a_disk_that_rots_again_and_again_shortens_the_hit(town: Town, pieces: Pieces, ask: Ask) -> None:
    await provide(town, "provider", pieces)
    consumer, store = await rotting_consumer(town)
    store.victim, store.writes = pieces.cids(Codec.RAW)[5], 2
    assert (await ask(consumer)).hit_tokens == 256
    assert store.writes == 0
    assert (await ask(consumer)).hit_tokens == SHARED


# --- (g): the staging folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.DAG_CBOR], ids=["block", "node"])
async def test_a_bit_in_the_staging_folder(
    town: Town, model: LlamaForCausalLM, document: list[int], ask: Ask, codec: Codec
) -> None:
    publisher = await town.start("publisher")
    terms = Terms(PUBLISHER, sequence=1, created=1_700_000_000)
    with open_staging(publisher.home) as staging:
        staged = await in_thread(lambda: stage_artifact(model, document, KEY, terms, staging))
        victim = next(cid for cid in staged.cids if cid.codec is codec)
        flip_staged(publisher.home, staged.name, victim, MIDDLE)
        with pytest.raises(IntegrityError):
            await publisher.client._report(calls.publish(staged.name, staged.manifest), lambda event: None)
    assert await publisher.client.artifacts() == []
    assert not any(publisher.node.store.has(cid) for cid in staged.cids)
    await publisher.publish(model, document)
    assert (await ask(await town.start("consumer"))).hit_tokens == SHARED


# --- (h): token ids -------------------------------------------------------------------------------------------------------


async def test_a_bit_in_the_prompts_own_tokens_is_another_prompt(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]
) -> None:
    await provide(town, "provider", pieces)
    consumer = await town.start("consumer")
    other = [*prompt]
    other[300] ^= 1
    prefill = await consumer.client.prefill(model, other, shared=SHARED)
    assert prefill.report.hit_tokens == 256
    assert_right(model, other, SHARED, prefill.cache)


@pytest.mark.parametrize("place", ["disk", "peer", "publisher"])
async def test_a_bit_in_the_block_of_token_ids(town: Town, pieces: Pieces, ask: Ask, place: str) -> None:
    ids = encode_tokens(pieces.token_ids)
    block = flip(ids, MIDDLE) if place == "publisher" else ids
    cid = Cid.of_block(block)
    artifact, blocks = pieces.signed(tokens=Tokens(len(pieces.token_ids), digest(block), None, cid))
    liar = Liar(lambda asked: place == "peer" and asked == cid)
    bad = await town.start("bad", serve_from=tampering(liar))
    await bad.plant(artifact, {**blocks, cid: block})
    if place == "disk":
        flip_block(bad.home, cid, MIDDLE)
    consumer = await town.start("consumer")
    report = await ask(consumer)
    assert report.hit_tokens == 0
    expected = {"disk": "artifact.not_found", "peer": "artifact.not_found", "publisher": "format.manifest"}
    assert [refusal["code"] for refusal in report.refusals] == [expected[place]]
    honest = await town.start("honest")
    await honest.plant(*pieces.signed())
    assert (await ask(consumer)).hit_tokens == SHARED


def blocks_over_lanes(daemon: Daemon) -> int:
    lane = daemon.node.context.bulk
    return lane.statistics().blocks_sent if isinstance(lane, TlsBulkLane) else 0
