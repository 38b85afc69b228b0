"""Evaluations in a run: loss over held-out rows, with the usual derived metrics."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.amounts import Tally, Tell
from offload.app.training.build import Run
from offload.app.training.callbacks import Callbacks
from offload.app.training.progress import RunProgress
from offload.app.training.ranks import Share
from offload.app.training.records import Records
from offload.distributed.comm import Comm
from offload.engine.engine import Engine

_PRINTED = {
    "perplexity": "perplexity {:.4g}",
    "bits_per_byte": "{:.4f} bits a byte",
    "rewards/accuracies": "accuracy {:.2f}",
    "rewards/margins": "margin {:.3g}",
    "accuracy": "accuracy {:.2f}",
}
"""Printed metrics and their formats."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation result over some rows."""

    name: str
    """Eval source name; empty for rows held out from the training data."""
    loss: float
    """Mean loss over all ranks, per target token in nats, or per unit in `Objective.count_unit`."""
    metrics: Mapping[str, float]
    """Further metrics, by their names in metrics.jsonl."""
    rows: str
    """Description of the evaluated rows."""

    def fields(self) -> dict[str, float]:
        return {"loss": self.loss, **self.metrics}

    def __str__(self) -> str:
        metrics = "".join(
            f", {text.format(self.metrics[key])}" for key, text in _PRINTED.items() if key in self.metrics
        )
        of = ""
        if self.name:
            of = f" of {self.name}"
        return f"eval loss {self.loss:.4f}{metrics} over {self.rows}{of}"


class Evaluations:
    """Evaluations in a run: after due steps, and at the end."""

    def __init__(
        self,
        run: Run,
        comm: Comm,
        records: Records,
        progress: RunProgress,
        callbacks: Callbacks,
        say: Callable[[str], None],
        tell: Tell,
    ) -> None:
        """`callbacks` receive an event per evaluation; `say` prints a line; `tell` shows the rows done."""
        self._data = run.data
        self._objective = run.objective
        self._train = run.config.train
        self._num_rows = run.config.num_rows
        self._keeps_best = run.config.checkpoint.keep_best
        self._comm = comm
        self._share = Share.of(run.config, comm)
        # Has the number of steps done and the best evaluation, and records each evaluation.
        self._progress = progress

        # Told of each evaluation.
        self._records = records
        self._callbacks = callbacks
        self._say = say
        self._tell = tell

    @property
    def is_due(self) -> bool:
        """True if an evaluation is due after the last completed step."""
        every = self._train.eval_every
        return every > 0 and self._progress.num_done % every == 0

    @property
    def has_new_best(self) -> bool:
        """True if the weights after the last step are the best so far and should be kept."""
        return self._keeps_best and self._progress.best.step == self._progress.num_done

    def evaluate(self, engine: Engine) -> dict[str, Any]:
        """Evaluate all sources. Return the metrics.jsonl fields; empty without eval rows. Collective."""
        begin, progress = time.perf_counter(), self._progress
        evaluations = [each for name in self._data.eval_sizes if (each := self._evaluate(engine, name)) is not None]
        if not evaluations:
            return {}
        # The first source decides about the best step, whatever else is evaluated.
        progress.record_evaluation(evaluations[0].loss)
        self._records.mark("evaluation", begin, time.perf_counter())
        for each in evaluations:
            self._say(f"step {progress.num_done}  {each}")
        sources = {each.name: each.fields() for each in evaluations if each.name}
        fields: dict[str, Any] = {f"eval_{key}": value for key, value in evaluations[0].fields().items()}
        if sources:
            fields["eval_sources"] = sources
        self._callbacks.notify("on_evaluate", metrics=dict(fields))
        return fields

    def evaluate_missed(self, engine: Engine) -> None:
        """Repeat an evaluation lost with a killed process, if later decisions depend on the result. Collective."""
        progress = self._progress
        decides = self._keeps_best or self._train.early_stopping_patience is not None
        if decides and self.is_due and progress.num_done and progress.eval_step != progress.num_done:
            self.evaluate(engine)

    def evaluate_last(self, engine: Engine) -> None:
        """Evaluate the weights after the last step, unless done already. Collective."""
        if not self.is_due:  # the final evaluation needs the newest weights
            engine.catch_up()
        if self._progress.eval_step != self._progress.num_done:
            self._records.amend(self._progress.num_done, self.evaluate(engine))

    def _evaluate(self, engine: Engine, name: str) -> Evaluation | None:
        """Evaluate the first rows of a source. Collective."""
        data, objective = self._data, self._objective
        comm, own = self._comm, self._share
        batch_size = self._num_rows
        num_rows = data.eval_sizes[name]
        num_done = num_rows
        most = None
        if self._train.eval_batches != "all":
            most = int(self._train.eval_batches)
            num_done = min(num_rows, most * batch_size)
        num_counted = 0
        total = 0.0
        sums = Counter[str]()
        tally = Tally(num_done, "rows")
        self._tell(f"evaluating {name or 'held-out rows'}", tally)
        for index, rows in enumerate(data.eval_batches(batch_size, most, own.number, own.num_shares, name)):
            batch = own.apply(objective, rows, index, min(batch_size, num_rows - index * batch_size))
            counted = 0
            if own.is_counted:  # ranks with shared rows have the same targets
                counted = objective.count(batch)
            (count,) = comm.sum_in_order([counted], "targets of the evaluation")
            # Skip a batch without a target on any rank: the mean would be 0 / 0.
            if count:
                num_counted += round(count)
                total += float(engine.evaluate(batch, objective.loss)) * count
                sums.update({key: value * count for key, value in objective.loss_metrics(comm).items()})
            tally.add(min(batch_size, num_rows - index * batch_size))
        if not num_counted:
            return None
        rows_done = f"{num_counted:,} {objective.count_unit} in {num_done:,} of {num_rows:,} rows"
        loss, metrics = total / num_counted, {key: value / num_counted for key, value in sums.items()}
        if objective.loss is None:  # a mean over tokens
            metrics = {"perplexity": math.inf}
            if loss < 700:  # otherwise beyond the float range
                metrics["perplexity"] = math.exp(loss)
            if objective.takes_labels and (num_bytes := data.eval_bytes(num_done, name)):
                # The information in all targets over their text bytes: different tokenizers compare.
                metrics["bits_per_byte"] = loss * num_counted / math.log(2) / num_bytes
        return Evaluation(name, loss, metrics, rows_done)
