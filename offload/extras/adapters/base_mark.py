"""Fingerprint for recognizing a base model without a full read, stored in adapter checkpoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedConfig

from offload.app.config.sections import ModelSection
from offload.app.hf.models import is_pretrained, load_model_config, locate
from offload.app.hf.read import weight_files
from offload.errors import ConfigError

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Stretches sampled evenly from each weight file, and bytes per stretch."""
_WRITER_KEYS = ("transformers_version", "_name_or_path", "architectures")
"""Configuration keys without influence on the model function."""
_FILE_KEYS = ("dtype", "torch_dtype")
"""Configuration keys about the weight files alone."""


@dataclass(frozen=True)
class BaseMark:
    """Base model fingerprint: from the files, or from configuration and seed for random weights."""

    name: str
    """Base folder, or a description."""
    revision: str | None
    """Commit on the Hugging Face hub. None: not from the hub."""
    mark: str
    """XXH3-128, hexadecimal.

    Input: the configuration and, for each weight file, size, header and 64 evenly spread stretches of 4 KiB. For random
    weights: configuration and seed.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def check(self, stored_mark: Mapping[str, Any], checkpoint: Path, flag: str = "--model.path") -> None:
        """Raise ConfigError if the checkpoint at `checkpoint` belongs to another base.

        `stored_mark`: the fingerprint in the checkpoint. `flag`: the option named in the error.
        """
        if self.mark != stored_mark["mark"]:
            raise ConfigError(
                f"{checkpoint} holds an adapter trained over {describe_base(stored_mark)} (mark "
                f"{stored_mark['mark'][:12]}), but {self.name} is another model, or has changed since (mark "
                f"{self.mark[:12]}): set {flag} to the weights that the adapter was trained over."
            )


def describe_base(base: Mapping[str, Any]) -> str:
    """Return the base name for messages."""
    return base["name"] + (f", revision {base['revision']}" if base["revision"] else "")


def mark_base(section: ModelSection, config: PreTrainedConfig, seed: int) -> BaseMark:
    """Return the fingerprint for the model in `section`. `seed` applies to random weights. Raises ConfigError."""
    folder = locate(section)
    if folder is None or not is_pretrained(section, folder):
        digest = _hash_config(config.to_diff_dict(), (*_WRITER_KEYS, *_FILE_KEYS))
        digest.update(f"seed {seed}".encode())
        return BaseMark(f"{section.label} with random weights of run.seed {seed}", None, digest.hexdigest())
    # Hash the file, not the parsed configuration: another version of transformers may know other fields.
    digest = _hash_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), _WRITER_KEYS)
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            begin, data = 8 + header, max(0, size - 8 - header - _SAMPLE_BYTES)
            for number in range(_NUM_SAMPLES):
                file.seek(begin + data * number // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    whole = folder.resolve()
    return BaseMark(str(whole), whole.name if whole.parent.name == "snapshots" else None, digest.hexdigest())


def _hash_config(values: Mapping[str, Any], excluded: Collection[str]) -> xxhash.xxh3_128:
    included = {key: value for key, value in values.items() if key not in excluded}
    return xxhash.xxh3_128(json.dumps(included, sort_keys=True, default=str).encode())


def load_base_config(
    section: ModelSection, stored_mark: Mapping[str, Any], checkpoint: Path, flag: str = "--model.path"
) -> PreTrainedConfig:
    """Return the base configuration for the adapter checkpoint at `checkpoint`.

    Raises ConfigError if the base is missing; the message names the base and the option `flag`.
    """
    try:
        return load_model_config(section)
    except ConfigError as error:
        raise ConfigError(
            f"{checkpoint} holds only an adapter, and its base {describe_base(stored_mark)} is no longer there; set "
            f"{flag} to where the base is now. {error}"
        ) from error
