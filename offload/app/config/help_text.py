"""Help in one style for all commands: plain lines, broken between words."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator

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
    lines = [[line] if len(line) <= width else wrapped(line, width) for line in text.splitlines()]
    return "\n".join(itertools.chain.from_iterable(lines)).rstrip()


def wrapped(text: str, width: int) -> list[str]:
    """Return lines of a text that end between words. A word longer than `width` has a line of its own."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
