"""Headless Chromium, driven over a pipe with the DevTools protocol: one start for all forms of a page."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
         "--remote-debugging-pipe")  # fmt: skip


class Browser:
    """A page in Chromium.

    Args:
        profile: an empty folder for its files.
    """

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4: copies above those are moved there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        actions = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends, start=3)]
        actions += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions)
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")
        self.call("Runtime.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and wait for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load a file in a window of a width, light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, script: str) -> Any:
        """Evaluate JavaScript in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"]["value"]

    def print(self) -> bytes:
        """Print the page, as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def screenshot(self) -> bytes:
        """Return an image of the whole page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def close(self) -> None:
        """End the browser."""
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._read)
        os.close(self._write)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found
