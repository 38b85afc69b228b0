"""Settings decided by the program, in the order of a run: from machine and model, data, and the first steps.

A row of a table decides the setting in its key, if that is open (none or auto).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from offload.accelerators import own_accelerator
from offload.app.config.config import Config
from offload.app.config.rules import RULE_SETTINGS
from offload.app.config.sections import DOCUMENTS, OffloadSection
from offload.app.training.objectives import OBJECTIVES
from offload.app.training.task import Task
from offload.engine.engine import Engine
from offload.errors import ConfigError

BUILTIN_DEVICE_MEMORY = 9 * 2**20
"""Device budget in bytes for the built-in run on a CPU. The states take 16 MiB, so the run has to stream. (On a GPU the
budget bounds the allocator, and the allocator reserves more at once.)
"""
_TIMING_FIELDS = ("prefetch", "zero_stage", "replicas", "replica_states", "dispatch", "throttle", "device", "update")
"""Fields in the offload section with no influence on the tier of any state."""

_Table = Mapping[str, Callable[[Config, Any], Any]]


def decide(config: Config, table: _Table, facts: Any) -> Config:
    """Return a copy with the open values of a table decided.

    Each row reads the facts, and the configuration with the decisions of the rows above.
    """
    for key, decision in table.items():
        if config.get(key) in (None, "auto"):
            config = config.with_resolved(**{key.replace(".", "__"): decision(config, facts)})
    return config


# -- from machine and model --------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Facts before the data are read."""

    is_builtin: bool
    """True for the built-in model with default sizes and places."""
    has_accelerator: bool
    has_bf16: bool
    """False for an accelerator that emulates bf16."""
    max_positions: int | None
    """Longest sequence of the model in tokens. None: no limit."""


def resolve(
    config: Config,
    *,
    has_accelerator: bool,
    max_positions: int | None,
    has_bf16: bool = True,
    is_decoder: bool = False,
    num_ranks: int = 1,
) -> Config:
    """Return a copy with open values decided from the machine and the model. Arguments: see `Start`.

    - is_decoder: a token of the model sees only those before it.
    - num_ranks: of all machines.

    The engine decides train.clip, offload.update and offload.prefetch later. Raises ConfigError for
    train.tokens_per_step without a row for each rank, or beside another train.batch_size.
    """
    places = (f"offload.{field}" for field in OffloadSection.model_fields if field not in _TIMING_FIELDS)
    sizes = ("data.sequence_length", "train.batch_size", "train.tokens_per_step", "train.micro_batch_size")
    # A run with an own size or place is no demonstration of streaming, and gets no small budget.
    start = Start(config.is_default("model", *sizes, *places), has_accelerator, has_bf16, max_positions)
    defaults = RULE_SETTINGS[config.optimizer.name].defaults
    values = {key.replace(".", "__"): value for key, value in defaults.items() if config.is_default(key)}
    values |= _default_end(config, start)
    values |= OBJECTIVES[config.train.method].decide(config, is_decoder)
    if config.group > 1:  # each answer has a separate row
        values |= dict.fromkeys(("data__packing", "data__packing_isolated", "data__group_by_length"), False)
    return with_rows(decide(config.with_resolved(**values), FROM_START, start), num_ranks)


def with_rows(config: Config, num_ranks: int) -> Config:
    """Return a copy with the rows of train.tokens_per_step, rounded down to equally many whole rows on each rank.

    A resumed run has the rows of the earlier run, on any number of ranks. Raises ConfigError.
    """
    train, tokens = config.train, config.train.tokens_per_step
    if tokens is None or config.knows_rows:
        return config
    num_groups = train.num_groups(num_ranks)
    rows = tokens // (num_groups * config.row_tokens) * num_groups
    if not rows:
        raise ConfigError(
            f"train.tokens_per_step is {tokens}, but a row takes {config.row_tokens} tokens, and each rank needs rows "
            f"of its own: set --train.tokens_per_step to {num_groups * config.row_tokens} or more, or lower "
            "--data.sequence_length."
        )
    if config.origin("train.batch_size") != "default" and train.batch_size != rows:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}, but train.tokens_per_step is {tokens}, which makes {rows} rows "
            f"of {config.row_tokens} tokens: leave one of them out."
        )
    sized = config.with_settings({"train.batch_size": (rows, "resolved")})
    sized.check()
    return sized


def _default_end(config: Config, start: Start) -> Mapping[str, Any]:
    train = config.train
    if (train.steps, train.epochs, train.max_seconds) != (None, None, None):
        return {}
    if config.has_own_data:
        return {"train__epochs": 1.0}
    if start.is_builtin:  # a demonstration
        return {"train__steps": 400, "train__max_seconds": 90.0}
    return {"train__steps": 400}


def _sequence_length(config: Config, start: Start) -> int:
    most = 1024
    if config.model.preset == "tiny":
        most = 256
    length = min(most, start.max_positions or 1024)
    return length // 64 * 64 or length  # some position tables have a few extra rows


def _precision(config: Config, start: Start) -> str:
    if start.has_accelerator and not start.has_bf16:  # settings that need bf16 are refused beside these
        if config.optimizer.has_gradients:
            return "fp16"
        return "fp32"  # without gradients there is no loss scale
    needs_bf16 = config.optimizer.master == "bf16" or config.train.matmul != "precision"
    if start.has_accelerator or needs_bf16:
        return "bf16"
    return "fp32"


def _learning_rate(config: Config, _start: Start) -> float:
    rate = 1e-3
    if config.model.preset == "tiny":
        rate = 4e-3
    if config.model.init == "pretrained":
        rate = 2e-5
        if config.lora.adapts:
            rate = 2e-4
        if config.train.method in ("dpo", "orpo"):  # as in TRL
            rate *= 0.05
    return rate * RULE_SETTINGS[config.optimizer.name].rate


FROM_START: _Table = {
    "offload.device_memory": lambda _, start: (
        BUILTIN_DEVICE_MEMORY if start.is_builtin and not start.has_accelerator else None
    ),
    "model.preset": lambda config, _: None if config.model.path else "tiny",
    "model.init": lambda config, _: (
        "pretrained" if config.model.path and not config.model.path.endswith(".json") else "random"
    ),
    "data.eval_share": lambda config, _: 0.0 if config.data.eval_source else 0.02,
    "data.sequence_length": _sequence_length,
    "train.precision": _precision,
    "optimizer.lr": _learning_rate,
    "optimizer.schedule": lambda config, _: (
        "constant" if config.train.steps is None and config.train.epochs is None else "cosine"
    ),
    "offload.dispatch": lambda *_: "never",
    "offload.zero_stage": lambda config, _: 3 if config.offload.dispatch == "never" else 2,
}

# -- from the data -----------------------------------------------------------------------------------------------------


def resolve_saved_rows(config: Config, saved: Mapping[str, Any]) -> Config:
    """Return a copy with the rows of the run to resume, whatever auto means now. saved: its `Task.state_dict`."""
    packing = saved.get("packing", True)
    values: dict[str, Any] = {}
    if config.data.packing_isolated == "auto":
        values = {"data__packing": bool(packing), "data__packing_isolated": packing == "isolated"}
    if config.data.group_by_length == "auto":
        values["data__group_by_length"] = bool(saved.get("group_by_length"))
    return config.with_resolved(**values)


def resolve_rows(config: Config, data: Task, *, resumes: bool) -> Config:
    """Return a copy with decisions from the prepared data. A resumed run keeps its attention."""
    rows = config.with_resolved(
        data__packing=config.data.packing and not data.has_pictures,
        data__packing_isolated=data.is_isolated,
        data__group_by_length=data.by_length,
    )
    if rows.attends_documents and not resumes:
        rows = rows.with_resolved(model__attention=DOCUMENTS)
    return decide(rows, FROM_NUM_STEPS, data.num_steps)


FROM_NUM_STEPS: _Table = {
    "train.steps": lambda config, num_steps: None if config.train.epochs is None else num_steps(config.train.epochs),
    "optimizer.warmup_steps": lambda config, _: min(100, (config.train.steps or 0) // 20),
}

# -- from the first steps ----------------------------------------------------------------------------------------------


def with_decisions(config: Config, engine: Engine) -> Config:
    """Return the configuration with the engine's decisions from the first step, so the run can be repeated."""
    resolved = config.with_resolved(
        train__clip=engine.clip, train__head_chunk_bytes=engine.head_chunk_bytes, offload__update=engine.updates_on
    )
    if config.offload.prefetch != "auto":
        return resolved
    has_budget = config.offload.device_memory is not None or own_accelerator(config.offload.device) is not None
    if engine.overlaps and has_budget:  # a fixed number would be the maximum
        return resolved.with_note("offload.prefetch", f"at least {engine.prefetch} ahead, more where there is room")
    return resolved.with_resolved(offload__prefetch=engine.prefetch)
