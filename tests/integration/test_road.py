"""The whole road on real nodes: publish, mirror, find, fetch, verify, inject, and say what would have been said."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import LlamaForCausalLM

from bench.processes import node_process
from p2pkv import Client, Prefill
from p2pkv.connectors.hf import api as hf
from p2pkv.errors import FetchIncompleteError
from p2pkv.formats.cid import Cid, Codec
from p2pkv.routing.boundaries import announce_keys
from p2pkv_node import embedded_node
from p2pkv_node.bulk import TlsBulkLane
from tests.integration.conftest import SHARED
from tests.support.crafted import Pieces
from tests.support.llama import assert_right, build_model, local_cache, random_tokens
from tests.support.proxy import open_proxy
from tests.support.stores import Gate, tampering
from tests.support.town import KEY, PUBLISHER, Daemon, Town, in_thread, until

BLOCKS_PER_SEGMENT = 4


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 2), (torch.float32, 0)], ids=["bf16-mirrored", "fp32"])
async def test_a_consumer_that_knows_a_bootstrap_address_alone(town: Town, dtype: torch.dtype, count: int) -> None:
    model, document = build_model(dtype), random_tokens(SHARED)
    prompt = [*document, *random_tokens(9, seed=2)]
    publisher = await town.start("publisher")
    staged = await publisher.publish(model, document)
    mirrors = [await town.start(f"mirror{number}") for number in range(count)]

    async def fill(mirror: Daemon) -> None:
        fetched = await mirror.client.fetch(staged.manifest)
        assert (fetched["segments"], fetched["hit_tokens"]) == (3, SHARED)
        await mirror.announced()

    async with trio.open_nursery() as nursery:
        for mirror in mirrors:
            nursery.start_soon(fill, mirror)
    consumer = await town.start("consumer")
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    report = prefill.report
    assert (report.hit_tokens, report.prompt_tokens, report.manifest) == (SHARED, len(prompt), str(staged.manifest))
    assert (report.miss, report.refusals, report.blocks_refused, report.peers_lost) == (None, (), 0, 0)
    assert report.bytes_by_peer.keys() <= {daemon.peer_id for daemon in (publisher, *mirrors)}
    assert report.bytes_fetched == staged.bytes
    assert_right(model, prompt, SHARED, prefill.cache)


async def test_blocks_come_from_all_mirrors(town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]) -> None:
    """Each holds its first block back until all were asked: so nobody is too late to be used."""
    asked: set[str] = set()
    all_asked = threading.Event()

    def wait_for_the_others(name: str, cid: Cid, data: bytes) -> bytes:
        if cid.codec is Codec.RAW:
            asked.add(name)
            if len(asked) == 3:
                all_asked.set()
            assert all_asked.wait(20)
        return data

    names = ("one", "two", "three")
    mirrors = [await town.start(name, serve_from=tampering(partial(wait_for_the_others, name))) for name in names]
    for mirror in mirrors:
        await mirror.plant(*pieces.signed())
    consumer = await town.start("consumer")
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.bytes_by_peer.keys() == {mirror.peer_id for mirror in mirrors}
    assert_right(model, prompt, SHARED, prefill.cache)


async def test_generate_goes_on_from_what_was_loaded(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]
) -> None:
    publisher, consumer = await town.start("publisher"), await town.start("consumer")
    await publisher.plant(*pieces.signed())
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    ids = torch.tensor([prompt])

    def generate(**arguments: Any) -> torch.Tensor:
        found = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **arguments)
        assert isinstance(found, torch.Tensor)
        return found

    local = generate(**{hf.cache_argument(model): local_cache(model, prompt, SHARED)})
    assert torch.equal(generate(**prefill.generate_arguments), local)


async def test_without_being_told_the_shared_length_the_tail_is_found_too(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]
) -> None:
    publisher, consumer = await town.start("publisher"), await town.start("consumer")
    await publisher.plant(*pieces.signed())
    prefill = await consumer.client.prefill(model, prompt)
    assert prefill.report.hit_tokens == SHARED
    assert_right(model, prompt, SHARED, prefill.cache)


async def test_a_document_shorter_than_a_segment(town: Town, model: LlamaForCausalLM) -> None:
    document = random_tokens(100, seed=5)
    prompt = [*document, 7, 8, 9]
    publisher, consumer = await town.start("publisher"), await town.start("consumer")
    await publisher.publish(model, document)
    prefill = await consumer.client.prefill(model, prompt, shared=100)
    assert prefill.report.hit_tokens == 100
    assert_right(model, prompt, 100, prefill.cache)


async def test_bulk_lane_and_stream_bring_the_same(
    town: Town, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]
) -> None:
    publisher = await town.start("publisher")
    await publisher.plant(*pieces.signed())
    lane = publisher.node.context.bulk
    assert isinstance(lane, TlsBulkLane)
    for bulk, sent in ((False, 0), (True, len(pieces.cids(Codec.RAW)))):
        consumer = await town.start(f"bulk-{bulk}", bulk=bulk, mirror=False)
        prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
        assert prefill.report.hit_tokens == SHARED
        assert_right(model, prompt, SHARED, prefill.cache)
        assert lane.statistics().blocks_sent == sent
        await consumer.stop()  # it would be asked by the next one


async def test_a_partial_provider(
    town: Town, model: LlamaForCausalLM, document: list[int], pieces: Pieces, prompt: list[int]
) -> None:
    """A node that fetched a prefix only serves that, and others the rest."""
    publisher = await town.start("publisher")
    artifact, blocks = pieces.signed()
    await publisher.plant(artifact, blocks)
    partial_node = await town.start("partial")
    assert (await partial_node.client.prefill(model, [*document[:300], 1, 2])).report.hit_tokens == 256
    partial_node.node.announcer.add(announce_keys(artifact.cid, SHARED, artifact.chain_keys))
    await partial_node.announced()
    consumer = await town.start("consumer", mirror=False)
    prefill = await consumer.client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == SHARED
    assert_right(model, prompt, SHARED, prefill.cache)
    await publisher.stop()
    await consumer.stop()  # it would be asked as well, unannounced as it is
    alone = await town.start("alone")
    prefill = await alone.client.prefill(model, prompt, shared=SHARED)
    assert prefill.report.hit_tokens == 256
    assert prefill.report.peers_dropped == ()
    assert_right(model, prompt, SHARED, prefill.cache)
    with pytest.raises(FetchIncompleteError):
        await alone.client.fetch(artifact.cid)


async def test_an_embedded_node_and_the_synchronous_client(
    town: Town, tmp_path: Path, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]
) -> None:
    publisher = await town.start("publisher")
    await publisher.plant(*pieces.signed())
    bootstrap = town.bootstrap

    def program() -> Prefill:
        with embedded_node(tmp_path / "embedded", bootstrap=bootstrap) as node, Client(node.home) as client:
            assert client.trust_add(PUBLISHER)
            return client.prefill(model, prompt, shared=SHARED)

    prefill: Prefill = await in_thread(program)
    assert prefill.report.hit_tokens == SHARED
    assert_right(model, prompt, SHARED, prefill.cache)


# --- death in the middle --------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_peer_killed_in_the_middle(
    town: Town, tmp_path: Path, model: LlamaForCausalLM, document: list[int], pieces: Pieces, prompt: list[int]
) -> None:
    """The victim's line lets a third of the artifact through; then its process is killed, and only then the other serves."""
    killed = Gate()

    def after_the_death(cid: Cid, data: bytes) -> bytes:
        if cid.codec is Codec.RAW:
            killed.wait()
        return data

    survivor = await town.start("survivor", serve_from=tampering(after_the_death))
    artifact, _ = pieces.signed()
    async with open_proxy() as proxy:
        options = ["--no-bulk", "--announce", proxy.address]
        start = partial(node_process, tmp_path / "victim", bootstrap=town.bootstrap, options=options)
        process = start()
        victim = await in_thread(process.__enter__)
        try:
            proxy.target = await in_thread(partial(port_of_process, victim.process.pid))
            with Client(victim.home) as client:
                await in_thread(partial(client.publish, model, document, KEY))
                await until(lambda: all_announced(client))
            await survivor.publish(model, document)
            proxy.hold_after(250_000)
            consumer = await town.start("consumer", bootstrap=(f"{proxy.address}/p2p/{victim.peer_id}",))
            found: list[Prefill] = []

            async def ask() -> None:
                found.append(await consumer.client.prefill(model, prompt, shared=SHARED))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                with trio.fail_after(20):
                    await proxy.held.wait()
                victim.kill()
                killed.open()
        finally:
            await in_thread(lambda: process.__exit__(None, None, None))
    (prefill,) = found
    assert prefill.report.peers_lost == 1
    assert prefill.report.hit_tokens == SHARED
    assert_right(model, prompt, SHARED, prefill.cache)
    assert artifact.token_ids == tuple(document)


def all_announced(client: Client) -> bool:
    announcing = client.status()["announcing"]
    return bool(announcing["announced"] == announcing["keys"])


@pytest.mark.slow
async def test_a_consumer_daemon_that_is_killed_resumes(
    town: Town, tmp_path: Path, model: LlamaForCausalLM, pieces: Pieces, prompt: list[int]
) -> None:
    """What arrived before the kill is not fetched again: of the whole artifact only what was on its way is served twice."""
    gate = Gate()
    served: list[Cid] = []

    def one_segment_until_the_gate_opens(cid: Cid, data: bytes) -> bytes:
        if cid.codec is Codec.RAW:
            if len(served) >= BLOCKS_PER_SEGMENT:
                gate.wait()
            served.append(cid)
        return data

    publisher = await town.start("publisher", serve_from=tampering(one_segment_until_the_gate_opens))
    await publisher.plant(*pieces.signed())
    home, bootstrap = tmp_path / "consumer", town.bootstrap

    def until_killed() -> Prefill:
        with node_process(home, bootstrap=bootstrap) as node, Client(home) as client:
            client.trust_add(PUBLISHER)

            def kill(event: dict[str, Any]) -> None:
                if event["event"] == "segment":
                    node.kill()

            return client.prefill(model, prompt, shared=SHARED, on_event=kill)

    prefill = await in_thread(until_killed)
    # What was injected counts, although the daemon is gone; any segment may have been the first.
    assert prefill.report.hit_tokens in (0, 256)
    assert_right(model, prompt, SHARED, prefill.cache)
    stored = served[:BLOCKS_PER_SEGMENT]
    gate.open()

    def again() -> Prefill:
        with node_process(home, bootstrap=bootstrap), Client(home) as client:
            return client.prefill(model, prompt, shared=SHARED)

    prefill = await in_thread(again)
    assert prefill.report.hit_tokens == SHARED
    assert_right(model, prompt, SHARED, prefill.cache)
    assert prefill.report.local_bytes == sum(len(pieces.blocks[cid]) for cid in stored)
    assert not set(stored) & set(served[BLOCKS_PER_SEGMENT:])
    assert prefill.report.bytes_fetched + prefill.report.local_bytes <= sum(map(len, pieces.blocks.values()))


def port_of_process(pid: int) -> int:
    """Return the one TCP port on which a process listens, of which its ready line tells nothing where --announce is given."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
    return port
