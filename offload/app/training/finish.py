"""End of a run: the export and its check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from offload.app.config.config import Config
from offload.app.hf import reload
from offload.app.hf.models import max_positions
from offload.app.training.build import Run
from offload.app.training.objectives import Batch
from offload.app.training.parts import make_settings
from offload.app.training.progress import RunProgress
from offload.app.training.ranks import is_shared
from offload.app.training.resident import using_link_weights
from offload.app.training.run_folder import RunFolder
from offload.checkpoint.manifest import MANIFEST
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.engine.units.stages import stages_in_memory
from offload.errors import DiskError, common, format_bytes, shorten

_RETRY_S, _POLL_S = 60.0, 0.5
"""Seconds before a failed export is retried, and seconds between signal checks until then."""


class Export:
    """Export to the folder hf/ in the run folder, tokenizer included. The folder is complete or absent."""

    def __init__(self, folder: RunFolder, run: Run, say: Callable[[str], None]) -> None:
        self.path = folder.hf
        self._checkpoints = folder.checkpoints
        self._run = run
        self._trainable = run.setup.trainable
        self._precision = str(run.config.train.precision)
        self._say = say

    def is_done(self, config: Config, comm: Comm, progress: RunProgress) -> bool:
        """Return, equal on all ranks, whether the folder holds the weights at the current step.

        True if the run was resumed (`checkpoint.resume auto`), no step was made since, and the folder is newer than the
        checkpoint. With `checkpoint.export_best` also only if the last step is the best one. The folder itself does not
        record a step.
        """
        # With export_best the folder has other weights, unless the last step is the best.
        is_last = not config.checkpoint.export_best or progress.best.step in (None, progress.num_done)
        if progress.num_done > progress.first_step or not is_last:
            return False
        manifest = self._checkpoints / f"step-{progress.num_done}" / MANIFEST
        is_newer = False
        with suppress(OSError):
            exported_ns = (self.path / self._trainable.main_file).stat().st_mtime_ns
            is_newer = config.checkpoint.resume == "auto" and exported_ns >= manifest.stat().st_mtime_ns
        return comm.from_rank(0, is_newer, "whether to export")

    def write(self, engine: Engine) -> Path:
        """Write the folder, and return its path. Collective. Raises DiskError."""
        if self._trainable.library:
            # Before the write: the engine is closed when the export is loaded.
            self._probe = reload.take_probe(engine, self.probe_batch())
        self._base_bytes = self._trainable.base_bytes(engine.model)  # now too: the check has no model to ask
        run = self._run
        self._trainable.write(engine, self.path, run.files, run.build_base)
        weights = ""
        with suppress(OSError, ValueError):  # an adapter, or a rank with another disk
            num_bytes = sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
            dtype = json.loads((self.path / "config.json").read_text(encoding="utf-8")).get("dtype")
            weights = f": {format_bytes(num_bytes)} of weights"
            if dtype:
                weights += f" in {dtype}"
        self._say(f"exported to {self.path}{weights}")
        return self.path

    def probe_batch(self) -> Batch:
        """Return eval rows as a model batch, or training rows without an eval set."""
        return self._run.objective.inputs(self._run.objective.apply(self._run.data.probe(), 0))

    def check(self) -> None:
        """Load the folder with its target library, and compare logits with the engine's.

        Runs on rank 0, after the engine is closed.
        """
        data, settings = self._run.data, self._run.config.offload
        reason = reload.reason_not_to_reload(self.path, self._base_bytes, settings.host_memory)
        if not self._trainable.library:
            reason = "the export is the state_dict of a custom module, not of a transformers model"
        if reason is not None:
            self._say(f"the export is not loaded again for a check, since {reason}.")
            return
        model, link = self._trainable.load(self.path, self._run.build_base), settings.link_weights
        # The run computed with weights in the link format, and the export has the exact ones.
        in_link = using_link_weights(model, self._precision, link) if link != "exact" else nullcontext()
        with in_link, stages_in_memory(model, make_settings(self._run.config)):
            comparison = reload.check_logits(model, self._probe, self._precision)
        self._say(f"reloaded: by {self._trainable.library}, from {self.path}: {comparison}")
        if self._run.setup.model_kind.name == "causal" and data.tokenizer is not None and not data.has_pictures:
            self._say_sample(model, data.tokenizer)

    def _say_sample(self, model: Any, tokenizer: Any) -> None:
        """Print a model continuation for the beginning of a row, and the data's answer if there is one."""
        cut, limit = self._run.data.excerpt(), max_positions(model.config)
        if cut is None:
            return
        prompt, answer = cut
        num_tokens = reload.SAMPLE_TOKENS
        if limit is not None:
            num_tokens = min(num_tokens, limit - len(prompt))
        if num_tokens < 1:
            return
        ids = torch.from_numpy(prompt)[None]
        text = reload.sample_text(model, tokenizer, ids, seed=self._run.config.run.seed, num_tokens=num_tokens)
        reference = ""
        if answer is not None:
            wanted = tokenizer.decode(answer[: reload.SAMPLE_TOKENS], skip_special_tokens=True)
            reference = f"; in the data: {wanted!r}"
        self._say(f"sample: {shorten(repr(tokenizer.decode(prompt)))} -> {text!r}{reference}")


def begin_export(folder: RunFolder, run: Run, say: Callable[[str], None]) -> Export:
    """Return the export for the end of a run.

    Raises ConfigError before the first step if a reloaded export would differ from the model. Collective.
    """
    export = Export(folder, run, say)
    if run.config.checkpoint.export and isinstance(run.engine.model, PreTrainedModel):
        reload.check_buffers(run.engine, export.probe_batch, str(run.config.train.precision))
    return export


def load_best(
    engine: Engine, config: Config, progress: RunProgress, folder: RunFolder, say: Callable[[str], None]
) -> Path | None:
    """Load the best evaluated states for the export. Return their checkpoint. Collective. Raises CheckpointError.

    None: the states after the last step are exported, because they are the best, or because no checkpoint of the best
    step exists (the save failed, or the best step belongs to an earlier run in another folder).
    """
    best, comm = progress.best, engine.comm
    if not config.checkpoint.export_best or best.step in (None, progress.num_done):
        return None
    path = folder.checkpoints / f"step-{best.step}"
    description = f"step {best.step}, with the lowest eval loss ({best.loss:.4f})"
    if not comm.from_rank(0, (path / MANIFEST).exists(), "whether the best states are there"):
        say(f"note: there is no {path} of {description}, so the last weights are exported.")
        return None
    engine.load_checkpoint(path, reset=config.optimizer.reset)
    say(f"back to {description}")
    return path


def export_or_save(
    comm: Comm,
    export: Callable[[], Path],
    save: Callable[[], None],
    leave_if_requested: Callable[[], None],
    say: Callable[[str], None],
    *,
    waits: bool,
    saved_message: str,
) -> Path:
    """Return the export folder. If the export fails, save the states for a later export. Collective.

    If neither fits on the disk, wait and retry both, because the states exist nowhere else; `waits=False` raises
    instead. `saved_message`: message after a successful save. Raises the export error; a DiskError includes
    this message.
    """
    while True:
        try:
            return export()
        except Exception as error:
            if not is_shared(comm, error):  # the other ranks are elsewhere and cannot save
                raise
            failure = error
        try:
            save()
        except DiskError as unsaved:
            if not waits or not isinstance(failure, DiskError):
                raise failure from unsaved
            say(
                f"the export failed: {failure} The states could not be saved either: {unsaved} Make room for one of "
                f"them; both are tried again every {_RETRY_S:g} s. Ctrl-C or SIGTERM ends the run without them."
            )
        else:
            if isinstance(failure, DiskError):
                raise common(DiskError(f"{failure} {saved_message}", failure.errno or 0, failure.path))
            say(f"the export failed. {saved_message}")
            raise failure
        # In short sleeps, so a signal to give up is soon seen.
        until = time.monotonic() + _RETRY_S
        while time.monotonic() < until:
            leave_if_requested()
            time.sleep(_POLL_S)
