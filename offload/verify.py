"""`python -m offload.verify`: check whether checkpoints and Hugging Face folders are intact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from offload.app.config.command_line import parse_options, run_command, say_nothing
from offload.errors import ConfigError, OffloadError, unless_absent

DESCRIPTION = (
    "Check a checkpoint, all of a run's checkpoints, or a Hugging Face folder. Of a checkpoint every byte is compared "
    "with its checksum; safetensors have none, so there headers, index and shapes are checked, and values for NaN. "
    "Exit codes: 0 all is whole, 1 something is damaged, 2 bad arguments or nothing of the kind there."
)


@dataclasses.dataclass
class Options:
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """RUN, RUN/checkpoints, RUN/checkpoints/step-N, or a Hugging Face folder"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object"""
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show tracebacks"""


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.verify", description=DESCRIPTION)
    path = Path(options.path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} {unless_absent(path, 'is no folder')}; give a folder to verify.")
    from offload.app.checkpoint_folder import (  # imports torch
        checkpoints_of,
        hint_of_model,
        is_checkpoint,
        verify_with_progress,
    )
    from offload.app.hf.models import quiet_transformers
    from offload.extras.tools.folder_check import verify_folder

    quiet_transformers()
    report: dict[str, Any] = {}
    show: Callable[[str], object] = print
    if options.json:  # standard output has the object alone
        show = say_nothing
    if is_checkpoint(path):
        report["checked"] = [_check(path, verify_with_progress, show)]
    elif (checkpoints := checkpoints_of(path)) is not None:
        # The oldest first, so the last undamaged one is the newest.
        report["checked"] = [_check(each, verify_with_progress, show) for each in reversed(checkpoints.folders())]
        undamaged = [each["path"] for each in report["checked"] if each["whole"]]
        report["newest_whole"] = None
        summary = "all are damaged"
        if undamaged:  # the run would resume from here
            report["newest_whole"] = undamaged[-1]
            summary = f"the newest undamaged one: {undamaged[-1]}"
        show(summary)
    elif (path / "config.json").exists() or any(path.glob("*.safetensors*")):
        report["checked"] = [_check(path, verify_folder, show)]
    else:
        raise ConfigError(
            f"{path} holds neither checkpoints nor a Hugging Face model; see --help for the formats."
            f"{hint_of_model(path)}"
        )
    if options.json:
        print(json.dumps(report, indent=2))
    return 0 if all(each["whole"] for each in report["checked"]) else 1


def _check(folder: Path, verify: Callable[[Path], str], show: Callable[[str], object]) -> dict[str, Any]:
    """Check one folder with `verify`, show the result and return a JSON object."""
    is_whole = True
    try:
        description = verify(folder)
    except OffloadError as error:
        is_whole = False
        description = " ".join(str(error).split())
    show(f"{folder}: {'OK' if is_whole else 'DAMAGED'}: {description}")
    return {"path": str(folder), "whole": is_whole, "found": description}


if __name__ == "__main__":
    run_command(main)
