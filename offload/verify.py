"""`python -m offload.verify`: check whether checkpoints and Hugging Face folders are intact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from offload.app.config.command_line import parse_options, run_command
from offload.errors import ConfigError, OffloadError

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
        raise ConfigError(f"{path} {'is no folder' if path.exists() else 'does not exist'}; give a folder to verify.")
    from offload.app.checkpoint_folder import checkpoints_of, is_checkpoint  # imports torch
    from offload.app.hf.models import quiet_transformers

    quiet_transformers()
    report = _Report(options.json)
    if is_checkpoint(path):
        report.check(path, is_stored=True)
    elif (checkpoints := checkpoints_of(path)) is not None:
        for folder in reversed(checkpoints.folders()):
            report.check(folder, is_stored=True)
        undamaged = [each["path"] for each in report.checked if each["whole"]]
        report.end(undamaged[-1] if undamaged else None)
    elif (path / "config.json").exists() or any(path.glob("*.safetensors*")):
        report.check(path, is_stored=False)
    else:
        raise ConfigError(f"{path} holds neither checkpoints nor a Hugging Face model; see --help for the formats.")
    if options.json:
        print(json.dumps(report.content(), indent=2))
    return 0 if all(each["whole"] for each in report.checked) else 1


class _Report:
    """Check results, printed line by line or collected into one object."""

    def __init__(self, as_json: bool) -> None:
        self._say: Callable[[str], object] = (lambda _text: None) if as_json else print
        self.checked: list[dict[str, Any]] = []
        self._ends: dict[str, Any] = {}

    def check(self, folder: Path, is_stored: bool) -> None:
        """Check one folder."""
        from offload.app.checkpoint_folder import verify_with_progress
        from offload.app.hf.verify import verify_folder

        try:
            description, is_whole = verify_with_progress(folder) if is_stored else verify_folder(folder), True
        except OffloadError as error:
            description, is_whole = " ".join(str(error).split()), False
        self._say(f"{folder}: {'OK' if is_whole else 'DAMAGED'}: {description}")
        self.checked.append({"path": str(folder), "whole": is_whole, "found": description})

    def end(self, newest_whole: str | None) -> None:
        """Record the checkpoint from which the run would resume."""
        self._say(f"the newest undamaged one: {newest_whole}" if newest_whole else "all are damaged")
        self._ends = {"newest_whole": newest_whole}

    def content(self) -> dict[str, Any]:
        """Return the object for --json."""
        return {"checked": self.checked, **self._ends}


if __name__ == "__main__":
    run_command(main)
