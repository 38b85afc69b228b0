"""What a run ends with: the evaluation of its last step, and the export, proved."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offload.checkpoint.manifest import MANIFEST
from offload.config.config import Config
from offload.data.dataset import Dataset, share
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.errors import DiskError, common
from offload.hf import reload
from offload.training.build import Run
from offload.training.objectives import Batch, Objective
from offload.training.progress import RunProgress
from offload.training.run_folder import RunFolder

_AGAIN_S, _LOOK_S = 60.0, 0.5
"""After which an export that failed is tried again, and how often a signal is looked for until then."""
NUM_EVAL_BATCHES = 8  # the same rows each time, so that evaluations of a run can be compared


class Evaluation(NamedTuple):
    """The loss over some rows."""

    name: str
    """Of the eval source; empty for what is held out of the training data."""
    loss: float
    """Mean over the target tokens, of all ranks."""
    rows: str
    """What was evaluated."""


def evaluate(engine: Engine, data: Dataset, objective: Objective, comm: Comm, batch_size: int) -> list[Evaluation]:
    """Return the evaluation of the first rows of all that has some to evaluate. Collective."""
    found = [_evaluate(engine, data, objective, comm, batch_size, name) for name in data.evals]
    return [each for each in found if each is not None]


def _evaluate(
    engine: Engine, data: Dataset, objective: Objective, comm: Comm, batch_size: int, name: str
) -> Evaluation | None:
    num_rows = data.evals[name].num_rows
    batches = [
        own_share(objective, comm, rows, index, min(batch_size, num_rows - index * batch_size))
        for index, rows in enumerate(data.eval_batches(batch_size, NUM_EVAL_BATCHES, comm.rank, comm.size, name))
    ]
    counts = comm.sum_in_order([objective.count(batch) for batch in batches], "targets of the evaluation")
    losses = [float(engine.evaluate(batch)) * n for batch, n in zip(batches, counts, strict=True) if n]
    num_tokens = round(sum(counts))
    if not num_tokens:
        return None
    rows_done = min(num_rows, NUM_EVAL_BATCHES * batch_size)
    of = f" of {name}" if name else ""
    return Evaluation(
        name, sum(losses) / num_tokens, f"{num_tokens:,} tokens in {rows_done:,} of {num_rows:,} rows{of}"
    )


def own_share(objective: Objective, comm: Comm, rows: Batch, step: int, num_rows: int) -> Batch:
    """Return the model's batch of this rank's share of `num_rows`."""
    return objective.apply(rows, step, share(num_rows, comm.rank, comm.size).start, num_rows)


def next_share(
    data: Dataset, objective: Objective, comm: Comm, step: int, num_rows: int
) -> tuple[Batch | None, Exception | None]:
    """Return this rank's share of a step's rows, None at their end; and over several ranks what failed, of which the
    others have to hear first.
    """
    try:
        return own_share(objective, comm, data.batch(step, comm.rank, comm.size), step, num_rows), None
    except StopIteration:
        return None, None
    except Exception as error:
        if comm.size == 1:
            raise
        return None, error


class Export:
    """The folder that a run leaves in hf/, tokenizer included: whole, or not at all."""

    def __init__(self, folder: RunFolder, run: Run, say: Callable[[str], None]) -> None:
        self.path, self._saved, self._say = folder.hf, folder.checkpoints, say
        self._kind, self._data, self._objective, self._files = run.kind, run.data, run.objective, run.files
        self._trained, self._build_base = run.trained, run.build_base
        self._precision, self._seed = str(run.config.train.precision), run.config.run.seed

    def is_done(self, config: Config, comm: Comm, stands: RunProgress) -> bool:
        """Tell, alike on all ranks, whether the folder is of the step where the run stands: no step was made since the
        run went on, and the folder was made after the checkpoint.
        """
        if stands.num_done > stands.first_step:
            return False
        saved = self._saved / f"step-{stands.num_done}" / MANIFEST
        is_newer = False
        with suppress(OSError):
            made = (self.path / self._trained.main_file).stat().st_mtime_ns
            is_newer = config.checkpoint.resume == "auto" and made >= saved.stat().st_mtime_ns
        return not comm.any(comm.rank == 0 and not is_newer, "whether to export")

    def write(self, engine: Engine) -> Path:
        """Write the folder, and return it. Collective. Raises DiskError."""
        rows = next(self._data.eval_batches(1, 1), None) or self._data.batch(0)
        self._probe = reload.take_probe(engine, self._objective.apply(rows, 0))
        beneath = engine.model.parameters() if self._trained.trained_only else ()
        self._base_bytes = sum(4 * parameter.numel() for parameter in beneath)  # at most, as their files have them
        self._trained.write(engine, self.path, self._files)
        self._say(f"exported to {self.path}")
        return self.path

    def check(self) -> None:
        """Load the folder with the library that it is for, and compare logits with the engine's. On rank 0, where no
        engine is in the way any more.
        """
        reason = reload.reason_not_to_reload(self.path, self._base_bytes)
        if reason is not None:
            self._say(f"the export is not loaded again for a check: {reason}.")
            return
        model, tokenizer = self._trained.load(self.path, self._build_base), self._data.tokenizer
        library, found = self._trained.library, reload.check_logits(model, self._probe, self._precision)
        self._say(f"reloaded: by {library}, from {self.path}: {found}")
        if self._kind.name == "causal" and tokenizer is not None:
            prompt, text = reload.sample_text(model, tokenizer, self._probe.batch["input_ids"][:, :16], seed=self._seed)
            self._say(f"sample: {prompt!r} -> {text!r}")


def export_or_save(
    export: Callable[[], Path],
    save: Callable[[], None],
    leave_if_told: Callable[[], None],
    say: Callable[[str], None],
    *,
    waits: bool,
    saved: str,
) -> Path:
    """Return where an export is. Where it fails the states are saved, for an export of them; where there is no room for
    these either, wait for it, unless it `waits` for nothing: nothing else has them. `saved`: what is said once they
    are. Collective. Raises DiskError.
    """
    while True:
        try:
            return export()
        except DiskError as error:
            failure = error
        try:
            save()
        except DiskError as unsaved:
            if not waits:
                raise failure from unsaved
            say(
                f"the export failed: {failure} The states could not be saved either: {unsaved} Make room for one of "
                f"them; both are tried again every {_AGAIN_S:g} s. Ctrl-C or SIGTERM ends the run without them."
            )
        else:
            raise common(DiskError(f"{failure} {saved}", failure.errno or 0, failure.path))
        until = time.monotonic() + _AGAIN_S
        while time.monotonic() < until:
            leave_if_told()
            time.sleep(_LOOK_S)
