"""Export of a checkpoint adapter: in PEFT format, or merged into the base model one module at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from offload.app.checkpoint_folder import suggesting_alternative
from offload.app.config.sections import ModelSection
from offload.app.hf.models import (
    BuiltModel,
    build_model,
    empty_model,
    folder_config,
    is_pretrained,
    locate,
    trained_config,
)
from offload.app.hf.write import ExportResult
from offload.app.stored_model import StoredParameter, export_files, write_with_progress
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError, format_bytes
from offload.extras.adapters.adapters import CONFIG, INITIAL, Adaptation, write_adapter
from offload.extras.adapters.merge import MergedWeights, fill_adapter
from offload.extras.adapters.over_base import load_base_config, mark_base
from offload.extras.adapters.residual import subtract_products
from offload.files.sources import SHARD_BYTES
from offload.layout.codecs import CODECS, EXACT, Codec
from offload.layout.planes import DTYPES as COMPUTED


def export_checkpoint(
    folder: Path, out: Path, dtype: torch.dtype | None, shard_bytes: int | None, *, merge: bool, **options: Any
) -> str:
    """Write the adapter, or with `merge` the model with the adapter merged in. See `Exporter` in offload/export.py."""
    if merge:
        return export_merged(folder, out, dtype=dtype, shard_bytes=shard_bytes, **options).describe()
    if dtype is not None:
        raise ConfigError(
            "--dtype is given, but an adapter keeps the dtype in which it was trained: leave it out, or merge with "
            "--merge."
        )
    num_bytes = export_adapter(folder, out)
    return f"{out}: an adapter of {format_bytes(num_bytes)}, read back and unchanged."


def export_adapter(folder: Path, out: Path) -> int:
    """Write the checkpoint adapter to `out`, a new folder in PEFT format. Return the bytes of the weights.

    The base model is not needed. Raises CheckpointError, ConfigError, DiskError, OffloadError.
    """
    with suggesting_alternative(folder), Reader(folder) as reader:
        if changed := reader.changed:
            raise ConfigError(
                f"{folder} has an adapter over a base with {len(changed)} changed weights (lora.restart_every), so the "
                "adapter does not fit the original base. Export it with --merge."
            )
        adaptation = Adaptation.from_checkpoint(folder)
        config = folder_config(folder)
        config.name_or_path = adaptation.config.base_model_name_or_path or ""  # PEFT writes this name of the base
        model = adaptation.apply_to_shapes(empty_model(ModelSection(), config))
        return write_adapter(
            model, _read_values(reader), out, export_files(reader, (CONFIG, INITIAL)), adaptation.removed
        )


def export_merged(
    folder: Path,
    out: Path,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = SHARD_BYTES,
    *,
    onto_original: bool = False,
) -> ExportResult:
    """Merge a checkpoint adapter into the base model and write a new Hugging Face folder `out`.

    The bits equal PEFT `merge_and_unload` and `save_pretrained`. Memory: the adapter, and all modules sharing a weight.

    base: current location of the base; None: unchanged. dtype: for reading and merging the base; None: the base dtype.
    shard_bytes: maximum size per weight file; None for one file. onto_original: for a base quantized in training, merge
    into the original file values, never seen in training, rather than the dequantized values.

    Raises CheckpointError, ConfigError (also for a missing or different base, and for a merge without any change),
    DiskError, OffloadError.
    """
    with suggesting_alternative(folder), ExitStack() as opened:
        reader = opened.enter_context(Reader(folder))
        build = _base_of(reader, base, dtype)
        # PEFT replaces modules in a model, so one copy stays plain for the names and shapes to write.
        plain, beneath = build(), build()
        opened.callback(plain.close)
        opened.callback(beneath.close)
        if plain.quantized and onto_original:
            raise ConfigError(
                f"--onto is original, but the weights in {plain.folder} are quantized "
                f"({next(iter(plain.quantized.values())).name}), so there are no original values to merge into. Merge "
                "--onto trained, or put the adapter (exported without --merge) over the unquantized model."
            )
        names = {id(parameter): name for name, parameter in beneath.model.named_parameters()}
        adaptation = Adaptation.from_checkpoint(folder)
        if repeated := getattr(adaptation.config, "layer_replication", None):
            raise ConfigError(
                f"--merge is given, but the adapter of {folder} repeats layers (layer_replication {repeated}): the "
                "copies share the weights of the base, and a merged model would need separate ones. Export the "
                "adapter without --merge, and load it with AutoPeftModelForCausalLM."
            )
        # The seed has no effect: the checkpoint fills all values of the adapter.
        adapted, plain = adaptation.apply_to(beneath, seed=0), subtract_products(plain, adaptation.removed)
        own = fill_adapter(adapted.model, names, _read_values(reader))
        changed = {names[id(adapted.model.get_parameter(name))]: name for name in reader.changed}

        def trained_value(name: str) -> torch.Tensor | None:
            if name in changed:
                return _read_value(reader, changed[name])
            return own.get(name)

        quantized_base = dict[str, tuple[Codec, torch.dtype]]()  # base parameters quantized during training
        if not onto_original:
            engine, parameters = reader.meta["engine"], dict(adapted.model.named_parameters())
            codec = CODECS[engine.get("frozen_weights", EXACT.name)]
            for name, compute in engine.get("coded", {}).items():
                quantized_base[names[id(parameters[name])]] = codec, COMPUTED[compute]
        if quantized_base and dtype is not None:
            raise ConfigError(
                f"--dtype is given, but the adapter of {folder} was trained over the dequantized values of its base: "
                "leave --dtype out, or merge --onto original."
            )
        merged = MergedWeights(plain, adapted.model, names, trained_value, quantized_base)
        # The folder would be a copy of the base, and look like a trained model.
        if not merged.has_changes():
            raise ConfigError(
                f"merging the adapter of {folder} changes no base weight: the adapter was not trained, or its changes "
                "are lost in the precision of the weights. Export it without --merge, or with --dtype fp32."
            )
        files = export_files(reader, (CONFIG, INITIAL))
        return write_with_progress(plain.model, merged.read, out, dtype, shard_bytes, files)


def _base_of(reader: Reader, moved: str | None, dtype: torch.dtype | None) -> Callable[[], BuiltModel]:
    """Return a function building the unfilled base of a checkpoint adapter. Raises ConfigError, also for a different
    base.
    """
    own = reader.meta["meta"]
    settings = {key: value for key, (value, _) in own["config"].items()}
    # The folder of the base then, where it still exists; the setting may be a name on the hub, with other files by now.
    path, preset = settings["model.path"], settings["model.preset"]
    if moved:
        path, preset = moved, None
    elif Path(own["base"]["name"]).is_dir():
        path = own["base"]["name"]
    section = ModelSection(
        path=path,
        preset=preset,
        init=settings["model.init"],
        attention=settings["model.attention"],
    )
    config = trained_config(load_base_config(section, own["base"], reader.path, "--base"), settings["train.method"])
    seed = int(settings["run.seed"])
    # Before any merge: an adapter fits only the base of the training.
    mark_base(section, config, seed).check(own["base"], reader.path, "--base")
    if not is_pretrained(section, locate(section)):
        config = folder_config(reader.path)  # includes tokens added for the tokenizer
    elif dtype is not None:
        config.dtype = dtype
    # A copy, because the merge changes the configuration of one of two models.
    return lambda: build_model(section, seed=seed, config=copy.deepcopy(config))


def _read_value(reader: Reader, name: str) -> torch.Tensor:
    """Return a parameter in fp32. Raises CheckpointError."""
    shape = reader.contents[name].shape
    return StoredParameter(reader, name, shape, torch.float32).read(0, math.prod(shape)).view(shape)


def _read_values(reader: Reader) -> dict[str, torch.Tensor]:
    """Return all checkpoint tensors except changed base weights, parameters in fp32. Raises CheckpointError."""
    tensors, changed = {}, reader.changed
    for name, entry in reader.contents.items():
        if "buffer" in entry.planes:
            tensors[name] = torch.empty(entry.shape, dtype=entry.planes["buffer"])
            reader.read(name, "buffer", 0, tensors[name])
        elif name not in changed:  # those are large: a merge reads them one by one
            tensors[name] = _read_value(reader, name)
    return tensors
