"""Help in one style for all commands: plain lines, broken between words."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Iterator

from offload.app.telemetry.progress import fitted

_NO_DEFAULT = re.compile(r"\s*\(default:\s*(None|False|'')?\)")
"""A default that says nothing."""
_TITLE = re.compile(r"(?m)^ (\w.*)\n +-+$")
_RULER = re.compile(r"(?m)^ +-+\n")


@contextlib.contextmanager
def plain_help() -> Iterator[None]:
    """Print a help of tyro as argparse prints one: without rulers, and no line wider than the terminal."""
    shown = io.StringIO()  # without an encoding, so tyro draws no boxes
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        if text := shown.getvalue():
            print(_plain(text, shutil.get_terminal_size().columns))


def _plain(text: str, width: int) -> str:
    text = "\n".join(line.rstrip() for line in text.splitlines())
    text = _RULER.sub("", _TITLE.sub(r"\1:", _NO_DEFAULT.sub("", text)))
    return fitted(text, width).rstrip()
