"""Output whose reader goes away, whose disk is full, or that never existed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from offload import generate
from offload.app.telemetry.lasting_output import is_unread, lasting_output
from offload.app.telemetry.progress import make_progress
from tests import forks


def closed_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def closed_terminal() -> TextIO:
    controller, terminal = os.openpty()
    stream = os.fdopen(terminal, "w", buffering=1)
    os.close(controller)
    return stream


def full_disk() -> TextIO:
    return Path("/dev/full").open("w", buffering=1)


@pytest.mark.parametrize("make", [closed_pipe, closed_terminal, full_disk])
def test_no_print_fails(make: Callable[[], TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    has_no_reader = make is not full_disk
    monkeypatch.setattr(sys, "stdout", stream)
    with lasting_output():
        for _ in range(3):
            print("a line", flush=True)
        progress = make_progress(1)
        progress.say("another line")
        progress.close()
        assert is_unread(sys.stdout) == has_no_reader
        if has_no_reader:
            os.write(stream.fileno(), b"of another library")
            with pytest.raises(SystemExit) as ended:  # no text is made for nobody
                generate._show("a word")
            assert ended.value.code == 0
    assert sys.stdout is stream
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    stream.close()


def test_a_terminal_that_closes_under_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = os.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(terminal, "w", buffering=1))
    with lasting_output():
        progress = make_progress(1)
        progress.show_activity("recording")
        assert os.read(controller, 1000)
        os.close(controller)
        for _ in range(3):
            progress.say("a line")
            progress.show_activity("trying")
        progress.close()
        assert is_unread(sys.stdout)
    sys.stdout.close()


def test_closed_descriptors_are_taken_so_that_no_file_gets_the_output() -> None:
    code = """
import os, sys
os.close(1)
sys.stdout = None
from offload.app.config.command_line import run_command
def main(words):
    file = os.open("/dev/null", os.O_RDONLY)
    print("dropped")
    return 0 if file > 2 else 1
run_command(main, [])
"""
    ended = forks.run(["-c", code])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
