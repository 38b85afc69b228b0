"""What a run ends with: the evaluation of its last step, and the export, proved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from offload.checkpoint.manifest import MANIFEST
from offload.config.config import Config
from offload.data.dataset import Dataset, share
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.errors import DiskError, common
from offload.hf import reload
from offload.hf.models import Kind
from offload.training.objectives import Batch, Objective
from offload.training.progress import RunProgress
from offload.training.run_folder import RunFolder

_AGAIN_S, _LOOK_S = 60.0, 0.5
"""After which an export that failed is tried again, and how often a signal is looked for until then."""
NUM_EVAL_BATCHES = 8  # the same rows each time, so that evaluations of a run can be compared


def evaluate(
    engine: Engine, data: Dataset, objective: Objective, comm: Comm, batch_size: int
) -> tuple[float, str] | None:
    """Return the mean loss over the target tokens of the first eval rows, of all ranks, and what was evaluated; None
    without eval rows. Collective.
    """
    num_rows = data.num_eval_rows
    batches = [
        own_share(objective, comm, rows, index, min(batch_size, num_rows - index * batch_size))
        for index, rows in enumerate(data.eval_batches(batch_size, NUM_EVAL_BATCHES, comm.rank, comm.size))
    ]
    counts = comm.sum_in_order([objective.count(batch) for batch in batches], "targets of the evaluation")
    losses = [float(engine.evaluate(batch)) * n for batch, n in zip(batches, counts, strict=True) if n]
    num_tokens = round(sum(counts))
    if not num_tokens:
        return None
    rows_done = min(num_rows, NUM_EVAL_BATCHES * batch_size)
    return sum(losses) / num_tokens, f"{num_tokens:,} tokens in {rows_done:,} of {num_rows:,} rows"


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


def is_exported(folder: RunFolder, config: Config, comm: Comm, stands: RunProgress) -> bool:
    """Tell, alike on all ranks, whether hf/ is of the step where the run stands: no step was made since the run went
    on, and hf/ was made after the checkpoint.
    """
    if stands.num_done > stands.first_step:
        return False
    saved = folder.checkpoints / f"step-{stands.num_done}" / MANIFEST
    is_newer = False
    with suppress(OSError):
        made = (folder.hf / "config.json").stat().st_mtime_ns
        is_newer = config.checkpoint.resume == "auto" and made >= saved.stat().st_mtime_ns
    return not comm.any(comm.rank == 0 and not is_newer, "whether to export")


class Export:
    """The Hugging Face folder of a run, tokenizer included: whole, or not at all. Collective."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        data: Dataset,
        objective: Objective,
        files: Mapping[str, bytes],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self._tokenizer, self._say = folder, data.tokenizer, say
        rows = next(data.eval_batches(1, 1), None) or data.batch(0)
        self._probe = reload.take_probe(engine, objective.apply(rows, 0))
        engine.export(folder, files=files, replace=True)
        say(f"exported to {folder}")

    def check(self, kind: Kind, precision: str, seed: int) -> None:
        """Load the folder with transformers, and compare logits with the engine's. On rank 0, where no engine is in the
        way any more.
        """
        reason = reload.reason_not_to_reload(self.folder)
        if reason is not None:
            self._say(f"the export is not loaded again for a check: {reason}.")
            return
        model = reload.reload(self.folder, kind.auto)
        self._say(
            f"reloaded: by transformers, from {self.folder}: {reload.check_logits(model, self._probe, precision)}"
        )
        if kind.name == "causal" and self._tokenizer is not None:
            prompt, text = reload.sample_text(model, self._tokenizer, self._probe.batch["input_ids"][:, :16], seed=seed)
            self._say(f"sample: {prompt!r} -> {text!r}")


def export_or_save(
    export: Callable[[], Export],
    save: Callable[[], None],
    leave_if_told: Callable[[], None],
    say: Callable[[str], None],
    *,
    waits: bool,
    saved: str,
) -> Export:
    """Return an export. Where it fails the states are saved, for an export of them; where there is no room for these
    either, wait for it, unless it `waits` for nothing: nothing else has them. `saved`: what is said once they are.
    Collective. Raises DiskError.
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
