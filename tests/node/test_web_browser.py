"""The status page in headless Chromium: what it shows of a node under load, that names stay text, and its two looks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import trio

from p2pkv.store.home import HomeLayout
from p2pkv.units import KIB
from tests.node.conftest import events_of
from tests.support.artifacts import Sample, make_sample, model
from tests.support.browser import Page, needs_chromium, open_page
from tests.support.town import Daemon, Town

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(180)]

TILES = (
    "[...document.querySelectorAll('#tiles > div')].map(tile => [...tile.children].slice(0, 2).map(part => part.textContent))"
)
EVIL = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>\N{RIGHT-TO-LEFT OVERRIDE}evil"""


def sample_of(name: str, start: int, tokens: int, layers: int) -> Sample:
    description = model(name, layers=layers, model_id=start.to_bytes(32, "big"))
    return make_sample(range(start, start + tokens), description=description, created=int(time.time()))


@asynccontextmanager
async def under_load(town: Town) -> AsyncIterator[Daemon]:
    """A daemon that has some artifacts, one of them pinned, and is fetching another from a slow provider."""
    provider = await town.start("provider", upload_limit=128 * KIB)
    whole, big = sample_of("SmolLM2-135M", 3000, 1100, 8), sample_of("Qwen3-0.6B", 9000, 8192, 20)
    for sample in (whole, big):
        await provider.plant(sample.artifact, sample.blocks)
    daemon = await town.start("daemon", web="127.0.0.1:0")
    evil = sample_of(EVIL, 40, 600, 2)
    await daemon.plant(evil.artifact, evil.blocks, [0, 1])
    daemon.node.store.holds.pin("<b>kept</b>", evil.cid)
    transport = httpx.AsyncHTTPTransport(uds=str(HomeLayout(daemon.home).control_socket))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://p2pkv", timeout=60) as http,
        trio.open_nursery() as nursery,
    ):
        await events_of(http, {"manifest": str(whole.cid)})
        description = model(layers=8, model_id=(3000).to_bytes(32, "big"))
        prompt = {"model_id": description.model_id.hex(), "dtype": "bf16", "token_ids": [*range(3000, 4100), 1, 2, 3]}
        await events_of(http, prompt)

        async def fetch_slowly() -> None:
            with suppress(httpx.RemoteProtocolError):  # cut off by the end of the daemon
                await events_of(http, {"manifest": str(big.cid)})

        nursery.start_soon(fetch_slowly)
        yield daemon
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def page_of(town: Town, folder: Path) -> AsyncIterator[tuple[Daemon, Page]]:
    async with under_load(town) as daemon:
        assert daemon.node.web_url is not None
        async with open_page(folder / "profile", daemon.node.web_url, height=1200) as page:
            await page.until("document.querySelector('#state').dataset.state === 'ready'")
            yield daemon, page


def table(name: str) -> str:
    return f"[...document.querySelectorAll('#{name} tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"


async def test_the_page_shows_the_node_and_names_stay_text(town: Town, tmp_path: Path) -> None:
    async with page_of(town, tmp_path) as (daemon, page):
        await page.until("document.querySelectorAll('#transfers progress').length === 1")
        await page.until(f"{table('transfers')}[0][0].startsWith('Qwen3-0.6B')")
        (transfer,) = await page.evaluate(table("transfers"))
        assert transfer[1].startswith("transferring blocks: waiting for ")
        artifacts = {row[0]: row for row in await page.evaluate(table("artifacts"))}
        assert artifacts.keys() == {EVIL, "SmolLM2-135M"}  # to the letter: as text
        assert artifacts[EVIL][2:5] == ["600", "2 of 3", "<b>kept</b>"]
        assert artifacts["SmolLM2-135M"][3] == "5 of 5"
        assert await page.evaluate("document.querySelectorAll('img, main script, td b').length") == 0
        assert await page.evaluate("document.title") == "p2pkv node"
        peers = {row[0]: row for row in await page.evaluate(table("peers"))}
        assert len(peers) == 2
        assert {row[1] for row in peers.values()} == {"connected"}
        tiles = dict(await page.evaluate(TILES))
        assert tiles["Hit ratio"] == "99.7 %"
        assert tiles["Verification failures"] == "0"
        # A second sample, so that there is a rate to draw.
        await page.until("document.querySelector('.chart polyline').getAttribute('points').split(' ').length > 1")
        assert page.complaints == []
        await daemon.stop()
        await page.until("document.querySelector('#state').textContent === 'the node does not answer'")


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
    background = "getComputedStyle(document.body).backgroundColor"
    seen: dict[str, tuple[bytes, str]] = {}
    async with page_of(town, tmp_path) as (_, page):
        points = "document.querySelector('.chart polyline').getAttribute('points').split(' ').length"
        await page.until(f"{points} > {8 if 'P2PKV_SCREENSHOTS' in os.environ else 1}")
        for scheme in ("light", "dark"):
            path = tmp_path / f"status-page-{scheme}.png"
            seen[scheme] = (await page.screenshot(path, scheme=scheme), await page.evaluate(background))
            if "P2PKV_SCREENSHOTS" in os.environ:
                shutil.copy(path, os.environ["P2PKV_SCREENSHOTS"])
        assert page.complaints == []
    assert seen["light"][1] != seen["dark"][1]
    assert all(png.startswith(b"\x89PNG") for png, _ in seen.values())
