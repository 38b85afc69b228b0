"""Entry point `python -m offload`, or `offload` after installation. Each command is a separate module."""

from __future__ import annotations

import importlib
import types
import typing

from offload.app.config.command_line import run_command
from offload.errors import ConfigError, nearest, shorten

COMMANDS = {
    "train": "train a model whose states do not fit the device",
    "data": "show the training data of a run: sources, lengths, rows with the trained tokens marked",
    "report": "write a page about a run: curves, the time within a step, memory, settings to change",
    "plan": "predict memory and step time of a run, on this machine or one from a description",
    "init": "write a configuration file for a run that fits, on this machine or one from a description",
    "export": "write a checkpoint as a Hugging Face folder",
    "generate": "continue a text with a model that may be larger than memory",
    "verify": "check checkpoints and Hugging Face folders for damage",
    "parity": "check that offloaded training equals training in plain PyTorch, on your own model",
    "doctor": "show this machine's hardware and libraries, and the kernels and I/O engine in use",
    "replay": "rebuild the final weights of a run without gradients from its log",
    "bench": "measure offload on this machine against hardware limits and other libraries",
}

GREETING = """\
offload trains a Hugging Face model that does not fit the device, as if it did.

  offload train                      a small model on real text: two minutes, nothing to download
  offload plan --model.preset 8b     memory and step time, before the run
  offload init --model.path FOLDER --data.source 'notes/*.txt'     a configuration file that fits this machine
  offload train --model.path FOLDER --data.source 'notes/*.txt'     your own model and text
  offload data --data.source 'notes/*.txt'     the training data, to look at first
  offload report RUN                 a page about a run and its steps
  offload doctor                     hardware and libraries of this machine

All commands; python -m offload.COMMAND is the same:
"""


def main(words: list[str]) -> int | None:
    if not words or words[0] in ("--help", "-h"):
        print(GREETING)
        print("\n".join(f"  {name:9} {summary}" for name, summary in COMMANDS.items()))
        print("\noffload COMMAND --help describes a command; offload --version shows the version.")
        return 0
    name = words[0]
    if name not in COMMANDS:
        raise ConfigError(
            f"unknown command {shorten(name)!r}{nearest(name, COMMANDS)}; the commands are {', '.join(COMMANDS)}."
        )
    return typing.cast("int | None", module_of(name).main(words[1:]))


def module_of(name: str) -> types.ModuleType:
    """Return the module for a command; `main` in the module takes the remaining words."""
    return importlib.import_module(f"offload.{name}")


def run() -> typing.NoReturn:
    """Run a command with the process arguments."""
    run_command(main)


if __name__ == "__main__":
    run()
