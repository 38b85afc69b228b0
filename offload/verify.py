"""`python -m offload.verify`: whether checkpoints and Hugging Face folders are whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from offload.cli import parse_options, run_command
from offload.errors import ConfigError, OffloadError

DESCRIPTION = (
    "Check a checkpoint, all of a run's checkpoints, or a Hugging Face folder. Of a checkpoint every byte is compared "
    "with its checksum; safetensors have none, so there headers, index and shapes are checked. "
    "Exit codes: 0 all is whole, 1 something is damaged, 2 bad arguments or nothing of the kind there."
)


@dataclasses.dataclass
class Options:
    path: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PATH", help="RUN, RUN/checkpoints, RUN/checkpoints/step-N, or a Hugging Face folder"),
    ]
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="show tracebacks")] = False


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.verify", description=DESCRIPTION)
    path = Path(options.path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} {'is no folder' if path.exists() else 'does not exist'}; give a folder to verify.")
    from offload.checkpoint.given import checkpoints_of, is_checkpoint  # imports torch
    from offload.checkpoint.models import quiet_transformers

    quiet_transformers()
    if is_checkpoint(path):
        return 0 if _report(path, is_stored=True) else 1
    if (checkpoints := checkpoints_of(path)) is not None:
        folders = checkpoints.folders()
        whole = [folder for folder in reversed(folders) if _report(folder, is_stored=True)]
        print(f"the newest that is whole: {whole[-1]}" if whole else "none is whole")
        return 0 if len(whole) == len(folders) else 1
    if (path / "config.json").exists() or any(path.glob("*.safetensors*")):
        return 0 if _report(path, is_stored=False) else 1
    raise ConfigError(
        f"{path} holds neither checkpoints nor a Hugging Face model; see --help for what can be verified."
    )


def _report(folder: Path, is_stored: bool) -> bool:
    """Check one folder, print a line about it, and tell whether it is whole."""
    from offload.checkpoint.given import verify_shown
    from offload.checkpoint.hf_verify import verify_folder

    try:
        found = verify_shown(folder) if is_stored else verify_folder(folder)
    except OffloadError as error:
        print(f"{folder}: DAMAGED: {' '.join(str(error).split())}")
        return False
    print(f"{folder}: OK: {found}")
    return True


if __name__ == "__main__":
    run_command(main)
