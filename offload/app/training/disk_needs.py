"""Disk space needed by a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from offload.app.config.config import Config
from offload.app.engine_settings import make_update_rule
from offload.app.training.trainable import TrainablePart
from offload.errors import DoesNotFitError, format_bytes
from offload.files.directories import free_bytes


@dataclass(frozen=True)
class DiskNeeds:
    """Bytes needed in the run folder.

    export_bytes: weights in the Hugging Face folder; 0 without an export. states_bytes: one checkpoint.
    """

    export_bytes: int
    states_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes for one checkpoint and the export."""
        return self.export_bytes + self.states_bytes

    @classmethod
    def of(cls, config: Config, trainable: TrainablePart, model: nn.Module) -> DiskNeeds:
        """Return the needs for a resolved configuration and a model. Raises ConfigError for an untrainable model."""
        rule, weight_bytes = make_update_rule(config), 2 if config.train.precision == "bf16" else 4
        num_saved, kept_bytes = trainable.num_saved(model), trainable.kept_bytes(model, weight_bytes)
        moments = sum(plane.num_bytes(num_saved) for plane in rule.parts[0].moments)
        master_bytes = 4 if rule.has_low else weight_bytes
        export_bytes = trainable.export_bytes(model, weight_bytes) if config.checkpoint.export else 0
        return cls(export_bytes, master_bytes * num_saved + moments + kept_bytes)

    def check(self, path: Path, config: Config, num_done: int) -> Iterator[str]:
        """Yield a note if some checkpoints will not fit on the disk, after `num_done` completed steps.

        Raises DoesNotFitError if the export will not fit.
        """
        free, section = free_bytes(path), config.checkpoint
        location = f"{path} is on a disk with {format_bytes(free)} ({free} bytes) free"
        if free < self.export_bytes:
            raise DoesNotFitError(
                f"{location}, and the export at the end takes {format_bytes(self.export_bytes)} ({self.export_bytes} "
                f"bytes), {self.export_bytes - free} bytes more. Make room, set --run.dir to a folder on another disk, "
                "or leave the export out with --checkpoint.export false."
            )
        num = 1  # for a stop request
        if section.every is not None:  # the next one is written before the oldest is removed
            num += section.keep or 1
        if section.keep is None and isinstance(section.every, int) and config.train.steps:
            num = math.ceil((config.train.steps - num_done) / section.every)
        num += section.keep_best
        if free < (needed := self.export_bytes + num * self.states_bytes):
            yield (
                f"note: {location}, and the export with up to {num} checkpoints of {format_bytes(self.states_bytes)} "
                f"needs {format_bytes(needed)}: some checkpoints may not be saved. Make room, set --run.dir to a "
                "folder on another disk, or lower --checkpoint.keep."
            )
