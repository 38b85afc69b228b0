"""Evaluations in a run: loss over held-out rows, with the usual derived metrics."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.training.build import Run
from offload.training.callbacks import Callbacks
from offload.training.progress import RunProgress
from offload.training.records import Records
from offload.training.shares import Share

_TOLD = {
    "perplexity": "perplexity {:.4g}",
    "bits_per_byte": "{:.4f} bits a byte",
    "rewards/accuracies": "accuracy {:.2f}",
    "rewards/margins": "margin {:.3g}",
}
"""Printed metrics and their formats."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation result over some rows."""

    name: str
    """Eval source name; empty for rows held out from the training data."""
    loss: float
    """Mean loss over all ranks, per target token in nats, or per unit in `Objective.counted`."""
    measured: Mapping[str, float]
    """Further metrics, by their names in metrics.jsonl."""
    rows: str
    """Description of the evaluated rows."""

    @classmethod
    def of_tokens(cls, name: str, loss: float, num_tokens: int, num_bytes: int | None, rows: str) -> Evaluation:
        """Return the result for a mean over tokens, with perplexity and bits per byte.

        Perplexity is inf beyond the float range. Bits per byte divides the information in all targets by their text
        bytes, so different tokenizers compare. `num_bytes`: None if unknown; then bits per byte is missing.
        """
        measured = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
        if num_bytes:
            measured["bits_per_byte"] = loss * num_tokens / math.log(2) / num_bytes
        return cls(name, loss, measured, rows)

    def fields(self) -> dict[str, float]:
        """Return the fields for a metrics.jsonl line."""
        return {"loss": self.loss, **self.measured}

    def __str__(self) -> str:
        told = "".join(f", {text.format(self.measured[key])}" for key, text in _TOLD.items() if key in self.measured)
        of = f" of {self.name}" if self.name else ""
        return f"eval loss {self.loss:.4f}{told} over {self.rows}{of}"


class Evaluations:
    """Evaluations in a run: after due steps, and at the end."""

    def __init__(
        self,
        run: Run,
        comm: Comm,
        records: Records,
        stands: RunProgress,
        callbacks: Callbacks,
        say: Callable[[str], None],
    ) -> None:
        """`callbacks` receive an event per evaluation; `say` prints a line."""
        self._data, self._objective, self._train = run.data, run.objective, run.config.train
        self._comm, self._records, self._stands, self._say = comm, records, stands, say
        self._callbacks = callbacks
        self._share = Share.of(run.config, comm)
        self._keeps_best = run.config.checkpoint.keep_best

    @property
    def is_due(self) -> bool:
        """True if an evaluation is due after the last completed step."""
        every = self._train.eval_every
        return every > 0 and self._stands.num_done % every == 0

    @property
    def has_new_best(self) -> bool:
        """True if the weights after the last step are the best so far and should be kept."""
        return self._keeps_best and self._stands.best.step == self._stands.num_done

    def make(self, engine: Engine) -> dict[str, Any]:
        """Evaluate all sources. Return the metrics.jsonl fields; empty without eval rows. Collective."""
        begin, stands = time.perf_counter(), self._stands
        found = [each for name in self._data.evals if (each := self._evaluate(engine, name)) is not None]
        if not found:
            return {}
        stands.evaluated(found[0].loss)
        self._records.mark("evaluation", begin, time.perf_counter())
        for each in found:
            self._say(f"step {stands.num_done}  {each}")
        sources = {each.name: each.fields() for each in found if each.name}
        fields: dict[str, Any] = {f"eval_{key}": value for key, value in found[0].fields().items()}
        fields |= {"eval_sources": sources} if sources else {}
        self._callbacks.tell("on_evaluate", metrics=dict(fields))
        return fields

    def make_missed(self, engine: Engine) -> None:
        """Repeat an evaluation lost with a killed process, if later decisions depend on the result. Collective."""
        stands = self._stands
        decides = self._keeps_best or self._train.early_stopping_patience is not None
        if decides and self.is_due and stands.num_done and stands.eval_step != stands.num_done:
            self.make(engine)

    def make_last(self, engine: Engine) -> None:
        """Evaluate the weights after the last step, unless done already. Collective."""
        if not self.is_due:  # the final evaluation needs the newest weights
            engine.catch_up()
        if self._stands.eval_step != self._stands.num_done:
            self._records.amend(self._stands.num_done, self.make(engine))

    def _evaluate(self, engine: Engine, name: str) -> Evaluation | None:
        """Evaluate the first rows of a source. Collective."""
        data, objective, comm, batch_size = self._data, self._objective, self._comm, self._train.num_rows
        own = self._share
        most = None if self._train.eval_batches == "all" else int(self._train.eval_batches)
        num_rows = data.evals[name].num_rows
        num_done = num_rows if most is None else min(num_rows, most * batch_size)
        num_counted, total, sums = 0, 0.0, Counter[str]()
        for index, rows in enumerate(data.eval_batches(batch_size, most, own.number, own.num_shares, name)):
            batch = own.apply(objective, rows, index, min(batch_size, num_rows - index * batch_size))
            counted = objective.count(batch) if own.is_counted else 0
            (count,) = comm.sum_in_order([counted], "targets of the evaluation")
            if count:
                num_counted += round(count)
                total += float(engine.evaluate(batch, objective.loss)) * count
                sums.update({key: value * count for key, value in objective.measured(comm).items()})
        if not num_counted:
            return None
        rows_done = f"{num_counted:,} {objective.counted} in {num_done:,} of {num_rows:,} rows"
        if objective.loss is not None:
            measured = {key: value / num_counted for key, value in sums.items()}
            return Evaluation(name, total / num_counted, measured, rows_done)
        num_bytes = data.eval_bytes(num_done, name) if objective.takes_labels else None
        return Evaluation.of_tokens(name, total / num_counted, num_counted, num_bytes, rows_done)
