"""Standard output and error that outlive their reader: no failed print ends a run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

_NO_READER = (errno.EPIPE, errno.EIO)  # the other end of a pipe is closed; the terminal is closed


class LastingStream:
    """A text stream that drops the text it cannot write.

    If nobody reads any more, the file descriptor leads to os.devnull from then on, also for other libraries and for
    processes started later. After other errors, such as a full disk, the next text is tried again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_unread = False
        """True after the reader has gone."""

    def write(self, text: str) -> int:
        """Write or drop the text. Returns the length."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._note(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        if error.errno not in _NO_READER:
            return
        self.is_unread = True
        with suppress(OSError, ValueError):  # a stream without a descriptor
            _lead_to_null(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_output_last() -> None:
    """Make `sys.stdout` and `sys.stderr` lasting, up to the end of the process."""
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` lasting in this context."""
    before = sys.stdout, sys.stderr
    make_output_last()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def is_unread(stream: TextIO) -> bool:
    """Tell whether a lasting stream has lost its reader."""
    return bool(getattr(stream, "is_unread", False))


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return the stream as a lasting one. None, a descriptor closed at the start: os.devnull.

    The descriptor is taken, because the next opened file would get it, and with it all text of other libraries.
    """
    if isinstance(cast("object", stream), LastingStream):  # made by the command already
        return cast("TextIO", stream)
    if stream is None:
        _lead_to_null(descriptor)
        stream = os.fdopen(descriptor, "w", closefd=False)
    return cast("TextIO", LastingStream(stream))


def _lead_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:  # `open` may return the closed descriptor itself
        os.dup2(null, descriptor)
        os.close(null)
