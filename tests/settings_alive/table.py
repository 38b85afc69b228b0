"""Table of settings: for each one, words of the command line with an effect outside the configuration.

A row compares the run of a base with runs that differ in one setting, by one figure of `looks.py`. A setting, or a
value of a choice, without a row stands in `NOT_SHOWN` with the reason.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload.app.config.config import Config, all_keys
from offload.app.config.sections import nested_types
from offload.conflicts import show

Words = Mapping[str, str | None]
"""Settings by key, or options by name, as on the command line. None: not given."""

_RUN: Words = {
    "model.path": "llama.json",
    "data.source": "text.txt",
    "data.sequence_length": "16",
    "data.eval_share": "0",
    "train.steps": "3",
    "train.batch_size": "2",
    "optimizer.lr": "1e-2",
    "optimizer.warmup_steps": "0",
    "offload.parameters": "cpu",
    "offload.optimizer": "cpu",
    "checkpoint.export": "false",
}
_PLAN: Words = {
    "model.preset": "tiny",
    "data.sequence_length": "64",
    "train.batch_size": "4",
    "offload.parameters": "cpu",
    "offload.optimizer": "cpu",
    "hardware": "rtx-4090",
}
BASES: dict[str, Words] = {
    "run": _RUN,
    "disk": {**_RUN, "offload.nvme_dir": "disk"},
    "folder": {**_RUN, "model.path": "model"},
    "adapter": {**_RUN, "model.path": "model", "lora.rank": "4", "lora.target_modules": "all-linear"},
    "pairs": {**_RUN, "data.source": "pairs.jsonl", "data.sequence_length": "32", "train.method": "dpo"},
    "taught": {**_RUN, "data.tokenizer": "model", "train.method": "distill", "distill.teacher": "model"},
    "queries": {
        **_RUN,
        "data.source": "queries.jsonl",
        "data.sequence_length": "32",
        "train.method": "contrastive",
        "train.batch_size": "4",
    },
    "resumed": {**_RUN, "run.dir": "earlier"},
    "plan": _PLAN,
    "plan of two ranks": {**_PLAN, "gpus": "2"},
}
"""Words of a run, or of a plan, by name. The files are made by `looks.py`."""


@dataclass(frozen=True)
class Row:
    """Values of a setting with different effects.

    key: setting.
    values: as on the command line, without the value of the base.
    shows: figure (`looks.Figures`) with another value for each of these, and for that of the base.
    base: name in `BASES`.
    given: further words.
    same: values with the effect of another value, such as auto.
    limits: sizes and functions of the engine, by path (`tests.cases.features.limits_of`).
    """

    key: str
    values: tuple[str, ...]
    shows: str
    base: str = "run"
    given: Words = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The value in the base."""
        value = {**BASES[self.base], **self.given}.get(self.key)
        if value is not None:
            return value
        section, name = self.key.split(".")
        return show(Config.SECTIONS[section].model_fields[name].get_default())

    @property
    def all_values(self) -> tuple[str, ...]:
        """The value of the base, and the others."""
        return (self.reference, *self.values)

    @property
    def is_quick(self) -> bool:
        """True for a single run beside the common one, of files and data: other effects are contracts' in the quick
        run.
        """
        is_single = self.base == "run" and len(self.values) == 1 and not (self.given or self.limits)
        return is_single and self.key.partition(".")[0] in ("run", "model", "data", "checkpoint")

    def words(self, value: str) -> dict[str, str]:
        """Return the words of the run for a value."""
        found = {**BASES[self.base], **self.given}
        # The base gives its own value, or leaves the setting out.
        if value != self.reference:
            found[self.key] = value
        return {key: text for key, text in found.items() if text is not None}


def _row(key: str, values: str | tuple[str, ...], shows: str, **same: str) -> Row:
    return Row(key, tuple(values.split()) if isinstance(values, str) else values, shows, same=same)


def _with(base: str, given: Words, *rows: Row, limits: Mapping[str, Any] | None = None) -> Iterator[Row]:
    """Yield rows over a base, with further words."""
    for row in rows:
        yield replace(row, base=base, given={**given, **row.given}, limits={**(limits or {}), **row.limits})


_RESTARTS: Words = {"lora.restart_every": "2", "train.steps": "4"}
_EVALUATED: Words = {"data.eval_share": "0.2", "train.eval_every": "1"}
_FILE = "tests.settings_alive.looks."

ROWS: tuple[Row, ...] = (
    # -- the run and the model
    _row("run.dir", "elsewhere", "files"),
    _row("run.name", "other", "files"),
    _row("run.seed", "1", "losses"),
    _row("run.report_to", "tensorboard", "files"),
    *_with(
        "run", {}, _row("run.debug", "true", "notes"),
        limits={"offload.app.training.planner.document_share": _FILE + "defect"},
    ),
    _row("run.debug", "true", "peak"),
    _row("model.path", "deeper.json", "losses"),
    _row("model.attention", "eager sdpa", "losses", auto="sdpa"),
    *_with("folder", {}, _row("model.init", "pretrained random", "losses", auto="pretrained")),
    *_with("plan", {}, _row("model.preset", "small", "num_parameters")),
    # -- the data
    _row("data.source", "other.txt", "losses"),
    _row("data.tokenizer", "tokenizer", "losses"),
    _row("data.sequence_length", "24", "tokens"),
    _row("data.eval_share", "0.2", "evaluations"),
    _row("data.eval_source", "other.txt", "evaluations"),
    *_with(
        "run", {"data.source": "rows.jsonl"},
        _row("data.format", "text jsonl messages sharegpt alpaca prompt-completion preference contrastive tokens",
            "outcome"),
    ),
    *_with("run", {"data.source": "rows.jsonl", "data.format": "jsonl"},
        _row("data.columns", ("{text: other}",), "losses"),
        _row("data.packing", "false", "tokens"),
        _row("data.packing_isolated", "true false", "losses", auto="false"),
        *_with("run", {"data.packing": "false"},
            _row("data.group_by_length", "true false", "losses", auto="true")),
    ),
    *_with("run", {"data.source": "rows.jsonl", "data.format": "prompt-completion"},
        _row("data.train_on_prompt", "true", "tokens")),
    *_with("run", {"data.source": None, "data.sources": "[{path: text.txt}]"},
        _row("data.sources", ("[{path: other.txt}]",), "losses")),
    *_with("run", {
            "data.source": None, "train.steps": None, "train.epochs": "1", "train.batch_size": "8",
            "data.sources": "[{path: text.txt, weight: 0.5}, {path: short.txt, weight: 0.5}]",
        },
        _row("data.stopping_strategy", "first_exhausted", "num_steps"),
        _row("train.epochs", "0.5", "num_steps")),
    *_with("run", {"data.source": "bad.jsonl"}, _row("data.on_bad_row", "skip", "refusal")),
    *_with("run", {}, _row("data.num_workers", "1", "notes"),
        limits={"offload.extras.data.workers._Worker": _FILE + "SpokenWorker"}),
    # -- training
    *_with("pairs", {},
        _row("train.method", "sft orpo reward contrastive", "outcome"),
        _row("train.beta", "0.5", "losses")),
    *_with("pairs", {"data.tokenizer": "model"}, _row("prefs.reference", "model", "losses")),
    *_with("pairs", {"data.tokenizer": "model", "prefs.reference": "model"}, _row("prefs.way", "beside", "held")),
    *_with("pairs", {"train.method": "reward"}, _row("train.center_rewards_coefficient", "0.5", "losses")),
    *_with("taught", {},
        _row("train.method", "sft", "outcome"),
        _row("distill.teacher", "deeper", "losses"),
        _row("distill.beta", "0.5 1", "losses"),
        _row("distill.temperature", "2", "losses"),
        _row("distill.labels", "0.5", "losses"),
        _row("distill.top_k", "3", "losses")),
    *_with("taught", {"distill.top_k": "3"}, _row("distill.way", "stored", "lines")),
    *_with("queries", {},
        _row("contrastive.negatives", "1", "losses"),
        _row("contrastive.pooling", "mean last cls", "losses", auto="last"),
        _row("contrastive.temperature", "0.1", "losses"),
        _row("contrastive.symmetric", "false", "losses"),
        _row("contrastive.sizes", "16,8", "losses"),
        _row("contrastive.margin", "0.0", "losses")),
    _row("train.steps", "2", "num_steps"),
    _row("train.max_seconds", "1e-6", "num_steps"),
    _row("train.batch_size", "4", "tokens"),
    *_with("run", {"train.batch_size": None}, _row("train.tokens_per_step", "64", "tokens")),
    _row("train.micro_batch_size", "1", "losses"),
    _row("train.passes", "2", "moved"),
    _row("train.precision", "bf16 fp16 fp32", "losses", auto="fp32"),
    *_with("run", {"train.precision": "bf16"}, _row("train.matmul", "fp8_rowwise fp8_tensorwise", "losses"),
        limits={"offload.extras.quant.products.LEAST_SIZE": 32}),
    _row("train.recompute", "always never products", "peak", auto="never"),
    _row("train.compile", "always never", "fields", auto="never"),
    _row("train.sequence_tile", "none 4", "losses", auto="none"),
    _row("train.max_grad_norm", "0.1 none", "losses"),
    *_with("run", {"train.max_grad_norm": "0.1"},
        _row("train.clip", "speculative deferred", "fields", auto="deferred")),
    *_with("run", {"optimizer.lr": "1e30", "optimizer.name": "sgd"}, _row("train.on_nonfinite", "skip", "refusal")),
    _row("train.delay", "1", "losses"),
    *_with("run", {"train.delay": "1"}, _row("train.delay_after", "2", "losses")),
    *_with("run", {"data.eval_share": "0.2"}, _row("train.eval_every", "1", "evaluations")),
    *_with("run", {"data.eval_source": "other.txt"}, _row("train.eval_batches", "1 all", "evaluations")),
    *_with("run", {**_EVALUATED, "optimizer.lr": "0"}, _row("train.early_stopping_patience", "1", "num_steps")),
    *_with("run", {**_EVALUATED, "train.early_stopping_patience": "1", "optimizer.lr": "1e-3"},
        _row("train.early_stopping_min_delta", "9", "num_steps")),
    _row("train.log_every", "1", "lines"),
    _row("train.head_chunk_bytes", "none 4KiB", "peak", auto="none"),
    *_with("plan of two ranks", {}, _row("train.sequence_parallel", "2", "tiers")),
    # -- the optimizer
    _row("optimizer.name", "lion sgd adafactor lomo adalomo muon mezo", "losses"),
    _row("optimizer.lr", "1e-3", "losses"),
    _row("optimizer.states", "bf16 int8", "losses"),
    _row("optimizer.betas", "0.5,0.95", "losses"),
    _row("optimizer.eps", "1e-3", "losses"),
    _row("optimizer.weight_decay", "1", "losses"),
    _row("optimizer.reset_every", "1", "losses"),
    _row("optimizer.freeze", r"layers\.0", "losses"),
    _row("optimizer.groups", (r"{layers\.0: {lr_scale: 0}}",), "losses"),
    _row("optimizer.warmup_steps", "2", "rates"),
    *_with("run", {"optimizer.weight_decay": "1"}, _row("optimizer.decay_1d", "true", "losses")),
    *_with("run", {"train.steps": "10"},
        _row("optimizer.schedule", "constant linear cosine wsd", "rates", auto="cosine")),
    *_with("run", {"optimizer.name": "adafactor"},
        _row("optimizer.beta2_decay", "-0.1", "losses"), _row("optimizer.d", "1.5", "losses")),
    *_with("run", {"optimizer.name": "lomo"}, _row("optimizer.clip_value", "1e-3", "losses")),
    *_with("run", {"optimizer.name": "sgd"}, _row("optimizer.momentum", "0.9", "losses")),
    *_with("run", {"optimizer.name": "muon"},
        _row("optimizer.nesterov", "true false", "losses", none="true"),
        _row("optimizer.ns_steps", "2", "losses"),
        _row("optimizer.adjust_lr_fn", "original match_rms_adamw", "losses", none="match_rms_adamw")),
    *_with("run", {"optimizer.name": "mezo"},
        _row("optimizer.num_perturbations", "2", "losses"),
        _row("optimizer.layer_fraction", "0.5", "losses"),
        _row("optimizer.magnitude_quantile", "0.5", "losses")),
    *_with("run", {"optimizer.name": "mezo", "train.precision": "bf16"}, _row("optimizer.master", "bf16", "losses")),
    *_with("resumed", {"optimizer.name": "lion"}, _row("optimizer.reset", "true", "refusal")),
    # -- adapters
    *_with("adapter", {},
        _row("lora.rank", "8", "losses"),
        _row("lora.alpha", "32", "losses"),
        _row("lora.dropout", "0.5", "losses"),
        _row("lora.target_modules", "q_proj", "losses"),
        _row("lora.modules_to_save", "lm_head", "losses"),
        _row("lora.trainable_tokens", "261,262,263,264,265,266", "losses"),
        _row("lora.init", "gaussian orthogonal olora pissa", "losses"),
        _row("lora.use_rslora", "true", "losses"),
        _row("lora.use_dora", "true", "losses"),
        _row("lora.restart_every", "2", "losses"),
        _row("offload.parameters", "files", "moved")),
    *_with("adapter", {}, _row("offload.frozen_weights", "int8 fp8 nf4", "losses"),
        limits={"offload.extras.quant.products.LEAST_SIZE": 32}),
    *_with("adapter", _RESTARTS,
        _row("lora.restart_prune", "0", "losses"), _row("lora.restart_warmup_steps", "2", "rates")),
    *_with("adapter", {"lora.target_modules": "q_proj"},
        _row("lora.target_parameters", "down_proj.weight", "losses")),
    *_with("adapter", {"lora.rank": None, "lora.target_modules": None},
        _row("lora.config", "lora.json", "losses"), _row("lora.adapter", "adapter", "losses")),
    # -- tiers and links
    *_with("disk", {"offload.parameters": None},
        _row("offload.parameters", "device cpu nvme", "held", auto="device")),
    *_with("disk", {"offload.parameters": "device", "offload.optimizer": None},
        _row("offload.optimizer", "device cpu nvme", "held", auto="device")),
    _row("offload.gradients", "device cpu", "outcome", auto="cpu"),
    *_with("disk", {"offload.optimizer": "nvme"}, _row("offload.gradients", "cpu nvme", "held", auto="cpu")),
    *_with("run", {"train.recompute": "always"},
        _row("offload.activations", "device cpu", "held", auto="device")),
    *_with("disk", {"train.recompute": "always", "offload.activations": "cpu"},
        _row("offload.activations", "nvme", "held")),
    *_with("disk", {"train.recompute": "never"},
        _row("offload.graphs", "device cpu nvme", "moved", auto="device"),
        limits={"offload.engine.units.offloaded_graph.SMALLEST_BYTES": 1}),
    *_with("run", {"train.recompute": "always", "offload.graphs": "cpu"},
        _row("offload.graphs_memory", "1KiB", "moved"),
        limits={"offload.engine.units.offloaded_graph.SMALLEST_BYTES": 1}),
    *_with("run", {"model.path": "mixtral.json"}, _row("offload.experts", "whole streamed", "fields", auto="whole"),
        limits={"offload.extras.large.cut_experts.RECORD_BYTES": 1}),
    _row("offload.device_memory", "512KiB", "peak"),
    _row("offload.host_memory", "1KiB", "refusal"),
    *_with("disk", {"offload.optimizer": "nvme"},
        _row("offload.nvme_dir", "none", "refusal"), _row("offload.nvme_memory", "1KiB", "refusal")),
    *_with("run", {"offload.device_memory": "512KiB"}, _row("offload.prefetch", "0 1", "held", auto="0")),
    _row("offload.link_weights", "int8", "losses"),
    _row("offload.device", "cuda:7", "refusal"),
    *_with("plan", {},
        _row("offload.throttle", ("{h2d: 1MB}",), "step_seconds"),
        _row("offload.update", "cpu device", "lane_seconds", auto="cpu"),
        _row("train.compile", "always never", "step_seconds", auto="always")),
    *_with("plan", {"offload.parameters": None, "offload.optimizer": None, "offload.device_memory": "20MiB"},
        _row("offload.optimizer_memory", "1MiB", "tiers"), _row("offload.update", "both", "tiers")),
    *_with("plan of two ranks", {},
        _row("offload.zero_stage", "0 1 2 3", "tiers", auto="3"),
        _row("offload.replicas", "1 2", "tiers", auto="1")),
    *_with("plan of two ranks", {"offload.replicas": "2"},
        _row("offload.link_gradients", "int8 int4", "lane_seconds")),
    *_with("plan of two ranks", {"gpus": "4", "offload.replicas": "2"},
        _row("offload.replica_states", "shared", "tiers")),
    *_with("plan of two ranks", {"offload.zero_stage": "2"},
        _row("offload.dispatch", "always auto", "tiers", auto="never")),
    # -- checkpoints
    *_with("run", {}, _row("checkpoint.every", "none 2", "files"),
        limits={"offload.app.training.checkpoints._AUTO_S": 0.0}),
    *_with("run", {"checkpoint.every": "1"}, _row("checkpoint.keep", "1", "files")),
    *_with("run", {"checkpoint.every": "1"}, _row("checkpoint.on_error", "stop", "outcome"),
        limits={"offload.checkpoint.writer._write": _FILE + "full_disk"}),
    *_with("resumed", {}, _row("checkpoint.resume", "never", "refusal")),
    *_with("run", _EVALUATED, _row("checkpoint.keep_best", "true", "files")),
    _row("checkpoint.export", "true", "files"),
    *_with("run", {**_EVALUATED, "checkpoint.export": "true", "checkpoint.keep_best": "true", "optimizer.lr": "1"},
        _row("checkpoint.export_best", "true", "weights")),
)  # fmt: skip
NOT_SHOWN: dict[str, str] = {}
"""Reasons by setting, or by setting and value ("offload.dispatch auto")."""


def choices(key: str) -> list[str]:
    """Return the values of a setting with named choices; empty for other settings."""
    section, name = key.split(".")
    types = nested_types(Config.SECTIONS[section].model_fields[name].annotation)
    named = [value for part in types if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)]
    if bool in types:
        named += [False, True]
    return [show(value) for value in named]


def wanted() -> Iterator[str]:
    """Yield all settings, and each value of a choice after its setting ("train.clip auto")."""
    for key in all_keys():
        yield key
        yield from (f"{key} {value}" for value in choices(key))


def shown() -> set[str]:
    """Return the part of `wanted` with a row."""
    values = {f"{row.key} {value}" for row in ROWS for value in row.all_values}
    return values.union(row.key for row in ROWS).intersection(wanted())


def counts() -> dict[str, int]:
    """Return the number of settings and of values of choices, and how many of them are shown."""
    found = {}
    for name, keys in (("", list(wanted())), ("_shown", shown())):
        num_choices = sum(" " in key for key in keys)
        found[f"settings{name}"] = len(keys) - num_choices
        found[f"choices{name}"] = num_choices
    return found
