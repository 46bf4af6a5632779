"""The status page in headless Chromium: what it shows of a node under load, that names stay text, and its two looks."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from p2pkv.artifact.build import ModelDescription
from p2pkv.errors import DaemonUnreachableError, DiskFullError
from p2pkv.formats.cid import Cid
from p2pkv.formats.tensors import Dtype, LayerGeometry, LayerKind
from p2pkv.store.home import HomeLayout
from p2pkv.units import KIB, MIB
from tests.node.conftest import events_of
from tests.support.artifacts import Sample, make_sample
from tests.support.browser import Page, needs_chromium, open_page
from tests.support.town import Daemon, Town, until

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(180)]

TILES = (
    "Object.fromEntries([...document.querySelectorAll('#tiles > div')]"
    ".map(tile => [...tile.children].map(part => part.textContent)).map(([name, ...texts]) => [name, texts]))"
)
EVIL = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>\N{RIGHT-TO-LEFT OVERRIDE}evil"""
QUOTA = 64 * MIB
MINUS = "\N{MINUS SIGN}"
BOOK = [*range(3000, 4100)]


def sample_of(name: str, token_ids: list[int], layers: int, heads: int = 1) -> Sample:
    geometry = LayerGeometry(LayerKind.FULL, kv_heads=heads, k_dim=16, v_dim=16)
    description = ModelDescription(model_id(name), name, (geometry,) * layers, Dtype.BF16)
    return make_sample(token_ids, description=description, created=int(time.time()))


def model_id(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")[:32]


@dataclass
class Scene:
    """A daemon with a page, some artifacts, and one more to fetch from two slow providers."""

    daemon: Daemon
    http: httpx.AsyncClient
    big: Sample
    providers: tuple[Daemon, Daemon]
    _nursery: trio.Nursery

    def fetch(self, body: dict[str, Any]) -> None:
        """Begin with a fetch, and do not wait for it."""
        self.background(events_of, self.http, body)

    def background(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        async def work() -> None:
            with suppress(httpx.RemoteProtocolError, DaemonUnreachableError):  # cut off by the end of the daemon
                await call(*arguments)

        self._nursery.start_soon(work)

    async def prompt(self, token_ids: list[int], **prefill: Any) -> None:
        """Fetch for a prompt, and tell how its prefill went, as a program does."""
        model = model_id("SmolLM2-135M").hex()
        body = {"model_id": model, "dtype": "bf16", "token_ids": token_ids, "patience_s": 2}
        report = (await events_of(self.http, body))[-1]
        told = {"model_id": model, "device": "cpu", "hit_tokens": report["hit_tokens"], **prefill}
        assert (await self.http.post("/v1/prefills", json=told)).status_code == 200


@asynccontextmanager
async def scene(town: Town, rate: int) -> AsyncIterator[Scene]:
    """``rate`` is that of the faster provider, in bytes per second."""
    fast = await town.start("fast", upload_limit=rate)
    slow = await town.start("slow", upload_limit=rate // 3)
    big = sample_of("Qwen3-0.6B", [*range(9000, 9000 + 8192)], 20, heads=2)
    book = sample_of("SmolLM2-135M", BOOK, 8)
    longer = sample_of("SmolLM2-135M", [*BOOK[:1024], *range(500)], 8)
    for provider in (fast, slow):
        await provider.plant(big.artifact, big.blocks)
    daemon = await town.start("daemon", web="127.0.0.1:0", quota=QUOTA)
    store = daemon.node.store
    evil = sample_of(EVIL, [*range(40, 640)], 2)
    for sample, held in ((evil, 2), (book, 5), (longer, 6)):
        for cid, data in sample.blocks.items():
            store.write(cid, data)
        store.index.add_artifact(sample.artifact, range(held))
    store.holds.pin("<b>kept</b>", evil.cid)
    store.write(Cid.of_block(b"rubbish"), b"rubbish")
    transport = httpx.AsyncHTTPTransport(uds=str(HomeLayout(daemon.home).control_socket))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://p2pkv", timeout=60) as http,
        trio.open_nursery() as nursery,
    ):
        await http.post("/v1/gc", json={})
        yield Scene(daemon, http, big, (fast, slow), nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def page_of(town: Town, folder: Path, *, rate: int = 1536 * KIB) -> AsyncIterator[tuple[Scene, Page]]:
    async with scene(town, rate) as found:
        url = found.daemon.node.web_url
        assert url is not None
        async with open_page(folder / "profile", url, height=1600) as page:
            await page.until("document.querySelector('#state').dataset.state === 'ready'")
            yield found, page
            assert page.requests
            assert all(request.startswith((f"{url}/", "data:")) for request in page.requests)


def table(name: str) -> str:
    return f"[...document.querySelectorAll('#{name} tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"


def text(name: str) -> str:
    return f"document.querySelector('#{name}').textContent"


async def test_the_page_shows_what_is_stored_and_names_stay_text(town: Town, tmp_path: Path) -> None:
    async with page_of(town, tmp_path) as (found, page):
        await page.until(f"{table('artifacts')}.every(row => row[4] !== 'not counted yet')")
        artifacts = await page.evaluate(table("artifacts"))
        assert [row[0] for row in artifacts] == ["SmolLM2-135M", "SmolLM2-135M", EVIL]  # to the letter: as text
        assert artifacts[2][2:4] == ["600", "2 of 3"]
        assert artifacts[2][5] == "<b>kept</b>"
        assert [row[3] for row in artifacts[:2]] == ["6 of 6", "5 of 5"]
        assert all(re.fullmatch(r"[\d.]+ KiB, [\d.]+ KiB of it shared", row[4]) for row in artifacts[:2])
        assert re.fullmatch(r"[\d.]+ KiB", artifacts[2][4])
        assert await page.evaluate("document.querySelectorAll('img, main script, td b').length") == 0
        assert await page.evaluate("document.title") == "p2pkv node"
        assert re.fullmatch(r"[\d.]+ (K|M)iB of blocks stored", await page.evaluate(text("stored")))
        assert await page.evaluate(text("marks")) == "above 64.0 MiB, the quota, artifacts go until 57.6 MiB are left"
        assert await page.evaluate("document.querySelectorAll('#room rect.full, #room line').length") == 3
        stored, low, high = [
            float(await page.evaluate(f"document.querySelector('#room {mark}')"))
            for mark in ("rect.full').getAttribute('width", "line.low').getAttribute('x1", "line.high').getAttribute('x1")
        ]
        assert 0 < stored < low < high < 300
        assert low / high == pytest.approx(0.9, abs=0.01)
        tiles = await page.evaluate(TILES)
        assert tiles["Artifacts"] == ["3", "2 held whole; 1 pin, 0 leases"]
        assert tiles["Collections"][0] == "1"
        assert re.fullmatch(r"0 artifacts evicted, .* freed; the last \d+ (s|min) ago, asked for", tiles["Collections"][1])
        assert tiles["Prefill saved"] == ["unknown", "no program has told of a prefill"]
        assert tiles["Hit ratio"][1] == "0 of 0 prompt tokens"
        assert tiles["Verification failures"][0] == "0"
        assert page.complaints == []
        await found.daemon.stop()
        await page.until(f"{text('state')} === 'the node does not answer'")


async def test_transfers_and_figures_move_while_the_page_is_open(town: Town, tmp_path: Path) -> None:
    async with page_of(town, tmp_path) as (found, page):
        assert await page.evaluate(table("transfers")) == [["none"]]
        found.fetch({"manifest": str(found.big.cid)})
        both = [peer.peer_id for peer in found.providers]
        shown = [f"{peer[:8]}…{peer[-8:]}" for peer in both]
        await page.until(f"({table('transfers')}[0][3]?.match(/iB\\/s/g) ?? []).length === 2")
        (transfer,) = await page.evaluate(table("transfers"))
        assert transfer[0].startswith("Qwen3-0.6B ")
        assert re.fullmatch(
            r"transferring blocks \(waiting for [\d,]+ blocks of (2 peers|peer \w+)\)(, for \d+ s)?", transfer[1]
        )
        assert re.fullmatch(r"[\d.]+ (B|KiB|MiB) of [\d.]+ MiB", transfer[2])
        shares = dict(share.split(": ") for share in transfer[3].split("; "))
        assert shares.keys() == {*shown}
        assert all(re.fullmatch(r"[\d.]+ (B|KiB|MiB), [\d.]+ (B|KiB|MiB)/s", share) for share in shares.values())
        await page.until(f"{table('transfers')}[0][2] !== {transfer[2]!r}")
        await page.until("document.querySelector('#transfers progress').value > 0")
        peers = {row[0]: row for row in await page.evaluate(table("peers"))}
        assert all(peers[peer][1] == "connected" and peers[peer][3].endswith("/s") for peer in shown)
        assert (await page.evaluate(TILES))["Fetches under way"] == [
            *("1", "1 transferring blocks, 1 download would go on after a restart"),
        ]
        await found.prompt(list(range(1024)), loading_s=0.5, tokens_per_s=256)  # a miss
        await found.prompt([*BOOK, 1, 2, 3], loading_s=0.3)
        await page.until(f"{TILES}['Prefill saved'][0] === '3.2 s'")
        tiles = await page.evaluate(TILES)
        assert tiles["Prefill saved"][1] == "4.0 s of computing less 0.8 s of loading"
        assert tiles["Hit ratio"] == ["48.1 %", "1,024 of 2,127 prompt tokens"]
        await page.until("document.querySelectorAll('.chart polyline')[2].getAttribute('points') !== ''")
        for _ in range(2):
            await found.prompt(list(range(1024)), loading_s=9)
        await page.until(f"{TILES}['Prefill saved'][0] === '{MINUS}14.8 s'")
        assert await page.evaluate("document.querySelectorAll('#tiles .alarm').length") == 1
        assert await page.evaluate("document.querySelectorAll('.chart h3')[2].textContent") == (
            f"Prefill saved, from {MINUS}14.8 s up to 3.2 s"
        )
        assert page.complaints == []


async def test_a_fetch_that_waits_for_room_and_a_store_that_cannot_shrink(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with page_of(town, tmp_path) as (found, page):
        node, store = found.daemon.node, found.daemon.node.store
        monkeypatch.setattr(node, "config", replace(node.config, quota=1000))
        monkeypatch.setattr(store.collector, "_quota", 1000)
        for number, row in enumerate(store.index.artifacts()):
            store.holds.pin(f"all-{number}", row.manifest_cid)
        await until(lambda: node.collections.statistics().over_quota)
        await page.until(f"{text('marks')} === 'above 1000 B, the quota, and all of it is pinned or leased'")
        assert await page.evaluate("document.querySelector('#room rect.full').classList.contains('over')")

        def write(cid: Cid, data: bytes) -> None:
            raise DiskFullError("no space is left")

        monkeypatch.setattr(store.blocks, "write", write)
        monkeypatch.setattr(store.collector, "free_bytes", lambda: 0)
        found.fetch({"manifest": str(found.big.cid)})
        waiting = "disk full (0 B are free; it goes on by itself with 8.0 MiB)"
        await page.until(f"{table('transfers')}[0][1] === {waiting!r}")
        assert await page.evaluate("document.querySelector('#transfers td.bad').textContent") == waiting
        assert (await page.evaluate(TILES))["Fetches under way"][1].startswith("1 disk full, ")
        assert (await page.evaluate(text("state"))).startswith("The disk is full: 0 B are free.")
        await page.until(f"{table('transfers')}[0][1].startsWith({waiting + ', for 1'!r})")
        assert page.complaints == []


async def test_the_policy_of_the_page_lets_no_foreign_script_run(town: Town, tmp_path: Path) -> None:
    """Even if a name were put in as HTML, nothing of it would run."""
    async with page_of(town, tmp_path) as (_, page):
        await page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {EVIL!r})")
        await page.until("document.querySelectorAll('body > img').length === 1")
        await page.until("document.querySelector('body > img').complete")
        assert await page.evaluate("document.title") == "p2pkv node"
        assert any("Content Security Policy" in complaint for complaint in page.complaints)


async def test_it_is_light_and_dark(town: Town, tmp_path: Path) -> None:
    """``P2PKV_SCREENSHOTS`` names a folder that the pictures are kept in."""
    keep = os.environ.get("P2PKV_SCREENSHOTS")
    background = "getComputedStyle(document.body).backgroundColor"
    seen: dict[str, tuple[bytes, str]] = {}
    async with page_of(town, tmp_path, rate=(1536 if keep is None else 256) * KIB) as (found, page):
        points = "document.querySelector('.chart polyline').getAttribute('points').split(' ').length"
        await page.until(f"{points} > 1")
        if keep is not None:  # something to see
            await found.prompt(list(range(1024)), loading_s=0.2, tokens_per_s=300)
            found.fetch({"manifest": str(found.big.cid)})
            consumer = await town.start("consumer")
            found.background(consumer.client.fetch, found.big.cid)
            for number in range(16):
                await found.prompt(BOOK[: 1103 - 100 * (number % 5)], loading_s=0.1 + 0.1 * (number % 4))
                await trio.sleep(2)
        for scheme in ("light", "dark"):
            path = tmp_path / f"status-page-{scheme}.png"
            seen[scheme] = (await page.screenshot(path, scheme=scheme), await page.evaluate(background))
            if keep is not None:
                shutil.copy(path, keep)
        assert page.complaints == []
    assert seen["light"][1] != seen["dark"][1]
    assert all(png.startswith(b"\x89PNG") for png, _ in seen.values())
