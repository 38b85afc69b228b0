"""The training run, from a configuration to a folder: data, model, engine, steps, evaluation, export."""

from __future__ import annotations

import gc
import itertools
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint import reload
from offload.checkpoint.models import (
    Kind,
    build_model,
    check_sequence_length,
    load_model_config,
    locate,
    max_positions,
    model_kind,
    quiet_transformers,
    vocab_size,
)
from offload.config import Config
from offload.data import build_dataset
from offload.data.tokenizer import tokenizer_folder
from offload.engine.engine import Engine, StepResult
from offload.engine.updates import COARSE_RATIO
from offload.errors import ConfigError, InterruptedRun, format_bytes
from offload.lanes.throttle import parse_throttle
from offload.objectives import choose_objective
from offload.optim.adamw import AdamW
from offload.optim.lr import learning_rate
from offload.planning.environment import describe_environment
from offload.run_folder import RunFolder
from offload.signals import StopSignals
from offload.telemetry.metrics import MetricsLog
from offload.telemetry.progress import make_progress
from offload.telemetry.trace import Trace
from offload.tiers.directories import check_dirs
from offload.tiers.placement import Placement

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

    Raises OffloadError; InterruptedRun after a signal.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._engine: Engine | None = None
        self._metrics: MetricsLog | None = None
        self._trace: Trace | None = None
        self._eval_loss: float | None = None
        self._loss = math.nan
        self._num_done = self._num_coarse = 0

    def run(self) -> TrainResult:
        self.config.check()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"the run was started as {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE), which this version does not "
                "train on yet; start one process, without torchrun."
            )
        placement = _placement(self.config)  # what cannot be placed or played is refused before any work
        if placement.dirs:
            check_dirs(placement.dirs)
        parse_throttle(self.config.offload.throttle)
        self._progress = make_progress(self.config.train.log_every)
        self._folder = RunFolder.create(self.config)
        try:
            with _shown_warnings(self._say):
                self._prepare()
                with StopSignals(self._say) as stop:
                    try:
                        self._train(stop)
                    finally:
                        self._end_steps()
                    return self._finish(stop)
        finally:
            self._progress.close()
            if self._metrics is not None:
                self._metrics.close()
            self._close_engine()
            self._folder.discard_if_empty()

    def _close_engine(self) -> None:
        """Free the states, before the export is loaded beside them."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # units, streams and modules refer to each other in rings

    def _say(self, text: str) -> None:
        self._progress.say(text)

    # -- before the first step ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Read the architecture, make the data, then the model and its engine; each checks what it can before the
        next.
        """
        quiet_transformers()
        torch.manual_seed(self.config.run.seed)
        architecture = load_model_config(self.config.model)
        self._kind = model_kind(architecture)
        config = self.config.resolve(cuda=torch.cuda.is_available(), max_positions=max_positions(architecture))
        check_sequence_length(architecture, int(config.data.sequence_length or 0))

        self._data = _build_data(config, self._kind, vocab_size(architecture), _stages(self._say))
        self.config = config = config.resolve_steps(self._data.num_steps)
        self._objective = choose_objective(
            self._kind.name, tokenizer=self._data.tokenizer, vocab_size=vocab_size(architecture), seed=config.run.seed
        )
        for note in self._data.notes:
            self._say(f"note: {note}")
        self._say(
            f"data: {self._data.num_train_rows:,} rows of {config.data.sequence_length} tokens to train on, "
            f"{self._data.num_eval_rows:,} to evaluate; objective: {self._objective.name}"
        )

        if config.model.init == "random" and _trains_tokenizer(config):
            architecture.bos_token_id = self._data.tokenizer.bos_token_id
            architecture.eos_token_id = self._data.tokenizer.eos_token_id
        built = build_model(
            config.model,
            seed=config.run.seed,
            config=architecture,
            sequence_length=int(config.data.sequence_length or 0),
        )
        built.model.train()
        num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
        name = type(built.model).__name__
        self._engine = _engine(config, built)
        self._say(
            f"model: {name}, {num_parameters:,} parameters, {config.model.init} weights, {config.train.precision} on "
            f"{self._engine.device}"
        )

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _train(self, stop: StopSignals) -> None:
        train, optimizer = self.config.train, self.config.optimizer
        assert self._engine is not None
        begun = time.monotonic()
        for step in itertools.count():
            elapsed = time.monotonic() - begun
            if stop.requested or step == train.steps:
                return
            if train.max_seconds is not None and step and elapsed >= train.max_seconds:
                self._say(f"train.max_seconds ({train.max_seconds:g}) are over after {step} steps.")
                return
            self._engine.lr = learning_rate(
                step,
                base=float(optimizer.lr or 0.0),
                schedule=optimizer.schedule,
                warmup_steps=optimizer.warmup_steps or 0,
                num_steps=train.steps,
            )
            begin = time.perf_counter()
            result = self._engine.step(self._objective.apply(self._data.batch(step), step))
            end = time.perf_counter()
            if step == 0:
                self._open_records(result)
            fields = self._fields(step, result, end - begin)
            self._num_done = step + 1
            self._num_coarse += result.coarse
            self._loss = fields["loss"]
            assert self._trace is not None
            self._trace.step(step + 1, begin, end, self._engine.spans)
            if train.eval_every and (step + 1) % train.eval_every == 0 and not stop.requested:
                fields["eval_loss"] = self._evaluate()
            assert self._metrics is not None
            self._metrics.write(fields)
            if result.skipped:
                self._say(f"step {step + 1} skipped: a gradient was not finite; all states are as they were.")
            self._progress.step(fields, num_steps=train.steps, eta_s=self._eta(time.monotonic() - begun))

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
        if self.config.train.clip == "speculative":
            fields |= {"corrected": result.corrected, "coarse": result.coarse}
        return fields

    def _open_records(self, result: StepResult) -> None:
        """Write what the run is, once its first step has shown that it can be done."""
        assert self._engine is not None
        self.config = _decided(self.config, self._engine)
        tiers = _tiers(self._engine, self.config)
        self._folder.write_config(self.config)
        self._folder.write_json("plan.json", {"fits": True, "tiers": tiers})
        self._folder.write_json("env.json", describe_environment())
        self._metrics = MetricsLog(self._folder.metrics)
        is_serial = not self._engine.overlaps
        self._trace = Trace(self._folder.path / "trace.json.gz", result.lanes, is_serial=is_serial)
        shown = [
            f"{tier} {format_bytes(held['bytes'])}"
            + (f" of {format_bytes(held['budget_bytes'])}" if held["budget_bytes"] is not None else "")
            for tier, held in tiers.items()
        ]
        self._say(f"tiers: {', '.join(shown)}; run folder: {self._folder.path}")
        if self.config.offload.nvme_dir and "nvme" not in tiers:
            self._say("note: offload.nvme_dir is set, and nothing goes there: the tiers above have room for all of it.")

    def _end_steps(self) -> None:
        """Write what was kept of the steps, however they ended."""
        if self._trace is not None:
            try:
                self._trace.write()
            except OSError as error:
                self._say(f"note: the trace could not be written: {error}")
        if self._num_coarse:
            self._say(
                f"coarse: in {self._num_coarse} of {self._num_done} steps the gradients were clipped more than "
                f"{COARSE_RATIO:g} times harder than their first updates had taken for granted; the corrections of "
                "these steps are less exact than others. --train.clip deferred needs no corrections."
            )

    def _eta(self, elapsed: float) -> float | None:
        """Return how many seconds the steps still take: by their number or the time limit, whichever ends first."""
        train = self.config.train
        ends = [] if train.max_seconds is None else [train.max_seconds - elapsed]
        if train.steps is not None:
            ends.append((train.steps - self._num_done) * elapsed / self._num_done)
        return max(0.0, min(ends)) if ends else None

    def _evaluate(self) -> float | None:
        """Return the mean loss over the target tokens of the first eval rows; None without eval rows."""
        assert self._engine is not None
        total, num_tokens, begin = 0.0, 0, time.perf_counter()
        for index, rows in enumerate(self._data.eval_batches(self.config.train.batch_size, NUM_EVAL_BATCHES)):
            batch = self._objective.apply(rows, index)
            count = self._objective.count(batch)
            if count:
                total += float(self._engine.evaluate(batch)) * count
                num_tokens += count
        if not num_tokens:
            return None
        self._eval_loss = total / num_tokens
        if self._trace is not None:
            self._trace.mark("evaluation", begin, time.perf_counter())
        self._say(f"step {self._num_done}  eval loss {self._eval_loss:.4f} over {num_tokens:,} tokens")
        return self._eval_loss

    # -- after the last step -----------------------------------------------------------------------------------------

    def _finish(self, stop: StopSignals) -> TrainResult:
        """Evaluate, export, and prove the export. After a signal only the export is made, and InterruptedRun raised."""
        assert self._engine is not None
        self._progress.close()
        every = self.config.train.eval_every
        if not stop.requested and (not every or self._num_done % every):
            self._evaluate()
        probe = None
        if self.config.checkpoint.export and not stop.requested:
            rows = next(self._data.eval_batches(1, 1), None) or self._data.batch(0)
            probe = reload.take_probe(self._engine, self._objective.apply(rows, 0))
        exported = None
        if self.config.checkpoint.export or stop.requested:
            exported = self._export()
        self._close_engine()
        if probe is not None and exported is not None and not stop.requested:
            self._check_export(exported, probe)
        if stop.requested:
            raise InterruptedRun(
                f"interrupted by {stop.name} after step {self._num_done}"
                + (f" of {self.config.train.steps}" if self.config.train.steps is not None else "")
                + (
                    f"; the weights are saved in {exported} (load them with transformers, or train on with "
                    f"--model.path {exported})."
                    if exported
                    else "."
                )
            )
        self._say(f"done: {self._num_done} steps, loss {self._loss:.4f}, in {self._folder.path}")
        return TrainResult(self._folder.path, self._num_done, self._loss, self._eval_loss, exported)

    def _export(self) -> Path:
        """Write the Hugging Face folder under another name first, so that hf/ is whole whenever it exists."""
        assert self._engine is not None
        partial = self._folder.path / "hf.partial"
        shutil.rmtree(partial, ignore_errors=True)
        self._engine.export(partial)
        if self._data.tokenizer is not None:
            self._data.tokenizer.save_pretrained(partial)
        partial.rename(self._folder.hf)
        self._say(f"exported to {self._folder.hf}")
        return self._folder.hf

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


def _placement(config: Config) -> Placement:
    offload = config.offload
    return Placement(
        parameters=offload.parameters,
        optimizer=offload.optimizer,
        gradients=offload.gradients,
        activations=offload.activations,
        device_memory=offload.device_memory,
        host_memory=offload.host_memory,
        nvme_dir=offload.nvme_dir,
        nvme_memory=offload.nvme_memory,
    )


def _engine(config: Config, built: Any) -> Engine:
    train, optimizer = config.train, config.optimizer
    return Engine(
        built.model,
        optimizer=AdamW(
            lr=float(optimizer.lr or 0.0),
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decay_1d=optimizer.decay_1d,
            groups=optimizer.groups,
        ),
        placement=_placement(config),
        precision=train.precision,
        max_grad_norm=train.max_grad_norm,
        clip=train.clip,
        on_nonfinite=train.on_nonfinite,
        micro_batch_size=train.micro_batch_size,
        recompute=train.recompute,
        head_chunk_bytes=train.head_chunk_bytes,
        prefetch=config.offload.prefetch,
        zero_stage=config.offload.zero_stage,
        throttle=config.offload.throttle,
        seed=config.run.seed,
        debug=config.run.debug,
        fill=built.fill,
    )


def _decided(config: Config, engine: Engine) -> Config:
    """Return the configuration with what the engine decided by its first step, such that it can be run again."""
    decided = config.with_resolved(train__clip=engine.clip)
    if config.offload.prefetch != "auto":
        return decided
    has_budget = config.offload.device_memory is not None or torch.cuda.is_available()
    if engine.overlaps and has_budget:  # as a number it would be all there is
        return decided.with_note("offload.prefetch", f"at least {engine.prefetch} ahead, more where there is room")
    return decided.with_resolved(offload__prefetch=engine.prefetch)


def _build_data(config: Config, kind: Kind, vocabulary: int, progress: Any) -> Any:
    data = config.data
    folder = locate(config.model)
    # A tokenizer that is trained for a masked model leaves the last row of the embedding for the mask.
    spare = 1 if kind.name == "masked" and _trains_tokenizer(config) else 0
    return build_dataset(
        source=list(data.source),
        format=data.format,
        tokenizer=data.tokenizer,
        model_path=None if folder is None else str(folder),
        vocab_size=vocabulary - spare,
        sequence_length=int(data.sequence_length or 0),
        packing=data.packing,
        train_on_prompt=data.train_on_prompt,
        eval_fraction=data.eval_fraction,
        batch_size=config.train.batch_size,
        seed=config.run.seed,
        progress=progress,
    )


def _trains_tokenizer(config: Config) -> bool:
    """Tell whether the tokenizer is made from the data: none was named, and the model has none."""
    folder = locate(config.model)
    return config.data.tokenizer is None and tokenizer_folder(None if folder is None else str(folder)) is None


def _stages(say: Any) -> Any:
    """Return a progress callback that names each stage once."""
    seen: set[str] = set()

    def progress(stage: str, _fraction: float) -> None:
        if stage not in seen:
            seen.add(stage)
            say(f"data: {stage} ...")

    return progress


def _tiers(engine: Engine, config: Config) -> dict[str, dict[str, Any]]:
    budgets = {
        "device": config.offload.device_memory,
        "cpu": config.offload.host_memory,
        "nvme": config.offload.nvme_memory,
    }
    tiers: dict[str, dict[str, Any]] = {}
    for tier, name, num_bytes in engine.allocations:
        held = tiers.setdefault(tier, {"bytes": 0, "budget_bytes": budgets.get(tier), "allocations": []})
        held["bytes"] += num_bytes
        held["allocations"].append({"name": name, "bytes": num_bytes})
    return tiers


@contextmanager
def _shown_warnings(say: Any) -> Iterator[None]:
    """Print what our own modules warn of as notes; other libraries' warnings are not the user's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"offload\.")
        warnings.showwarning = lambda message, *_rest, **_more: say(f"note: {message}")
        yield
