"""Headless Chromium for tests, driven over its own debugging protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S: Final = 40.0
_MAX_MESSAGE_BYTES: Final = 2**26  # a screenshot
_OPTIONS: Final = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


def find_chromium() -> str | None:
    """Return the program, ``None`` where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="needs Chromium: `apt-get install chromium fonts-dejavu-core`, then `make test-browser`"
)


class Page:
    """One tab. ``complaints`` are what its console and security policy said, ``requests`` the URLs that it asked for."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection
        self._number = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the debugging protocol."""
        self._number += 1
        await self._connection.send_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await self._connection.get_message())
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until JavaScript in the page is true."""
        with trio.fail_after(DEADLINE_S):
            while not await self.evaluate(expression):  # noqa: ASYNC110 - the page sets no trio event
                await trio.sleep(0.05)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def screenshot(self, path: Path, *, scheme: str) -> bytes:
        """Write the whole page as PNG, in the colour scheme ``light`` or ``dark``, and return its bytes."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        data = base64.b64decode(answer["data"])
        await trio.Path(path).write_bytes(data)
        return data

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(str(parameters["entry"]["text"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(str(parameters["request"]["url"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))


@asynccontextmanager
async def open_page(profile: Path, url: str, *, width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """Open ``url`` in a new browser whose profile is the folder ``profile``."""
    options = [*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "--remote-debugging-port=0"]
    program = find_chromium()
    assert program is not None, "tests that open a page are marked with needs_chromium"
    command = [program, *options, "about:blank"]
    quiet = partial(trio.run_process, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(quiet, command)
        endpoint = await _debugging_url(trio.Path(profile) / "DevToolsActivePort")
        async with open_websocket_url(endpoint, max_message_size=_MAX_MESSAGE_BYTES) as connection:
            target = (await Page(connection).call("Target.createTarget", url="about:blank"))["targetId"]
        tab = f"{endpoint.partition('/devtools/')[0]}/devtools/page/{target}"
        async with open_websocket_url(tab, max_message_size=_MAX_MESSAGE_BYTES) as connection:
            page = Page(connection)
            await page.open(url)
            yield page
        nursery.cancel_scope.cancel()  # ends the browser


async def _debugging_url(file: trio.Path) -> str:
    with trio.fail_after(DEADLINE_S):
        while True:
            lines = (await file.read_text()).split() if await file.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await trio.sleep(0.02)
