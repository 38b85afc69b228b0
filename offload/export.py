"""`python -m offload.export`: convert a checkpoint to a Hugging Face folder, for models of any size."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro

from offload.app.config.command_line import parse_options, run_command, say
from offload.doors import Door
from offload.errors import ConfigError
from offload.sizes import parse_size

if TYPE_CHECKING:
    import torch

DESCRIPTION = (
    "Write a checkpoint as a Hugging Face folder: sharded safetensors, configuration and tokenizer, as save_pretrained "
    "would. Of a run with an adapter it is the adapter, as PEFT saves it, or with --merge the model with it merged in. "
    "Every byte is verified when it is read, and the result is read back. Memory: one parameter. "
    "Exit codes: 0 fine, 1 failed or damaged, 2 bad arguments."
)


@dataclasses.dataclass
class Options:
    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """RUN/checkpoints/step-N, or RUN for the newest intact checkpoint (reads all candidates)"""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """a new or empty folder"""
    dtype: Annotated[Literal["auto", "bf16", "fp32"], tyro.conf.arg(metavar="{auto,bf16,fp32}")] = "auto"
    """weight dtype: auto is the training dtype, fp32 writes the master weights"""
    shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GiB"
    """maximum size per weight file, except for a larger tensor; none: one file"""
    merge: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """for an adapter: write the whole model with the adapter merged in, one module at a time"""
    base: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: where it was)")] = None
    """with --merge: current folder of the base model"""
    onto: Literal["trained", "original"] = "trained"
    """with --merge and a quantized base: merge into the dequantized values or into the original file values"""
    push: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: no upload)")] = None
    """upload OUT to the hub afterwards, as USER/NAME or NAME; needs a token (hf auth login)"""
    private: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """with --push: a new repository is private"""
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show tracebacks"""


class Exporter(Protocol):
    """Writes the contents of a checkpoint to a new folder. Door: a function under a name in `EXPORTERS`."""

    def __call__(
        self, folder: Path, out: Path, dtype: torch.dtype | None, shard_bytes: int | None, **merge: Any
    ) -> str:
        """Write the folder, and return a line for the user. Raises CheckpointError, ConfigError and DiskError.

        dtype: None for the training dtype. shard_bytes: maximum bytes per weight file; None for one file. merge: for an
        adapter, `merge`, `base` and `onto_original` as in the options.
        """


def _export_whole(folder: Path, out: Path, dtype: torch.dtype | None, shard_bytes: int | None, **_merge: Any) -> str:
    from offload.app.stored_model import export_stored

    return export_stored(folder, out, dtype, shard_bytes).describe()


EXPORTERS: Door[Exporter] = Door("exporter", {"whole": _export_whole})
"""Exporters by the contents of a checkpoint."""


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.export", description=DESCRIPTION)
    shard_bytes = parse_size(options.shard_size, "--shard-size")
    checkpoint_path, out = Path(options.checkpoint).expanduser(), Path(options.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give a new or empty folder for the export.")
    from transformers.utils import ADAPTER_CONFIG_NAME

    from offload.app.checkpoint_folder import choose_checkpoint  # imports torch
    from offload.app.hf.models import quiet_transformers
    from offload.app.stored_model import DTYPES

    quiet_transformers()
    folder = choose_checkpoint(checkpoint_path, say)
    if out.resolve().is_relative_to(folder.resolve()):  # a checkpoint with other files counts as damaged
        raise ConfigError(
            f"{out} lies in the checkpoint {folder}, which must not hold other files; give another folder."
        )
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()
    if options.merge and not is_adapter:
        raise ConfigError(f"--merge is given, but {folder} has a whole model and no adapter: leave it out.")
    for flag, is_given in (("--base", options.base is not None), ("--onto", options.onto != "trained")):
        if is_given and not options.merge:
            raise ConfigError(
                f"{flag} is given without --merge, but writing only the adapter needs no base: leave it out."
            )
    # Before the export, which may take long.
    if options.private and options.push is None:
        raise ConfigError("--private is given without --push, and nothing is uploaded: leave it out.")
    upload = None
    if options.push is not None:
        from offload.app.hf.push import HubUpload  # only here: an export needs no network

        upload = HubUpload(options.push, private=options.private)
    contents = "adapter" if is_adapter else "whole"
    exporter = EXPORTERS[contents]
    merge = {"merge": options.merge, "base": options.base, "onto_original": options.onto == "original"}
    print(exporter(folder, out, DTYPES[options.dtype], shard_bytes, **merge))
    if upload is not None:
        print(f"uploaded to {upload.push(out)}")
    return 0


if __name__ == "__main__":
    run_command(main)
