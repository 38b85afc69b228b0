"""`python -m offload.export`: convert a checkpoint to a Hugging Face folder, for models of any size."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from offload.config.command_line import parse_options, run_command, say
from offload.errors import ConfigError, counted, format_bytes
from offload.sizes import parse_size

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
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show tracebacks"""


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.export", description=DESCRIPTION)
    shard_bytes = parse_size(options.shard_size, "--shard-size")
    checkpoint_path, out = Path(options.checkpoint).expanduser(), Path(options.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give a new or empty folder for the export.")
    from offload.checkpoint.folder import choose_checkpoint  # imports torch
    from offload.checkpoint.stored_adapter import export_adapter, export_merged, has_adapter
    from offload.checkpoint.stored_model import DTYPES, export_stored
    from offload.hf.models import quiet_transformers

    quiet_transformers()
    folder = choose_checkpoint(checkpoint_path, say)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{out} lies in the checkpoint {folder}, which must not hold other files; give another folder."
        )
    dtype, is_adapter = DTYPES[options.dtype], has_adapter(folder)
    if options.merge and not is_adapter:
        raise ConfigError(f"--merge is given, but {folder} has a whole model and no adapter: leave it out.")
    for flag, is_given in (("--base", options.base is not None), ("--onto", options.onto != "trained")):
        if is_given and not options.merge:
            raise ConfigError(
                f"{flag} is given without --merge, but writing only the adapter needs no base: leave it out."
            )
    if is_adapter and not options.merge:
        if dtype is not None:
            raise ConfigError(
                "--dtype is given, but an adapter keeps the dtype in which it was trained: leave it out, or merge with "
                "--merge."
            )
        num_bytes = export_adapter(folder, out)
        print(f"{out}: an adapter of {format_bytes(num_bytes)}, read back and unchanged.")
        return 0
    if options.merge:
        exported = export_merged(
            folder, out, options.base, dtype, shard_bytes, onto_original=options.onto == "original"
        )
    else:
        exported = export_stored(folder, out, dtype, shard_bytes)
    files = counted(len(exported.files), "file")
    print(f"{exported.folder}: {format_bytes(exported.num_bytes)} of weights in {files}, read back and unchanged.")
    return 0


if __name__ == "__main__":
    run_command(main)
