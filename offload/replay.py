"""`python -m offload.replay`: recompute final weights for a gradient-free run, from initial weights and log."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from offload.app.config.command_line import parse_options, run_command, say
from offload.errors import ConfigError, counted, unless_no_folder

DESCRIPTION = (
    "Make the steps of a run with --optimizer.name mezo again, bit for bit, without its data and without a pass: from "
    "the weights that it began with and the numbers in its metrics.jsonl. The result is a Hugging Face folder, or an "
    "adapter's. Exit codes: 0 fine, 1 failed or damaged, 2 bad arguments, 3 does not fit."
)


@dataclasses.dataclass
class Options:
    base: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="BASE_FOLDER")]
    """the initial model, or one of the run's checkpoints"""
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the run folder, with config.yaml, metrics.jsonl"""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """a new or empty folder; RUN/replayed unless set"""
    dtype: Annotated[Literal["auto", "bf16", "fp32"], tyro.conf.arg(metavar="{auto,bf16,fp32}")] = "auto"
    """weight dtype: auto is the training dtype, fp32 writes the master weights"""
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show tracebacks"""


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.replay", description=DESCRIPTION)
    base = Path(options.base).expanduser()
    run = Path(options.run).expanduser()
    out = run / "replayed"
    if options.out:
        out = Path(options.out).expanduser()
    for folder, needs in ((base, ()), (run, ("config.yaml", "metrics.jsonl"))):
        missing = next((name for name in needs if not (folder / name).is_file()), "")
        if missing or not folder.is_dir():
            wrong = unless_no_folder(folder, f"lacks {missing}")
            raise ConfigError(f"{folder} {wrong}; give the folder that a run began with, and that of the run.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; set --out to a new or empty folder.")
    from offload.extras.zeroth.replay import replay_run  # imports torch

    num_steps = replay_run(base, run, out, options.dtype, say)
    print(f"{out}: the weights after {counted(num_steps, 'step')} of {run}.")
    return 0


if __name__ == "__main__":
    run_command(main)
