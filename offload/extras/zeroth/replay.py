"""Replay a gradient-free run (MeZO) from its initial weights and the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from offload.amounts import Amount, Tell
from offload.app.checkpoint_folder import is_checkpoint
from offload.app.config.config import Config
from offload.app.hf.models import BuiltModel, build_model, freeze, model_kind, quiet_transformers
from offload.app.hf.sources import RemovedProduct
from offload.app.stored_model import DTYPES, rebuild_model
from offload.app.telemetry.progress import work_progress
from offload.app.training.build import choose_trainable_part
from offload.app.training.parts import MeasuredFill, make_update_rule
from offload.app.training.resume import ResumePoint
from offload.app.training.run_folder import RunFolder
from offload.app.training.task import TASKS
from offload.app.training.trainable import buffers_of, load_architecture
from offload.checkpoint.reader import Reader
from offload.engine.engine import Engine
from offload.errors import ConfigError, counted
from offload.extras.adapters.adapters import write_adapter
from offload.layout.planes import DTYPES as COMPUTED
from offload.planning.settings import Settings
from offload.tiers.placement import Placement


def replay_run(base: Path, run: Path, out: Path, dtype: str, say: Callable[[str], None]) -> int:
    """Write the final weights of a run to a Hugging Face folder `out`. Return the run's step count.

    `base`: a Hugging Face folder with the initial weights, or a checkpoint from the run. `dtype`: a key in DTYPES.
    Raises OffloadError.
    """
    quiet_transformers()
    folder = RunFolder(run)
    config = Config.load(run / "config.yaml")
    if config.optimizer.has_gradients:
        raise ConfigError(
            f"{run} was trained with --optimizer.name {config.optimizer.name}, whose updates need gradients that the "
            "log does not contain: only runs with mezo can be replayed. Take the weights from the checkpoints of "
            f"{run}."
        )
    if config.lora.restart_every:
        raise ConfigError(
            f"the adapter of {run} restarted after each {config.lora.restart_every} steps (lora.restart_every), and "
            f"the log does not contain the restarts: take the weights from the checkpoints of {run}."
        )
    if config.lora.adapts and dtype != "auto":
        raise ConfigError("--dtype is given, but an adapter keeps the dtype in which it was trained: leave it out.")
    lines = _read_steps(folder.metrics)
    is_marked = any("weights" in line for line in lines)
    with work_progress() as tell, _open(base, config, tell, is_marked=is_marked) as (engine, removed):
        first = engine.num_steps
        records = [line for line in lines if line["step"] > first]  # a checkpoint has the steps before
        num_updates = sum("projected_grad" in line for line in records)  # a skipped step has none
        skipped = ""
        if len(records) > num_updates:
            skipped = f", {len(records) - num_updates} more were skipped"
        say(f"replaying {counted(num_updates, 'step')}{skipped} ...")
        tell("replaying", lambda: Amount(engine.num_steps - first, len(records), "steps"))
        # Each process of the run logged a fingerprint of the weights in the first step: check there.
        begins = [number for number, line in enumerate(records) if number and "weights" in line]
        for begin, end in pairwise([0, *begins, len(records)]):
            part = records[begin:end]
            if part and part[0]["step"] == engine.num_steps + 1:
                _check_weights(engine, part[0], base, run)
            engine.replay(part)
        if config.lora.adapts:
            values = dict(engine.named_parameters(trained_only=True))
            write_adapter(engine.model, {**buffers_of(engine.model), **values}, out, {}, removed)
        else:
            engine.export(out, DTYPES[dtype])
        if not records:  # the checkpoint is of the last step
            return first
        return records[-1]["step"]


def _check_weights(engine: Engine, line: Mapping[str, Any], base: Path, run: Path) -> None:
    """Raise ConfigError if the logged fingerprint of the weights differs from the engine's before this step."""
    if line.get("weights") not in (None, engine.weights_mark()):
        raise ConfigError(
            f"with {base}, the weights before step {line['step']} differ from those in {run}: give the folder that the "
            "run began with, or one of its own checkpoints."
        )


@contextmanager
def _open(
    base: Path, config: Config, tell: Tell, *, is_marked: bool
) -> Iterator[tuple[Engine, Mapping[str, RemovedProduct]]]:
    """Open a host engine over the base weights with the run's update rule. Yields it, and the products removed from the
    base.

    `tell` receives long reads and writes. `is_marked`: the log contains the fingerprint of the initial weights, so the
    checkpoint may have another rule's states.
    """
    # On the host: a replay makes updates and no passes.
    settings = Settings(
        optimizer=make_update_rule(config),
        placement=Placement(parameters="cpu", optimizer="cpu"),
        precision=config.train.precision,
        frozen_weights=config.offload.frozen_weights,
        seed=config.run.seed,
        device="cpu",
    )
    if config.lora.adapts:
        built = _build_adapted(base, config)
    else:
        built = _build_whole(base, config)
    freeze(built.model, config.optimizer.freeze)
    fill = MeasuredFill(built, num_ranks=1)
    tell("reading the weights", fill.amount)
    with Engine(built.model, settings=settings, fill=fill) as engine:
        built.close()
        engine.tell_stages(tell)
        if is_checkpoint(base):
            engine.load_checkpoint(base, reset=is_marked)
        yield engine, built.removed


def _build_whole(base: Path, config: Config) -> BuiltModel:
    """Return the unfilled model from a folder or checkpoint."""
    if is_checkpoint(base):
        return BuiltModel(rebuild_model(base, config.model), folder=base)
    section = config.model.model_copy(update={"path": str(base), "preset": None, "init": "pretrained"})
    # New embedding rows are drawn at random, as at the start of the run.
    torch.manual_seed(config.run.seed)
    architecture = load_architecture(ResumePoint(config.with_resolved(model__path=str(base), model__preset=None)))
    grows = config.model.path is not None and TASKS["rows"].grow_vocabulary(config, architecture)
    dtype = COMPUTED[str(config.train.precision)]
    return build_model(section, seed=config.run.seed, config=architecture, grow=grows, dtype=dtype)


def _build_adapted(base: Path, config: Config) -> BuiltModel:
    """Return the base with the run's adapter on top.

    If `base` is a checkpoint from the run, the base model is read from its original location.
    """
    if is_checkpoint(base):
        with Reader(base) as reader:
            start = ResumePoint(config, (base,), base=reader.meta["meta"]["base"])
    else:
        start = ResumePoint(config.with_resolved(model__path=str(base), model__preset=None, model__init="pretrained"))
    architecture = load_architecture(start)
    trainable = choose_trainable_part(start.config, architecture, model_kind(architecture), start)
    dtype = COMPUTED[str(config.train.precision)]
    return trainable.prepare(build_model(start.config.model, seed=config.run.seed, config=architecture, dtype=dtype))


def _read_steps(path: Path) -> list[Mapping[str, Any]]:
    """Return the logged steps. A killed process may have left half a last line. Raises ConfigError."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    steps: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            step = None
        if not isinstance(step, dict) or not isinstance(step.get("step"), int):
            raise ConfigError(f"line {number} of {path} is not a step, so the steps after it cannot be replayed.")
        steps.append(step)
    return steps
