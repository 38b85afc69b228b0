"""The training run, from a configuration to a folder: data, model, engine, steps, evaluation, export."""

from __future__ import annotations

import gc
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.checkpoint import reload
from offload.checkpoint.folder import Checkpoints
from offload.checkpoint.hf_write import check_place
from offload.checkpoint.manifest import MANIFEST
from offload.config import Config
from offload.data.dataset import share
from offload.engine.engine import Engine, StepResult
from offload.engine.updates import COARSE_RATIO
from offload.errors import ConfigError, InterruptedRun, OffloadError, format_bytes
from offload.lanes.throttle import parse_throttle
from offload.native_io import disk_error
from offload.objectives import Batch
from offload.optim.lr import learning_rate
from offload.partition.joining import open_comm
from offload.parts import placement, update_rule, with_decisions
from offload.planning.environment import untested
from offload.records import NoRecords, Records, tiers
from offload.resume import Start, find_start
from offload.run import make_run
from offload.run_folder import RunFolder
from offload.saves import Saves
from offload.signals import StopSignals
from offload.telemetry.progress import NoProgress, Progress, make_progress
from offload.tiers.directories import check_dirs
from offload.tiers.folder import remove_stale
from offload.together import Notes, Parting, agree, as_one, common, is_common, raise_first, shared, tally

NUM_EVAL_BATCHES = 8  # the same rows each time, so that evaluations of a run can be compared


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. `loss` is of the last step; `eval_loss` of the last evaluation, None without eval rows."""

    dir: Path
    steps: int
    loss: float
    eval_loss: float | None
    export: Path | None


class Trainer:
    """`Trainer(config).run()` does what `python -m offload.train` does.

    Over several ranks (by torchrun's variables, or the process group that there is) it is collective. Rank 0 writes the
    run folder and prints; the others print what is theirs alone.

    Raises OffloadError, one on every rank; InterruptedRun after a signal.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._engine: Engine | None = None
        self._folder: RunFolder | None = None
        self._records = NoRecords()
        self._eval_loss: float | None = None
        self._loss = math.nan
        self._num_done = self._num_coarse = 0  # of the run, in this process and before
        self._first_step, self._first_s = 0, 0.0  # at which this process begins, and what the run had taken before

    def run(self) -> TrainResult:
        self.config.check()
        self._comm = comm = open_comm()
        parting = Parting(comm)
        self._is_first = comm.rank == 0
        self._progress: Progress = make_progress(self.config.train.log_every) if self._is_first else NoProgress()
        self._notes = Notes(comm, self._say if self._is_first else print)
        with StopSignals(self._say) as self._stop:
            if comm.size > 1:
                comm.on_lost(lambda _error: self._stop.ignore())
            try:
                with _shown_warnings(self._notes.add):
                    result = self._run()
                comm.close()
                return result
            except BaseException as error:
                if comm.size == 1:
                    raise
                self._stop.ignore()
                left = parting.leave(error)  # before anything is closed here, which would wait for the others
                if left is error:
                    raise
                raise left from error
            finally:
                self._progress.close()
                self._records.close()
                self._close_engine()
                if self._is_first and self._folder is not None:
                    self._folder.close()

    def _run(self) -> TrainResult:
        comm = self._comm
        agree(comm, "the configuration", dict(self.config.items()))
        if text := untested():
            self._say(f"note: {text}")
        with as_one(comm, "look for a checkpoint"):
            found = None
            if self._is_first:  # in the folder that is this process's alone by then
                self._folder = RunFolder.open(self.config)
                for partial in Checkpoints(self._folder.checkpoints).clear():
                    self._say(f"note: {partial.name}, left by a process that was killed, is removed.")
                found = find_start(self.config)
                if not found.folders:
                    found.config.check_source()
                self._folder.check(found.config, resumes=bool(found.folders))
                if found.config.checkpoint.export:
                    check_place(self._folder.hf, replace=True)
                self._records = Records(self._folder)
        start: Start = shared(comm, found, "start of the run")
        self.config = start.config
        with as_one(comm, "check of the settings"):  # what cannot be placed or played is refused before any work
            self.config.check_ranks(comm.size)
            dirs = placement(self.config).dirs
            if dirs:
                check_dirs(dirs)
            parse_throttle(self.config.offload.throttle)
            update_rule(self.config)
            if self._is_first:
                assert self._folder is not None
                for left in remove_stale(dirs, self._folder.earlier_pids()).removed:
                    self._say(f"note: {left.path}, left by this run when it was killed, is removed.")
        path = shared(comm, self._folder.path if self._folder else None, "run folder")
        self._folder = self._folder or RunFolder(path)
        run = make_run(start, comm, self._say, self._notes.add)
        self.config, self._kind, self._data, self._objective = run.config, run.kind, run.data, run.objective
        self._engine, self._files = run.engine, run.files
        self._notes.exchange()
        if run.meta is not None:
            self._num_done = self._first_step = run.meta["step"]
            self._first_s, self._num_coarse = run.meta["seconds"], run.meta["num_coarse"]
            self._loss, self._eval_loss = run.meta["loss"], run.meta["eval_loss"]
        section, last = self.config.checkpoint, self._num_done if run.meta is not None else None
        self._saves = Saves(comm, self._folder.checkpoints, section, self._say, last)
        self._stop.begin()
        try:
            try:
                self._train()
            finally:
                self._end_steps()
            return self._finish(self._folder)
        except Exception as error:
            if comm.size == 1 or is_common(error):  # what was saved before the failure is whole
                with suppress(OffloadError):
                    self._saves.settle()
            raise
        finally:
            self._saves.close()

    def _close_engine(self) -> None:
        """Free the states, before the export is loaded beside them."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # units, streams and modules refer to each other in rings

    def _say(self, text: str) -> None:
        self._progress.say(text)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        train, optimizer = self.config.train, self.config.optimizer
        assert self._engine is not None
        self._begun = time.monotonic()
        for step in itertools.count(self._num_done):
            if train.steps is not None and step >= train.steps:
                if step == self._first_step:
                    self._say(f"nothing is left of {train.steps} steps; raise --train.steps to train on.")
                return
            begin = time.perf_counter()
            batch = self._next_batch(step)
            if batch is None:
                return
            self._engine.lr = learning_rate(
                step,
                base=float(optimizer.lr or 0.0),
                schedule=optimizer.schedule,
                warmup_steps=optimizer.warmup_steps or 0,
                num_steps=train.steps,
            )
            result = self._engine.step(batch)
            end = time.perf_counter()
            if step == self._first_step:
                self._open_records(result)
            fields = self._fields(step, result, end - begin)
            self._num_done = step + 1
            self._num_coarse += result.coarse
            self._loss = fields["loss"]
            self._records.step(fields, begin, end, self._engine)
            is_eval_due = train.eval_every and (step + 1) % train.eval_every == 0
            if is_eval_due and not self._stop.is_agreed(self._comm):
                fields["eval_loss"] = self._evaluate()
            self._records.write(fields)
            if result.skipped:
                self._say(f"step {step + 1} skipped: a gradient was not finite; all states are as they were.")
            self._progress.step(fields, num_steps=train.steps, eta_s=self._eta())
            if self.config.checkpoint.every and self._num_done % self.config.checkpoint.every == 0:
                self._save()

    def _save(self, *, is_last: bool = False) -> None:
        """Begin to save all states, and where the run stands; the last time wait for it, and a failure is an error.
        Collective.
        """
        assert self._engine is not None
        begin = time.perf_counter()
        meta = {
            "step": self._num_done,
            "seconds": self._elapsed,
            "loss": self._loss,
            "eval_loss": self._eval_loss,
            "num_coarse": self._num_coarse,
            "data": self._data.state_dict(),
            "config": self.config.to_dict(),
        }
        self._records.sync()  # the run goes on from here, and its lines are to reach as far
        save = self._saves.save if is_last else self._saves.try_to_save
        save(self._engine, self._num_done, meta, self._files)
        self._records.mark("checkpoint", begin, time.perf_counter())

    @property
    def _elapsed(self) -> float:
        """Seconds since the first step of the run began, but for those when no process of it trained."""
        return self._first_s + time.monotonic() - self._begun

    def _next_batch(self, step: int) -> Batch | None:
        """Return this rank's rows of the step, or None on all ranks where one of them is told to stop or has no rows
        any more, or the time is over, by rank 0's count. One exchange; a save first, where one of them is told to.
        """
        comm, train = self._comm, self.config.train
        batch, failure = None, None
        try:
            batch = self._apply(self._data.batch(step, comm.rank, comm.size), step, train.batch_size)
        except StopIteration:
            pass
        except Exception as error:
            if comm.size == 1:
                raise
            failure = error
        wants_save, self._stop.wants_save = self._stop.wants_save, False
        is_late = step > 0 and train.max_seconds is not None and self._elapsed >= train.max_seconds
        votes = tally(
            comm,
            "what comes after a step",
            notes=self._notes.num_new,
            failed=failure is not None,
            stop=self._stop.requested,
            save=wants_save,
            late=self._is_first and is_late,
            saved=self._saves.is_due,
            without=batch is None,
        )
        if votes["notes"]:
            self._notes.exchange()
        if votes["failed"]:
            raise_first(comm, failure, "making of a batch")
        if votes["saved"] == comm.size:
            self._saves.settle()
        if votes["save"] and not votes["stop"] and step > self._first_step and self._saves.newest_step != step:
            self._save()
        if votes["stop"]:
            self._stop.agree(comm)
        elif votes["late"]:
            self._say(f"train.max_seconds ({train.max_seconds:g}) are over after {step} steps.")
        elif votes["without"] and not step:
            raise common(ConfigError("data.source has no rows for a first step; give more data."))
        elif votes["without"]:
            self._say(f"the data are at their end after {step} steps.")
        else:
            return batch
        return None

    def _apply(self, rows: Batch, step: int, num_rows: int) -> Batch:
        """Return the model's batch of this rank's share of `num_rows`."""
        first = share(num_rows, self._comm.rank, self._comm.size).start
        return self._objective.apply(rows, step, first, num_rows)

    def _fields(self, step: int, result: StepResult, seconds: float) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl.

        seconds: all that the step took, which is more than `result.seconds`: also the making of its batch, and the
        passes before the first step. Its updates may run on into the next step.
        """
        assert self._engine is not None
        counters, tokens = self._engine.counters, result.tokens or 0
        fields: dict[str, Any] = {
            "step": step + 1,
            "tokens": tokens,
            "loss": float(result.loss),
            "lr": self._engine.lr,
            "grad_norm": float(result.grad_norm),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "step_seconds": seconds,
            "h2d_bytes": counters.h2d_bytes,
            "d2h_bytes": counters.d2h_bytes,
            "nvme_read_bytes": counters.nvme_read_bytes,
            "nvme_write_bytes": counters.nvme_write_bytes,
            "lanes": {name: asdict(lane) for name, lane in result.lanes.items()},
            "peak_device_bytes": counters.peak_device_bytes,
            "peak_host_bytes": counters.peak_host_bytes,
            "peak_pinned_bytes": counters.peak_pinned_bytes,
        }
        if self._comm.size > 1:
            fields |= {
                "all_gather_elements": counters.all_gather_elements,
                "reduce_scatter_elements": counters.reduce_scatter_elements,
            }
        if self._saves.stalled_s:
            fields["checkpoint_seconds"], self._saves.stalled_s = self._saves.stalled_s, 0.0
        if self.config.train.clip == "speculative":
            fields |= {"corrected": result.corrected, "coarse": result.coarse}
        return fields

    def _open_records(self, result: StepResult) -> None:
        """Write what the run is, once its first step has shown that it can be done."""
        assert self._engine is not None
        assert self._folder is not None
        self.config = with_decisions(self.config, self._engine)
        pids = self._comm.gather_objects(os.getpid(), "process ids")
        if self._is_first:
            self._saves.begin()
        try:
            self._records.open(self.config, self._engine, result, pids, self._first_step)
        except OSError as error:
            raise disk_error("the write of what the run is", self._folder.path, error) from error
        held = tiers(self._engine, self.config)
        shown = [
            f"{tier} {format_bytes(each['bytes'])}"
            + (f" of {format_bytes(each['budget_bytes'])}" if each["budget_bytes"] is not None else "")
            for tier, each in held.items()
        ]
        self._say(f"tiers: {', '.join(shown)}; run folder: {self._folder.path}")
        if self.config.offload.nvme_dir and "nvme" not in held:
            self._say("note: offload.nvme_dir is set, and nothing goes there: the tiers above have room for all of it.")

    def _end_steps(self) -> None:
        """Write what was kept of the steps, however they ended."""
        try:
            self._records.end_steps()
        except OSError as error:
            self._say(f"note: the trace could not be written: {error}")
        if self._num_coarse:
            self._say(
                f"coarse: in {self._num_coarse} of {self._num_done} steps the gradients were clipped more than "
                f"{COARSE_RATIO:g} times harder than their first updates had taken for granted; the corrections of "
                "these steps are less exact than others. --train.clip deferred needs no corrections."
            )

    def _eta(self) -> float | None:
        """Return how many seconds the steps still take: by their number or the time limit, whichever ends first."""
        train = self.config.train
        ends = [] if train.max_seconds is None else [train.max_seconds - self._elapsed]
        if train.steps is not None:
            a_step = (self._elapsed - self._first_s) / (self._num_done - self._first_step)
            ends.append((train.steps - self._num_done) * a_step)
        return max(0.0, min(ends)) if ends else None

    def _evaluate(self) -> float | None:
        """Return the mean loss over the target tokens of the first eval rows, of all ranks; None without eval rows."""
        assert self._engine is not None
        comm, size, begin = self._comm, self.config.train.batch_size, time.perf_counter()
        batches = [
            self._apply(rows, index, min(size, self._data.num_eval_rows - index * size))
            for index, rows in enumerate(self._data.eval_batches(size, NUM_EVAL_BATCHES, comm.rank, comm.size))
        ]
        counts = comm.sum_in_order([self._objective.count(batch) for batch in batches], "targets of the evaluation")
        losses = [float(self._engine.evaluate(batch)) * n for batch, n in zip(batches, counts, strict=True) if n]
        num_tokens = round(sum(counts))
        if not num_tokens:
            return None
        self._eval_loss = sum(losses) / num_tokens
        self._records.mark("evaluation", begin, time.perf_counter())
        num_rows = self._data.num_eval_rows
        rows = f"{min(num_rows, NUM_EVAL_BATCHES * size):,} of {num_rows:,} rows"
        self._say(f"step {self._num_done}  eval loss {self._eval_loss:.4f} over {num_tokens:,} tokens in {rows}")
        return self._eval_loss

    # -- after the last step -----------------------------------------------------------------------------------------

    def _finish(self, folder: RunFolder) -> TrainResult:
        """Save, evaluate, export, and prove the export. After a signal only save, and raise InterruptedRun."""
        assert self._engine is not None
        self._progress.close()
        comm, every = self._comm, self.config.train.eval_every
        self._saves.settle()
        self._leave_if_told(folder)
        has_some = self.config.checkpoint.every or self._saves.last_step is not None
        if has_some and self._saves.last_step != self._num_done > 0:
            self._save()
            self._saves.settle()
        if not every or self._num_done % every:
            if (loss := self._evaluate()) is not None:
                self._records.amend({"eval_loss": loss})
            self._leave_if_told(folder)
        exported = probe = None
        if self.config.checkpoint.export and (self._num_done > self._first_step or not self._is_exported(folder)):
            rows = next(self._data.eval_batches(1, 1), None) or self._data.batch(0)
            probe = reload.take_probe(self._engine, self._objective.apply(rows, 0))
            exported = self._export(folder)
        self._close_engine()
        with as_one(comm, "check of the export"):
            if self._is_first and exported is not None and probe is not None:
                self._check_export(exported, probe)
        self._notes.exchange()
        if self._saves.failure is not None:
            raise common(self._saves.unsaved(self._num_done, exported))
        self._say(f"done: {self._num_done} steps, loss {self._loss:.4f}, in {folder.path}")
        return TrainResult(folder.path, self._num_done, self._loss, self._eval_loss, exported)

    def _leave_if_told(self, folder: RunFolder) -> None:
        """Save and raise InterruptedRun, on all ranks, where one of them was told to stop."""
        if not self._stop.is_agreed(self._comm):
            return
        of = f" of {self.config.train.steps}" if self.config.train.steps is not None else ""
        told = f"interrupted by {self._stop.name} after step {self._num_done}{of}"
        if not self._num_done:
            raise common(InterruptedRun(f"{told}: there was nothing to save."))
        if self._saves.last_step != self._num_done:
            self._save(is_last=True)
        raise common(
            InterruptedRun(
                f"{told}; the states are saved in {folder.checkpoints}. The same command with --run.dir {folder.path} "
                "goes on from there."
            )
        )

    def _is_exported(self, folder: RunFolder) -> bool:
        """Tell, alike on all ranks, whether hf/ is of the step that the run began at: made after the checkpoint."""
        saved = folder.checkpoints / f"step-{self._num_done}" / MANIFEST
        is_newer = False
        with suppress(OSError):
            made = (folder.hf / "config.json").stat().st_mtime_ns
            is_newer = self.config.checkpoint.resume == "auto" and made >= saved.stat().st_mtime_ns
        return not self._comm.any(self._is_first and not is_newer, "whether to export")

    def _export(self, folder: RunFolder) -> Path:
        """Write the Hugging Face folder, tokenizer included: whole, or not at all."""
        assert self._engine is not None
        self._engine.export(folder.hf, files=self._files, replace=True)
        self._say(f"exported to {folder.hf}")
        return folder.hf

    def _check_export(self, folder: Path, probe: reload.Probe) -> None:
        reason = reload.reason_not_to_reload(folder)
        if reason is not None:
            self._say(f"the export is not loaded again for a check: {reason}.")
            return
        model = reload.reload(folder, self._kind.auto)
        found = reload.check_logits(model, probe, self.config.train.precision)
        self._say(f"reloaded {folder} with transformers: {found}")
        if self._kind.name == "causal" and self._data.tokenizer is not None:
            prompt, text = reload.sample_text(
                model, self._data.tokenizer, probe.batch["input_ids"][:, :16], seed=self.config.run.seed
            )
            self._say(f"sample: {prompt!r} -> {text!r}")


@contextmanager
def _shown_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Note what our own modules warn of; other libraries' warnings are not the user's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"offload\.")
        warnings.showwarning = lambda message, *_rest, **_more: note(str(message))
        yield
