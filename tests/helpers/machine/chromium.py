"""A real headless Chromium for tests: Debian's package, which is installed where it is missing."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from helpers.machine.debian import install
from helpers.suite.real_parts import used

PATIENCE = 120.0  # the longest wait, in seconds, for the start and for a page's next state
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *("--remote-debugging-port=0", "--hide-scrollbars", "about:blank"),
)


class Page:
    """The one page of a browser. `console`: its console messages, errors and violated policies so far.

    `requests`: the URLs of all requests, except for files and data.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, loop: asyncio.AbstractEventLoop) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._socket, self._loop, self._number = socket, loop, itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the Chrome DevTools Protocol. Raises AssertionError if it fails."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), PATIENCE))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._number)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)
        raise AssertionError(f"{method}: the browser has gone")

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif event["method"] == "Log.entryAdded":
            self.console.append(values["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(value.get("value")) for value in values["args"]))
        elif event["method"] == "Network.requestWillBeSent":
            url = values["request"]["url"]
            if not url.startswith(("file:", "data:", "about:", "blob:")):
                self.requests.append(url)

    def look(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, what: str) -> Any:
        """Wait until the expression is true; returns its value."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.look(expression)):
            assert time.monotonic() < deadline, (
                f"{what}: not in {PATIENCE:.0f} s; the page said {self.console}"
            )
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        """Open the report at `url` and wait until it is shown."""
        self.console.clear()
        self.requests.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.open", f"{url} is shown")

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        mobile = width < 800
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path) -> None:
        """Write a screenshot of the viewport."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def browser(base: Path) -> Iterator[Page]:
    """A page in a browser whose profile is in `base`."""
    install(["chromium"], ["chromium", "fonts-dejavu-core"])
    log = (base / "chromium.log").open("w")
    environment = {**os.environ, "HOME": str(base), "LC_ALL": "C.UTF-8"}
    command = ["chromium", *OPTIONS[:-1], f"--user-data-dir={base / 'profile'}", OPTIONS[-1]]
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    loop = asyncio.new_event_loop()
    session: aiohttp.ClientSession | None = None
    try:
        port = _port(base / "profile" / "DevToolsActivePort", process, base / "chromium.log")
        session = loop.run_until_complete(_session())
        page = Page(loop.run_until_complete(_connect(session, port)), loop)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.screen(1280, 900)
        used("Chromium")
        yield page
    finally:
        if session is not None:
            loop.run_until_complete(session.close())
        loop.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(trust_env=False)


async def _connect(session: aiohttp.ClientSession, port: int) -> aiohttp.ClientWebSocketResponse:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        [target] = [page for page in await answer.json() if page["type"] == "page"]
    return await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)


def _port(file: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not (file.exists() and (lines := file.read_text().split())):
        assert process.poll() is None, f"chromium ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"chromium has no port after {PATIENCE:.0f} s"
        time.sleep(0.05)
    return int(lines[0])
