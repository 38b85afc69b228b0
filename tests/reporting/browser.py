"""Headless Chromium over the DevTools protocol, through the pipe (descriptors 3 and 4, NUL-terminated messages)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 60
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PLACE_PIPE = (  # needs a separate process: Popen can pass descriptors, but not renumber them
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]\n"
    "os.dup2(ends[0], 3), os.dup2(ends[1], 4)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


@dataclass(frozen=True)
class Page:
    """A loaded page."""

    asked_for: list[str]
    """Requested addresses, including the page."""
    complaints: list[str]
    """Console messages, log entries and exceptions."""
    found: Any
    """The result of the script."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium process. `open` loads a file in a new tab."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into = out, into
        self._read, self._last_id = b"", 0
        self._events: list[dict[str, Any]] = []

    def open(
        self, path: Path, script: str, *, width: int, is_dark: bool = False, screenshot: Path | None = None
    ) -> Page:
        """Load a file at a width in CSS pixels, and run a script with a JSON result."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", session, features=[scheme])
        self._events.clear()
        self._call("Page.navigate", session, url=path.resolve().as_uri())
        self._await("Page.loadEventFired")
        found = self._call("Runtime.evaluate", session, expression=script, returnByValue=True)
        if screenshot is not None:
            shot = self._call("Page.captureScreenshot", session, captureBeyondViewport=True)
            screenshot.write_bytes(base64.b64decode(shot["data"]))
        self._call("Target.closeTarget", targetId=target)
        assert "exceptionDetails" not in found, found
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return Page(
            [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"],
            [json.dumps(event["params"]) for event in self._events if event["method"] in said],
            found["result"].get("value"),
        )

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        os.write(self._into, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._events.append(answer)

    def _await(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._out], [], [], PATIENCE_S)
            more = os.read(self._out, 1 << 20) if ready else b""
            assert more, "Chromium says nothing any more"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Run Chromium inside the block. `profile`: a folder for browser data."""
    its_in, our_out = os.pipe()
    our_in, its_out = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    words = [program, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _PLACE_PIPE, str(its_in), str(its_out), *words],
        pass_fds=(its_in, its_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(our_in, our_out)
    finally:
        os.close(our_out)  # Chromium ends at the end of the pipe
        os.close(our_in)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
