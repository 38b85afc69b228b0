"""One rank of a test: python -m tests.training.ranks_child WAY WORDS runs `offload.train WORDS`, in which something
happens to one of the ranks at the third step, or at the start.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from offload.config.command_line import run_command
from offload.errors import ConfigError

AT = 2  # the step, from 0


def happen(way: str, rank: int) -> None:
    """Put the accident of this `way` in its place."""
    from offload.data.dataset import Dataset
    from offload.engine.engine import Engine
    from offload.training import build as run

    make_batch, make_step, build = Dataset.batch, Engine.step, run.build_data
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
            if way == "warns":
                warn("all ranks see this")
                if rank == 1:
                    warn("rank 1 sees this")
        return make_step(self, *args)

    def build_data(*args: Any) -> Any:
        if way == "no data" and rank == 0:
            raise ConfigError("the data are gone")
        if way == "counts":
            print(f"rank {rank} makes the data", flush=True)
        return build(*args)

    Dataset.batch, Engine.step, run.build_data = batch, step, build_data  # type: ignore[method-assign]


def warn(text: str) -> None:
    """Warn as a module of ours does."""
    warnings.warn_explicit(text, UserWarning, "offload/somewhere.py", 1, module="offload.somewhere")


def main(words: list[str]) -> int:
    from offload.train import main as train

    if words[0] != "plain":
        happen(words[0], int(os.environ["RANK"]))
    return train(words[1:])


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
