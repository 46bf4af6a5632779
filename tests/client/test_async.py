"""The asynchronous client, under trio and asyncio: the same calls, the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trio
from nacl.signing import SigningKey
from transformers import LlamaForCausalLM

from p2pkv import AsyncClient
from p2pkv.errors import DaemonUnreachableError, NotFoundError, UntrustedPublisherError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.did import encode_did
from p2pkv.store.home import HomeLayout
from p2pkv.store.stored_blocks import StoredBlocks
from p2pkv_node import embedded_node
from tests.client.conftest import REPORT, SHARED, ScriptedDaemon, Sealed, matched, segments
from tests.support.llama import cache_bytes

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
KEY = SigningKey(b"\x05" * 32)


def run_asyncio(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work(), debug=True)


def run_trio(work: Callable[[], Awaitable[None]]) -> None:
    trio.run(work)


@pytest.fixture(params=[run_trio, run_asyncio], ids=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function to its end under one of the two."""
    found: Run = request.param
    return found


def test_every_call_against_a_real_node(
    tmp_path: Path, run: Run, model: LlamaForCausalLM, document: list[int], prompt: list[int], expected: bytes
) -> None:
    did = encode_did(bytes(KEY.verify_key))
    events: list[str] = []

    async def work() -> None:
        async with AsyncClient(tmp_path / "home") as client:
            assert (await client.status())["fetches"] == 0
            published = await client.publish(model, document, KEY)
            (row,) = await client.artifacts()
            assert row["manifest_cid"] == str(published.manifest)
            assert (await client.artifact(published.manifest))["token_block"] is None
            assert await client.trust_add(did)
            assert [rule["publisher"] for rule in await client.trust_list()] == [did]
            prefill = await client.prefill(model, prompt, shared=SHARED, on_event=lambda event: events.append(event["event"]))
            assert prefill.report.hit_tokens == SHARED
            assert cache_bytes(prefill.cache) == expected
            assert (await client.fetch(published.manifest))["hit_tokens"] == SHARED
            report = await client.fetch(published.manifest, segments=2, layers=range(1, 2), in_order=True)
            assert (report["segments"], report["hit_tokens"], report["layers"]) == (2, 512, [1, 2])
            with pytest.raises(UsageError):
                await client.fetch(published.manifest, segments=4)
            with pytest.raises(NotFoundError):
                await client.fetch(Cid.of_node(b"nobody"), patience_s=10)
            exported = await client.export_car(published.manifest, tmp_path / "artifact.car")
            assert (exported["manifest"], exported["file"]) == (str(published.manifest), str(tmp_path / "artifact.car"))
            imported = await client.import_car(tmp_path / "artifact.car")
            assert (imported["manifest"], imported["new_bytes"]) == (str(published.manifest), 0)
            assert (await client.stats())["room"]["store"]["artifacts"] == 1
            assert await client.peers() == []
            async with client.lease(published.manifest) as lease:
                assert bytes(lease.map(published.manifest)) == StoredBlocks(HomeLayout(client.home).blocks).read(
                    lease.manifest
                )
                assert (await client.stats())["room"]["leases"] >= 1
            renewed = await client.renew(published.manifest, KEY)
            assert await client.announce(renewed) >= 4
            assert await client.trust_remove(did)
            with pytest.raises(UntrustedPublisherError):
                await client.import_car(tmp_path / "artifact.car")
            await client.shutdown()

    with embedded_node(tmp_path / "home"):
        run(work)
    assert events[-1] == "report"


def test_no_daemon_is_a_local_prefill_with_a_reason(
    tmp_path: Path, run: Run, model: LlamaForCausalLM, prompt: list[int], expected: bytes
) -> None:
    async def work() -> None:
        async with AsyncClient(tmp_path) as client:
            prefill = await client.prefill(model, prompt, shared=SHARED)
            assert cache_bytes(prefill.cache) == expected
            assert "[daemon.unreachable]" in str(prefill.report)
            with pytest.raises(DaemonUnreachableError):
                await client.status()

    run(work)


@pytest.mark.parametrize("ending", [None, "data: {", {"event": "error", "code": "store.full", "message": "full"}])
def test_a_daemon_that_dies_in_the_middle(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    run: Run,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
    ending: Any,
) -> None:
    daemon.scripts.append([matched(sealed[0]), *segments(sealed, 0), ending])

    async def work() -> None:
        async with AsyncClient(daemon.home) as client:
            prefill = await client.prefill(model, prompt, shared=SHARED)
            assert prefill.report.hit_tokens == 256
            assert cache_bytes(prefill.cache) == expected

    run(work)


def test_a_listener_that_raises_ends_the_call_and_leaves_nothing_open(
    daemon: ScriptedDaemon,
    sealed: Sealed,
    run: Run,
    model: LlamaForCausalLM,
    prompt: list[int],
    expected: bytes,
) -> None:
    daemon.scripts += [[matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]] * 2

    def refuse(event: dict[str, Any]) -> None:
        raise ZeroDivisionError

    async def work() -> None:
        async with AsyncClient(daemon.home) as client:
            with pytest.raises(ZeroDivisionError):
                await client.prefill(model, prompt, shared=SHARED, on_event=refuse)
            prefill = await client.prefill(model, prompt, shared=SHARED)
            assert prefill.report.hit_tokens == SHARED
            assert cache_bytes(prefill.cache) == expected

    run(work)


async def test_a_prefill_that_is_cancelled(
    daemon: ScriptedDaemon, sealed: Sealed, model: LlamaForCausalLM, prompt: list[int]
) -> None:
    daemon.scripts += [[matched(sealed[0]), *segments(sealed, 0, 1, 2), REPORT]] * 2
    async with AsyncClient(daemon.home) as client:
        with trio.CancelScope() as scope:
            await client.prefill(model, prompt, shared=SHARED, on_event=lambda event: scope.cancel())
        assert scope.cancelled_caught
        assert (await client.prefill(model, prompt, shared=SHARED)).report.hit_tokens == SHARED
