"""Progress output for the user, and the effect of signals."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offload.amounts import Amount, Tally, clock
from offload.app.config.sections import TrainSection
from offload.app.telemetry.metrics import MetricsLog
from offload.app.telemetry.progress import LINE_S, PlainProgress, make_progress
from offload.app.training.interrupts import StopSignals
from offload.app.training.progress import RunProgress
from offload.distributed.joining import open_comm
from offload.engine.methods.result import StepResult

STEP = {
    "step": 1,
    "loss": 2.5,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.6,
    "peak_device_bytes": 6 * 2**20,
    "peak_host_bytes": 2**30,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_every_few_steps_without_control_characters() -> None:
    stream = io.StringIO()
    progress = make_progress(10, stream)
    for step in range(1, 26):
        progress.step({**STEP, "step": step}, num_steps=25, eta_s=75.0)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for part in ("loss 2.5000", "lr 1.00e-03", "12,346 tok/s", "device 6 MiB", "host 1 GiB", "eta 1:15"):
        assert part in lines[0]
    assert all(character.isprintable() for line in lines for character in line)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the displays, in seconds, in a list of one. No thread of theirs prints."""
    now = [0.0]
    monkeypatch.setattr("offload.app.telemetry.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("offload.app.telemetry.progress._LOOK_S", 1e6)
    return now


def test_long_work_has_a_line_after_ten_seconds_and_then_every_thirty(now: list[float]) -> None:
    stream, tally = io.StringIO(), Tally(6 * 2**30)
    progress = PlainProgress(10, stream)
    progress.show_activity("reading the weights", tally)
    for _ in range(45):
        now[0] += 1
        tally.add(2**26)
        progress.say_due()
    progress.show_activity("recording the model", lambda: Amount(2**30, place="forward layers.3, unit 5 of 9"))
    now[0] += 10
    progress.say_due()
    progress.step(STEP, num_steps=25, eta_s=None)
    progress.show_activity("evaluating", Tally(40, "rows"))  # after the first step, short work has no line
    now[0] += 9
    progress.say_due()
    progress.begin_step(2, Amount)
    now[0] += 20
    progress.say_due()
    progress.begin_step(3, Amount)  # no step is long, but the last line is
    now[0] += 1
    progress.say_due()
    progress.close()
    progress.say_due()
    assert [line for line in stream.getvalue().splitlines() if not line.startswith("step 1/25")] == [
        "reading the weights ... (after 0:00)",
        "reading the weights ... 640 MiB of 6 GiB, 64 MiB/s, 1:26 left (after 0:10)",
        "reading the weights ... 2.5 GiB of 6 GiB, 64 MiB/s, 0:56 left (after 0:40)",
        "recording the model ... (after 0:45)",
        "recording the model ... forward layers.3, unit 5 of 9, 1 GiB so far (after 0:55)",
        "step 3 ... (after 1:25)",
    ]


def test_the_lines_of_long_work_come_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    for name in ("_LOOK_S", "FIRST_LINE_S", "LINE_S"):
        monkeypatch.setattr(f"offload.app.telemetry.progress.{name}", 0.0)
    progress = make_progress(10, stream)
    progress.show_activity("reading the weights")
    while stream.getvalue().count("reading the weights") < 3:
        time.sleep(0.001)
    progress.close()


def test_a_terminal_shows_the_amount_at_each_redraw(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream, tally = Terminal(), Tally(8, "rows")
    progress = make_progress(1, stream)
    progress.step(STEP, num_steps=25, eta_s=None)
    progress.say("[data] 100%")  # markup in messages is not interpreted
    progress.show_activity("evaluating [all]", tally)
    tally.add(2)
    now[0] += 4.0
    progress._live.refresh()  # type: ignore[attr-defined]
    progress.close()
    assert "[data] 100%" in stream.getvalue()
    assert "evaluating [all]: 0 of 8 rows" in stream.getvalue()
    assert "evaluating [all]: 2 of 8 rows, 0.5 rows/s, 0:12 left" in stream.getvalue()


def test_slow_steps_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, LINE_S / 2)
    monkeypatch.setattr("offload.app.telemetry.progress.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    progress = make_progress(10**6, stream)
    for step in range(5, 10):  # a resumed run
        progress.step({**STEP, "step": step}, num_steps=25, eta_s=None)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["5/25", "7/25", "9/25"]


def test_the_end_is_estimated_without_the_trials_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("offload.app.training.progress.time.monotonic", lambda: now[0])
    progress = RunProgress(None, TrainSection(steps=5))
    for step_s, own_s in ((62.0, 2.0), (2.0, 2.0)):
        now[0] += step_s
        fields = {"step_seconds": step_s, "loss": 1.0, "tokens_seen": 1}
        progress.count_step(fields, cast("StepResult", SimpleNamespace(seconds=own_s, coarse=False, skipped=False)))
        assert progress.eta_s == 2.0 * (5 - progress.num_done)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_encoding_without_the_letters_gets_escapes(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    progress = make_progress(1, stream)
    progress.say("sample: 三 \ud83d")
    progress.close()
    stream.flush()
    assert b"sample: \\u4e09 \\ud83d\n" in stream.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_lines_fit_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = make_progress(1, stream)
    fields = {**STEP, "step": 399, "tokens_per_second": 11714.0, "grad_norm": 0.50612, "peak_host_bytes": 17.1 * 2**20}
    progress.step(fields, num_steps=400, eta_s=3900.0)
    progress.close()
    controls = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
    lines = [controls.sub("", line).rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= columns
    said = [line for line in lines if line.startswith("step 399/400  loss 2.5000")]
    assert said
    assert ("grad 0.506  11,714 tok/s" in said[0]) == (columns >= 80)
    assert ("host 17.1 MiB" in said[0]) == (columns >= 120)
    assert not [line for line in lines if "…" in line]


def test_lines_of_a_run_break_at_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path stays whole, so it can be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    text = f"data: text of builtin:stdlib (608 files): {'/folder' * 8}: 608 documents, 3,311,849 tokens, 99.6%"
    progress = make_progress(1, stream)
    progress.say(text)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) > 2
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(len(line.rstrip()) <= 40 or " " not in line.strip() for line in lines), lines


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_metrics_are_json_even_when_numbers_are_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lanes": {"h2d": {"busy_seconds": math.nan}}})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # written before the file is closed
    log.close()
    assert "NaN" not in lines[0]
    assert json.loads(lines[0]) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lanes": {"h2d": {"busy_seconds": None}},
    }


def test_the_last_line_of_metrics_is_amended(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.amend({"eval_loss": 0.0})  # no line yet
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    log.write({"step": 1})
    log.write({"step": 2, "lanes": {}})
    log.amend({"eval_loss": 1.5})
    log.write({"step": 3})
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2, "lanes": {}, "eval_loss": 1.5}, {"step": 3}]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_leaves(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with StopSignals(said.append) as stop:
        assert signal.getsignal(number) != before
        with pytest.raises(KeyboardInterrupt):  # nothing to save yet
            signal.raise_signal(number)
        stop.begin()
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert stop.name == number.name in said[0]
        signal.raise_signal(signal.SIGHUP)  # a terminal and the shell in it both send one
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM if number == signal.SIGHUP else number)
    assert signal.getsignal(number) == before


def test_a_stop_says_where_the_step_is() -> None:
    """A first step takes minutes with a large model."""
    said: list[str] = []
    with StopSignals(said.append) as stop:
        stop.begin(lambda: Amount(place="forward layers.3, unit 5 of 9"))
        signal.raise_signal(signal.SIGINT)
    assert said == [
        "SIGINT: finishing this step (forward layers.3, unit 5 of 9), then saving; once more to leave at once."
    ]


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(pytest.fail) as stop:
            stop.begin()
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_within_a_print_asks_as_any_other() -> None:
    """The handler cannot print during a print. The line is printed when the ranks agree on the stop."""
    written: list[str] = []

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            written.append(bytes(data).decode())
            if len(written) == 1:
                signal.raise_signal(signal.SIGTERM)
            return len(data)

    progress = make_progress(1, io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    with StopSignals(progress.say) as stop:
        stop.begin()
        progress.say("step 10")
        assert stop.requested
        assert "".join(written) == "step 10\n"
        with open_comm() as comm:
            assert stop.is_agreed(comm)
    assert written[1:] == ["SIGTERM (rank 0): saving; once more to leave at once.\n"]


def test_a_wish_to_save_within_a_print_is_announced_before_the_save() -> None:
    said: list[str] = []

    def say(text: str) -> None:
        if not said:
            said.append("")
            raise RuntimeError("reentrant call")
        said.append(text)

    with StopSignals(say) as stop:
        stop.begin()
        signal.raise_signal(signal.SIGUSR1)
        assert stop.take_save()
        assert not stop.take_save()
    assert said[1:] == ["SIGUSR1: saving after this step."]


def test_two_signals_of_a_launcher_that_come_one_within_the_other_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed launcher sends a rank one signal per thread.

    The second signal can arrive before the first handler has recorded anything.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    clock, coming = time.monotonic, [signal.SIGTERM]

    def monotonic() -> float:
        if coming:
            signal.raise_signal(coming.pop())
        return clock()

    with StopSignals(lambda text: None) as stop:
        stop.begin()
        monkeypatch.setattr("offload.app.training.interrupts.time.monotonic", monotonic)
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("the second of them was taken for a wish to leave at once")
        monkeypatch.undo()
        assert stop.requested


def test_a_rank_says_nothing_of_a_sigterm_before_the_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends SIGTERM to the other ranks after a lost rank, perhaps before they notice the loss."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    said: list[str] = []
    with StopSignals(said.append) as stop:
        stop.begin()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        assert not said
        with open_comm() as comm:
            assert stop.is_agreed(comm)
    assert said == ["SIGTERM (rank 0): saving; once more to leave at once."]


def test_on_the_way_out_signals_are_ignored() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals(said.append) as stop:
            stop.ignore()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # until the process ends
        assert not stop.requested
        assert not said
    finally:
        signal.signal(signal.SIGTERM, before)
