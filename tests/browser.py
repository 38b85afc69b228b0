"""A browser without a screen, for tests of the site: it opens pages, types by keys and looks at them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.forks import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """A page in Chromium, driven over two pipes by the DevTools protocol: JSON messages, each ended by a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the answer to one message. Events between are dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._received:
            assert select.select([self._answers], [], [], PATIENCE_S)[0], "the browser does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser ended"
            self._received += part
        first, _, self._received = self._received.partition(b"\0")
        return json.loads(first)

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def open(self, address: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.call("Page.navigate", url=address)
        path = urlsplit(address).path  # a page may change the rest
        self.wait(f"location.pathname === {json.dumps(path)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)
        return found

    def type(self, text: str) -> None:
        """Press and release the key of each character."""
        for key in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        told = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its files in a folder, and end it. Skip the test where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed: {', '.join(NAMES)}")
    options = [f"--user-data-dir={folder}", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    # The browser reads commands at descriptor 3 and answers at 4.
    script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    words = ["bash", "-c", script, "bash", program, *options]
    started = subprocess.Popen(
        words, pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        started.kill()
        started.wait()
