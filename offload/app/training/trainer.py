"""The training run, from configuration to folder: data, model, engine, steps, evaluation, export."""

from __future__ import annotations

import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from offload.app.config.config import Config
from offload.app.environment import describe_untested
from offload.app.hf.model_object import ModelObject
from offload.app.telemetry.lasting_output import lasting_output
from offload.app.telemetry.progress import Progress, make_progress
from offload.app.training.build import make_run
from offload.app.training.callbacks import Callbacks
from offload.app.training.checkpoints import Saves
from offload.app.training.decisions import with_decisions
from offload.app.training.evaluation import Evaluations
from offload.app.training.finish import begin_export, export_or_save, load_best
from offload.app.training.interrupts import StopSignals
from offload.app.training.objectives import Batch
from offload.app.training.parts import rate_at
from offload.app.training.planner import planned_advice
from offload.app.training.progress import Best, RunProgress
from offload.app.training.ranks import Notes, RankExit, Share, is_shared, next_share, tally
from offload.app.training.records import Records, describe_coarse, describe_streaming, describe_tiers, step_fields
from offload.app.training.resume import open_run
from offload.app.training.run_folder import RunFolder
from offload.app.training.task import TASKS
from offload.distributed.joining import open_comm
from offload.distributed.outcomes import share_failure, share_outcome
from offload.engine.engine import Engine
from offload.engine.methods.result import StepResult
from offload.errors import ConfigError, DiskError, InterruptedRun, OffloadError, common, counted
from offload.native.io import disk_error


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    `dir`: run folder. `loss`: last step. `eval_loss`: last evaluation; None without eval rows. `export`: export folder;
    None without a new export. `best`: best evaluation.
    """

    dir: Path
    steps: int
    loss: float
    eval_loss: float | None
    export: Path | None
    best: Best


class Trainer:
    """Trains from Python: `Trainer(config).run()` equals `python -m offload.train`.

    - config: a Config, a YAML file path, or a mapping such as {"train": {"steps": 10}}. None: the built-in run.
    - model: a module instead of model.path, consumed by the run. From transformers, or any module with
      forward(input_ids, labels) returning a loss.
    - data, eval_data: rows instead of data.source and data.eval_source, as texts or mappings with the keys in a format
      (docs/reference/data.md). Any iterable, or a dataset with numbered rows.
    - callbacks: see `Callbacks`; same methods as transformers' TrainerCallback.

    Collective over several ranks (from torchrun's variables, or an existing process group). Rank 0 writes the run
    folder and prints; other ranks print only their own messages.

    Raises OffloadError, the same on every rank; InterruptedRun after a signal.
    """

    def __init__(
        self,
        config: Config | str | Path | Mapping[str, Any] | None = None,
        *,
        model: nn.Module | None = None,
        data: Any = None,
        eval_data: Any = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.config, self._user_model = merge_arguments(config, model, data, eval_data)
        self._callbacks = Callbacks(callbacks)
        # Opened by `run`, and closed there after any failure.
        self._open_engine: Engine | None = None
        self._folder: RunFolder | None = None
        self._records = Records()

    def run(self) -> TrainResult:
        """Train, and return the result. Text that cannot be printed, for example into a closed pipe, is dropped."""
        with lasting_output():
            return self._run_over_ranks()

    def _run_over_ranks(self) -> TrainResult:
        self.config.check(may_go_on=True)
        comm = open_comm(self.config.offload.device)
        self._comm = comm
        rank_exit = RankExit(comm)
        self._is_first = comm.rank == 0
        self._progress = Progress()
        show: Callable[[str], None] = print
        if self._is_first:
            self._progress = make_progress(self.config.train.log_every)
            show = self._say
        self._notes = Notes(comm, show)
        with StopSignals(self._say) as self._stop:
            # A lost rank ends this one too: a signal must not begin a save any more.
            comm.on_lost(lambda _error: self._stop.ignore())
            leaves_at_once = False
            try:
                with _forward_warnings(self._notes.add):
                    result = self._run()
                comm.close()
                return result
            except BaseException as error:
                leaves_at_once = isinstance(error, KeyboardInterrupt)
                if comm.size == 1:
                    raise
                self._stop.ignore()
                exit_error = rank_exit.leave(error)  # before any close below, which would wait for the other ranks
                if exit_error is error:
                    raise
                raise exit_error from error
            finally:
                self._progress.close()
                self._records.close()
                self._close_engine()
                if not leaves_at_once:  # last: torchrun stops the other ranks once one leaves
                    self._records.report(self._say)
                if self._is_first and self._folder is not None:
                    self._folder.close()

    def _run(self) -> TrainResult:
        comm = self._comm
        # Ranks with other settings would meet in other exchanges, and wait forever.
        comm.agree("the configuration", dict(self.config.items()))
        if text := describe_untested():
            self._say(f"note: {text}")
        self._folder, start = open_run(self.config, comm, self._say)
        self.config = start.config
        if self._is_first:
            self._records = Records(self._folder, self._say)
        run = make_run(start, comm, self._say, self._notes.add, self._user_model, self._progress.show_activity)
        self.config = run.config
        self._objective = run.objective
        self._trainable = run.setup.trainable
        self._open_engine = run.engine
        self._progress.begin_step(run.engine.num_steps + 1, run.engine.amount)
        folders = () if run.meta is None else start.folders
        # Values of the initial weights, for example of a reference, are measured before the first step.
        data, files = run.objective.prepare(run.config, run.engine, run.data, comm, folders, self._say)
        run = replace(run, data=data, extra_files={**run.extra_files, **files})
        self._data = run.data
        self._files = run.extra_files
        self._planned = run.planned
        self._notes.exchange()
        self._share = Share.of(self.config, comm)
        self._run_progress = RunProgress(run.meta, self.config.train)
        self._saves = Saves(run, comm, self._folder, self._run_progress, self._callbacks, self._say)
        self._export = begin_export(self._folder, run, self._say)
        self._evaluations = Evaluations(
            run, comm, self._records, self._run_progress, self._callbacks, self._say, self._progress.show_activity
        )
        with share_failure(comm, "look at the disk"):
            if self._is_first and self._run_progress.num_done != self.config.train.steps:
                self._say(*run.disk_needs.check(self._folder.path, self.config, self._run_progress.num_done))
        # From here on a signal saves: there are states, and a folder for them.
        self._stop.begin(run.engine.amount)
        self._callbacks.begin(run, self._run_progress)
        try:
            try:
                self._train()
            finally:
                self._records.end_steps(self._say)
                self._say(*describe_coarse(self._run_progress))
            return self._finish(self._folder)
        except Exception as error:
            if is_shared(comm, error):  # a save completed before the failure is intact
                with suppress(OffloadError):
                    self._saves.settle()
            raise
        finally:
            self._saves.close()

    @property
    def _engine(self) -> Engine:
        assert self._open_engine is not None
        return self._open_engine

    def _close_engine(self) -> None:
        """Free the states, before the export is loaded."""
        if self._open_engine is not None:
            self._open_engine.close()
            self._open_engine = None
            gc.collect()  # units, streams and modules form reference cycles

    def _say(self, *texts: str) -> None:
        for text in texts:
            self._progress.say(text)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        train = self.config.train
        progress, evaluations = self._run_progress, self._evaluations
        evaluations.evaluate_missed(self._engine)
        for step in itertools.count(progress.num_done):
            if train.steps is not None and step >= train.steps:
                if step == progress.first_step:
                    self._say(f"already at step {step} of {train.steps}; raise --train.steps to train on.")
                return
            # The time of a step includes the batch: slow data must show.
            begin = time.perf_counter()
            batch = self._next_batch(step)
            if batch is None:
                return
            self._callbacks.notify("on_step_begin")
            self._say(*self._trainable.before_step(self._engine, step))
            self._engine.lr = rate_at(step, self.config, progress.num_skipped)
            mark = {}
            if not self.config.optimizer.has_gradients and step == progress.first_step:  # for replay
                mark["weights"] = self._engine.weights_mark()
            self._progress.begin_step(step + 1, self._engine.amount)
            with planned_advice(self._planned.misfit):
                result = self._engine.step(batch, self._objective.loss)
            end = time.perf_counter()
            if step == progress.first_step:
                self._open_records(result)
            elif self.config.train.clip != self._engine.clip:  # decided by the steps so far
                self.config = self._records.decide(self.config, self._engine)
            fields = step_fields(progress, self._data.num_tokens(step), result, end - begin, self._engine, self.config)
            fields |= self._objective.loss_metrics(self._comm) | mark | self._saves.take_stalled()
            progress.count_step(fields, result)
            self._records.step(fields, begin, end, self._engine)
            self._callbacks.end_step(fields)
            if evaluations.is_due and not self._stop.is_agreed(self._comm):  # a stop saves first
                fields |= evaluations.evaluate(self._engine)
            # One line for a step and the evaluation after the step.
            self._records.write(fields)
            if result.skipped:
                self._say(f"step {step + 1} skipped: a gradient was not finite; all states are as they were.")
            self._progress.step(fields, num_steps=train.steps, eta_s=progress.eta_s)
            every = self.config.checkpoint.every
            if (isinstance(every, int) and progress.num_done % every == 0) or evaluations.has_new_best:
                self._save()

    def _save(self, *, is_last: bool = False) -> None:
        """Begin to save states and progress. Collective.

        The last save is waited for, and raises on failure.
        """
        begin = time.perf_counter()
        own = {"data": self._data.state_dict(), "config": self.config.to_dict()}
        self._records.sync()  # a resumed run needs all metrics lines up to here
        meta = self._run_progress.state_dict() | self._callbacks.state_dict() | own
        save: Callable[..., None] = self._saves.try_to_save
        if is_last:
            save = self._saves.save
        save(self._engine, self._run_progress.num_done, meta, self._files)
        self._records.mark("checkpoint", begin, time.perf_counter())

    def _save_last(self) -> None:
        """Save all states, unless done already. Raises on failure. Collective."""
        if self._saves.last_step != self._run_progress.num_done:
            self._save(is_last=True)

    def _next_batch(self, step: int) -> Batch | None:
        """Return this rank's rows for the step, in one exchange with the other ranks.

        None on all ranks: a stop request or the end of the data on any rank, or the end of the time on rank 0. Also
        runs requested saves and evaluations first.
        """
        comm, control = self._comm, self._callbacks.control
        # Before the exchange: a failure is one of the answers to the other ranks.
        batch, failure = next_share(self._data, self._objective, self._share, step, self.config.num_rows)
        # One exchange for all questions: each costs a round trip between machines.
        votes = tally(
            comm,
            "what comes after a step",
            notes=self._notes.num_new,
            failed=failure is not None,
            stop=self._stop.requested,
            save=self._stop.take_save() or control.take("should_save") or (self._is_first and self._saves.is_time),
            evaluate=control.take("should_evaluate"),
            over=control.should_training_stop or (self._is_first and bool(self._run_progress.end_reason)),
            unsaved=not self._saves.is_due,
            without=batch is None,
        )
        if votes["notes"]:
            self._notes.exchange()
        if votes["failed"]:
            share_outcome(comm, failure, "making of a batch")
        if not votes["unsaved"]:
            self._saves.settle()
        if votes["evaluate"] and not votes["stop"] and self._run_progress.eval_step != step:
            self._records.amend(step, self._evaluations.evaluate(self._engine))
            votes["save"] += self._evaluations.has_new_best
        is_saved = step <= self._run_progress.first_step or self._saves.newest_step == step
        if votes["save"] and not votes["stop"] and not is_saved:
            self._save()
        if votes["stop"]:
            self._stop.is_agreed(comm)
        elif votes["over"]:
            self._say(
                f"{self._run_progress.end_reason or 'a callback asks for it'}, so the run ends after step {step}."
            )
        elif votes["without"]:
            self._say(f"the data end after {counted(step, 'step')}.")
        else:
            return batch
        return None

    def _open_records(self, result: StepResult) -> None:
        """Write the record files, after the first step has succeeded."""
        assert self._folder is not None
        self.config = with_decisions(self.config, self._engine)
        # By these numbers a report sees whether the run is alive.
        pids = self._comm.gather_objects(os.getpid(), "process ids")
        self._saves.begin()
        try:
            first_step, forecast = self._run_progress.first_step, self._planned.forecast
            self._records.open(self.config, self._engine, result, pids, first_step, forecast)
        except OSError as error:
            raise disk_error("the write of what the run is", self._folder.path, error) from error
        self._say(describe_tiers(self._engine, self.config, self._folder.path))

    # -- after the last step -----------------------------------------------------------------------------------------

    def _finish(self, folder: RunFolder) -> TrainResult:
        """Save, evaluate, export, and check the export. After a stop signal: save and raise InterruptedRun."""
        progress, comm = self._run_progress, self._comm
        show = self._progress.show_activity
        show("completing the run")
        self._saves.settle()
        self._leave_if_requested(folder)
        votes = tally(comm, "whether to save the last step", save=self._callbacks.control.take("should_save"))
        has_checkpoints = isinstance(self.config.checkpoint.every, int) or self._saves.last_step is not None
        if (votes["save"] or has_checkpoints) and self._saves.last_step != progress.num_done > 0:
            self._save()
            self._saves.settle()
        self._evaluations.evaluate_last(self._engine)
        if self._evaluations.has_new_best and self._saves.last_step != progress.num_done:
            self._save()
            self._saves.settle()
        self._leave_if_requested(folder)
        self._engine.catch_up()  # the export needs the newest weights
        has_export = not self.config.checkpoint.export or self._export.is_done(self.config, comm, progress)
        exported = None
        if not has_export:
            best = load_best(self._engine, self.config, progress, folder, self._say)
            exported = export_or_save(
                comm,
                partial(self._export.write, self._engine),
                self._save_last if best is None else lambda: None,
                partial(self._leave_if_requested, folder),
                self._say,
                waits=self.config.checkpoint.on_error != "stop",
                saved_message="The last step is done, and its states are saved: `python -m offload.export "
                f"{best or folder.path} OUT` exports them to a folder OUT, also on another disk.",
            )
        self._callbacks.notify("on_train_end", export=exported)
        self._say(*describe_streaming(progress.last, self._engine))
        show("loading the export for a check")  # the last stage holds the engine
        self._close_engine()
        with share_failure(comm, "check of the export"):
            if self._is_first and exported is not None:
                self._export.check()
        self._notes.exchange()
        if self._saves.failure is not None:
            raise common(self._saves.unsaved_error(progress.num_done, exported))
        self._say(f"done: {counted(progress.num_done, 'step')}, loss {progress.loss:.4f}, in {folder.path}")
        return TrainResult(folder.path, progress.num_done, progress.loss, progress.eval_loss, exported, progress.best)

    def _leave_if_requested(self, folder: RunFolder) -> None:
        """After a stop request on any rank: save, run a due evaluation, and raise InterruptedRun on all ranks."""
        if not self._stop.is_agreed(self._comm):
            return
        of = ""
        if self.config.train.steps is not None:
            of = f" of {self.config.train.steps}"
        text = f"interrupted by {self._stop.name} after step {self._run_progress.num_done}{of}"
        if not self._run_progress.num_done:
            raise common(InterruptedRun(f"{text}: there was nothing to save."))
        try:
            self._save_last()
        except DiskError as error:
            raise self._saves.ending_error(self._run_progress.num_done, error) from error
        if self._evaluations.is_due or self._run_progress.num_done == self.config.train.steps:
            self._evaluations.evaluate_last(self._engine)
        again = f"The same command with --run.dir {folder.path} goes on from there."
        raise common(InterruptedRun(f"{text}; the states are saved in {folder.checkpoints}. {again}"))


@contextmanager
def _forward_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Collect warnings from our own modules, and hide those from other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"offload\.")
        warnings.showwarning = lambda message, *_rest, **_more: note(str(message))
        yield


def merge_arguments(config: Any, model: Any, data: Any, eval_data: Any) -> tuple[Config, ModelObject | None]:
    """Return the configuration for a run, and the model object, if any.

    `config`: as for `Trainer`. `model`, `data`, `eval_data`: None for the configured ones. Raises ConfigError.
    """
    if config is None or isinstance(config, Mapping):
        config = Config.load(None, config, may_go_on=True)
    elif isinstance(config, str | Path):
        config = Config.load(config, may_go_on=True)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}; it should be a path, a mapping of settings, or a Config."
        )
    # The caller's object must not change.
    config = config.model_copy(deep=True)
    user_model = None
    if model is not None:
        user_model = ModelObject(model)
        if config.lora.adapts:
            raise ConfigError(
                "an adapter is configured (lora) over a model given in Python, but a later load must find its base "
                "again: set model.path to the folder of the base."
            )
        _put(config, "model.path", user_model.path)
        if config.data.tokenizer is None and user_model.tokenizer is not None:
            _put(config, "data.tokenizer", user_model.tokenizer)
    if data is not None:
        if config.data.sources:
            raise ConfigError("data is given, and data.sources is set too: leave one of them out.")
        _put(config, "data.source", [TASKS["rows"].store(data, "data")])
    if eval_data is not None:
        _put(config, "data.eval_source", [TASKS["rows"].store(eval_data, "eval_data")])
    return config, user_model


def _put(config: Config, key: str, value: Any) -> None:
    """Set a value passed beside the configuration. Raises ConfigError if the configuration has another value."""
    section, field = key.split(".")
    before, default = config.get(key), config.SECTIONS[section].model_fields[field].get_default()
    setattr(getattr(config, section), field, value)
    if before not in (default, config.get(key)):
        raise ConfigError(f"{key} is {before}, but Trainer got another one as an argument: leave one of them out.")
