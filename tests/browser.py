"""A real headless Chromium, spoken to by its own debugging protocol: open a page, log in, read it, photograph it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]
_START_S = 60.0
_ANSWER_S = 60.0
_POLL_S = 0.1
Message = dict[str, Any]


def find_chromium() -> str | None:
    """The browser of this host; None when it has none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. ``login`` is what a user would type when the browser asks for a name and a password."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._loop = loop
        self._socket = socket
        self._last = 0
        self.login: tuple[str, str] | None = None
        self.asked_to_log_in = 0
        for method in ("Page.enable", "Runtime.enable"):
            self._ask(method)
        self._ask("Fetch.enable", handleAuthRequests=True)
        self.size(1440, 900)

    def size(self, width: int, height: int, *, scale: float = 1.0) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def open(self, url: str) -> None:
        """Goes to an address and waits until the page and what it loads are there."""
        self._ask("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression} failed: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        """What a user can read on the page."""
        return str(self.read("document.body.innerText"))

    def wait_for(self, expression: str, *, timeout_s: float = _ANSWER_S) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.read(f"document.body !== null && ({expression})"):  # there is none between two pages
            assert time.monotonic() < deadline, f"{expression} did not become true; the page says: {self.text[:2000]}"
            self._loop.run_until_complete(asyncio.sleep(_POLL_S))

    def wait_for_text(self, text: str, *, timeout_s: float = _ANSWER_S) -> None:
        self.wait_for(f"document.body.innerText.includes({json.dumps(text)})", timeout_s=timeout_s)

    def photograph(self, file: Path) -> None:
        """Saves what the window shows as a PNG."""
        shot = self._ask("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, **parameters: Any) -> Message:
        return self._loop.run_until_complete(asyncio.wait_for(self._exchange(method, parameters), _ANSWER_S))

    async def _exchange(self, method: str, parameters: Message) -> Message:
        number = await self._send(method, parameters)
        async for message in self._socket:
            found: Message = json.loads(message.data)
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                answer: Message = found["result"]
                return answer
            await self._attend(found)
        raise AssertionError(f"the browser ended during {method}")

    async def _send(self, method: str, parameters: Message) -> int:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        return self._last

    async def _attend(self, event: Message) -> None:
        """Lets requests pass, and types what a user would type."""
        parameters = event.get("params", {})
        if event.get("method") == "Fetch.requestPaused":
            await self._send("Fetch.continueRequest", {"requestId": parameters["requestId"]})
        elif event.get("method") == "Fetch.authRequired":
            self.asked_to_log_in += 1
            answer: Message = {"response": "CancelAuth"}
            if self.login is not None:
                answer = {"response": "ProvideCredentials", "username": self.login[0], "password": self.login[1]}
            reply = {"requestId": parameters["requestId"], "authChallengeResponse": answer}
            await self._send("Fetch.continueWithAuth", reply)


@contextlib.contextmanager
def browsing(executable: str) -> Iterator[Page]:
    """A browser of its own with an empty profile, for the length of a ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="batchmill-chromium-", ignore_cleanup_errors=True) as profile:
        command = [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with (Path(profile) / "output.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        loop = asyncio.new_event_loop()
        try:
            port = _port(Path(profile), process)
            session, socket = loop.run_until_complete(_connect(port))
            try:
                yield Page(loop, socket)
            finally:
                loop.run_until_complete(socket.close())
                loop.run_until_complete(session.close())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            loop.close()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Where the browser listens; it says so in a file."""
    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + _START_S
    while not file.exists() or not file.read_text().strip():
        said = (profile / "output.log").read_text(errors="replace")[-2000:]
        assert process.poll() is None, f"the browser ended at its start: {said}"
        assert time.monotonic() < deadline, f"the browser does not start: {said}"
        time.sleep(_POLL_S)
    return int(file.read_text().split()[0])


async def _connect(port: int) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
        tabs = await response.json(content_type=None)
    address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    return session, await session.ws_connect(address, max_msg_size=0)
