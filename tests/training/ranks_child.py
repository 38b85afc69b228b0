"""One rank of a multi-rank test.

python -m tests.training.ranks_child WAY WORDS runs `offload.train WORDS`. One rank has an accident (WAY) at the third
step or at the start.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from offload.app.config.command_line import run_command
from offload.errors import ConfigError

AT = 2  # index of the step with the accident, from 0


def happen(way: str, rank: int) -> None:
    """Patch the function in which the accident `way` happens."""
    from offload.engine.engine import Engine
    from offload.extras.data.dataset import Dataset
    from offload.extras.data.task import FileRows

    make_batch, make_step, build = Dataset.batch, Engine.step, FileRows.build
    num_steps = 0

    def batch(self: Dataset, step: int, *which: int) -> Any:
        if way == "ends" and step == AT and rank == 1:
            raise StopIteration
        if way == "breaks" and step == AT and rank == 1:
            raise OSError("the disk is gone")
        return make_batch(self, step, *which)

    def step(self: Engine, *args: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == AT + 1:
            if way == "fails" and rank == 1:
                raise RuntimeError("on purpose")
            if way == "all fail":
                raise RuntimeError("on purpose")
        return make_step(self, *args)

    def build_data(*args: Any) -> Any:
        if way == "no data" and rank == 0:
            raise ConfigError("the data are gone")
        return build(*args)

    Dataset.batch, Engine.step, FileRows.build = batch, step, staticmethod(build_data)  # type: ignore[method-assign]
    if way == "asks":
        from offload.app.training import trainer

        real = trainer.Trainer
        trainer.Trainer = lambda config: real(config, callbacks=[Asks(rank)])  # type: ignore[misc, assignment]


class Asks:
    """A callback that sets every control flag on rank 1 after step 2 and prints later events on all ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_step_end(self, _config: Any, state: Any, control: Any, **_more: Any) -> None:
        if self._rank == 1 and state.global_step == AT:
            control.should_training_stop = control.should_save = control.should_evaluate = True

    def on_evaluate(self, _config: Any, state: Any, _control: Any, *, metrics: Any, **_more: Any) -> None:
        assert metrics["eval_loss"] > 0
        print(f"rank {self._rank}: on_evaluate {state.global_step}", flush=True)

    def on_save(self, _config: Any, state: Any, _control: Any, *, checkpoint: Any, **_more: Any) -> None:
        assert checkpoint.name == f"step-{AT}"
        print(f"rank {self._rank}: on_save {state.global_step}", flush=True)

    def on_train_end(self, _config: Any, state: Any, _control: Any, *, export: Any, **_more: Any) -> None:
        assert export is not None
        print(f"rank {self._rank}: on_train_end {state.global_step}", flush=True)


def main(words: list[str]) -> int:
    from offload.train import main as train

    if words[0] != "plain":
        happen(words[0], int(os.environ["RANK"]))
    return train(words[1:])


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
