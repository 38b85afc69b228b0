"""Blocks in `offload.bench step` include the cost of work left after a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload import Engine, bench
from offload.errors import ConfigError
from offload.extras.tools.benches import step
from offload.extras.tools.benches.blocks import Contender, do_nothing, measure, rotate, summarise
from offload.native import kernels
from tests.disks import nameless

SEEN_S, HIDDEN_S, PLAIN_S, HIDDEN_BYTES = 1.0, 9.0, 10.0, 90


class Machine:
    """Machine with work as clock. Leftover work continues during any computation or wait, and costs this caller
    time.
    """

    def __init__(self) -> None:
        self.now_s, self.written_bytes = 100.0, 0
        self.num_left = 0

    def compute(self, seconds: float) -> None:
        self.wait()
        self.now_s += seconds

    def wait(self) -> None:
        self.now_s += HIDDEN_S * self.num_left
        self.written_bytes += HIDDEN_BYTES * self.num_left
        self.num_left = 0


def test_hidden_work_is_seen() -> None:
    """Two contenders with equal work. One works in a thread after the step returns."""

    machine = Machine()

    def hide(_batch: object) -> None:
        machine.now_s += SEEN_S
        machine.num_left += 1

    made = [
        Contender("plain", lambda batch: machine.compute(PLAIN_S), do_nothing),
        Contender("hiding", hide, machine.wait, "plain"),
    ]
    disk = lambda: {"disk_write_bytes": machine.written_bytes}  # noqa: E731
    measure(made, ["a", "b"], 3, 5, clock=lambda: machine.now_s, disk=disk)
    found = {result.name: result.fields() for result in summarise(made, 3, 20, {"group": "test"})}
    plain, hiding = found["plain (test)"], found["hiding (test)"]
    assert plain["value"] == pytest.approx(1e3 * PLAIN_S)
    assert hiding["value"] == pytest.approx(1e3 * (SEEN_S + HIDDEN_S))
    assert (hiding["ratio"], hiding["slowdown"]) == (pytest.approx(1), pytest.approx(1))
    assert hiding["left_ms"] == pytest.approx(3e3 * HIDDEN_S)
    assert (plain["disk_write_bytes"], hiding["disk_write_bytes"]) == (0, HIDDEN_BYTES)
    assert (plain["tokens_per_second"], hiding["pairs"]) == (pytest.approx(20 / PLAIN_S), 5)


def test_the_order_of_blocks() -> None:
    done: list[str] = []

    def made(name: str) -> Contender:
        return Contender(name, lambda batch: done.append(f"{name}{batch}"), lambda: done.append(name))

    measure([made("x"), made("y")], [0, 1], 3, 2, clock=iter(range(99)).__next__, disk=dict)
    warm = ["x", "x0", "x1", "x0", "x1", "x", "y", "y0", "y1", "y0", "y1", "y"]
    x, y = ["x", "x0", "x1", "x0", "x"], ["y", "y0", "y1", "y0", "y"]
    assert done == [*warm, *x, *y, *y, *x]
    assert [rotate("abc", number) for number in (1, 5)] == [["b", "c", "a"], ["c", "a", "b"]]


def test_ratios_are_of_the_same_round() -> None:
    """The machine slows down by half every round. In each round one contender is twice as fast."""
    made = [Contender("slow", print, do_nothing), Contender("fast", print, do_nothing, "slow")]
    seconds = [[4.0, 8.0, 16.0], [2.0, 4.0, 8.0]]
    ticks = []
    for number in range(3):
        for which in rotate([0, 1], number):
            ticks += [0.0, 0.0, seconds[which][number]]
    measure(made, [""], 1, 3, clock=iter([0.0] * 6 + ticks).__next__, disk=dict)
    fast = summarise(made, 1, 1, {"group": ""})[1]
    assert (fast.ratio, fast.value) == (2.0, 4000.0)
    assert {fast.details[f"slowdown{which}"] for which in ("", "_lower_quartile", "_upper_quartile")} == {0.5}


# -- wiring --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads(), kernels.num_threads()
    yield
    torch.set_num_threads(before[0])
    kernels.set_threads(before[1])


SMALL = [f"--{name}={value}" for name, value in {"hidden": 64, "layers": 1, "vocabulary": 64, "sequence": 8}.items()]


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_kept")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[Engine] = []
    finish = Engine.finish
    monkeypatch.setattr(Engine, "finish", lambda engine: (finish(engine), finished.append(engine)))
    words = ["step", *SMALL, "--batch=2", "--precision=bf16", "--recompute=never", "--steps=2", "--pairs=3"]
    words += ["--threads=1", "--no-deepspeed", "--nvme-dir", str(tmp_path)]
    found = {result.name: result for result in step.run(bench._parser().parse_args(words))}
    group = "(bf16, recompute never)"
    names = [f"engine{more}" for more in ("", ", all units stay", ", states on nvme")]
    assert list(found) == [f"{name} {group}" for name in ("plain PyTorch", *names)]
    assert len(set(finished)) == 3
    assert all(finished.count(engine) == 2 * (1 + 3) for engine in finished), "before and after every block"
    assert all(engine.closed for engine in finished)
    for name in names:
        row = found[f"{name} {group}"].fields()
        assert row["reference"] == "plain PyTorch"
        assert (row["slowdown"] > 0, row["pairs"], row["steps_in_a_block"]) == (True, 3, 2)
        # the backward reads weights again, unless the update ring still has them
        assert (row["nvme_read_bytes"] >= row["nvme_write_bytes"] > 0) == ("nvme" in name)
        assert row["d2h_bytes"] > 0
        assert row["peak_device_bytes"] > 0
    assert not list(tmp_path.iterdir())
    assert not nameless(tmp_path)


@pytest.mark.usefixtures("_threads_kept")
def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = bench._parser().parse_args(["step", "--batch", "3", "--precision", "fp32", "--recompute", "never"])
    monkeypatch.setattr(step, "_contenders", lambda *given: iter(()))
    assert step.run(arguments) == []
    assert [getattr(arguments, name) for name in step.SIZES] == [512, 8, 8192, 256, 3]


@pytest.mark.parametrize("word", ["--steps=0", "--pairs=-1"])
def test_wrong_options(word: str) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        step.run(bench._parser().parse_args(["step", word]))
