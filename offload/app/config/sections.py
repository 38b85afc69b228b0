"""Configuration sections: every setting with type, default and help text. `config.py` combines them."""

from __future__ import annotations

import contextlib
import math
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from offload.app.config.presets import PRESETS, SCALES
from offload.app.config.rules import RULE_SETTINGS, RuleName
from offload.errors import nearest, shorten
from offload.setting_texts import TEXTS
from offload.sizes import parse_chunks, parse_size

_LEAST_TYPED, _LEAST_BARE = 2**20, 2**10
"""Smallest plausible budgets without a unit, in bytes: for text typed by a user, and for a bare number as a run writes
them. Below, the unit was probably forgotten.
"""
Format = Literal[
    "auto",
    "text",
    "jsonl",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "preference",
    "contrastive",
    "tokens",
]
_FORMATS = {**{name: name for name in get_args(Format)}, "completion": "jsonl", "chat_template": "messages"}
"""Format names; the last two come from axolotl."""
_SOURCE_KEYS = ("path", "type", "split", "name", "revision", "weight", "columns")


def _as_budget(value: Any) -> int | None:
    """Parse a size like `parse_size`, and reject a number with a forgotten unit."""
    num_bytes = parse_size(value)
    # A run writes bare numbers, and may have decided on a small one; a user types few without a unit.
    least = _LEAST_BARE
    if isinstance(value, str):
        least = _LEAST_TYPED
    if num_bytes and num_bytes < least and not str(value).strip()[-1:].isalpha():
        unit = "MiB"
        if num_bytes < 2**10:
            unit = "GiB"
        raise ValueError(
            f"without a unit it is a number of bytes: did you mean {value}{unit}? Write {num_bytes}B where bytes are "
            "meant"
        )
    return num_bytes


def _as_list(value: Any) -> Any:
    if isinstance(value, str | Path):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(str(item) if isinstance(item, Path) else item for item in value)
    return value


def _as_words(value: Any) -> Any:
    """Accept several words as a list, as several arguments, or as one text with spaces."""
    words = _as_list(value)
    # As for numbers: another type is for the field to reject.
    if isinstance(words, tuple) and all(isinstance(word, str) for word in words):
        return tuple(part for word in words for part in word.split())
    return words


def _as_numbers(value: Any) -> Any:
    """Accept [0.9, 0.95] as a list, as several words, or as one word with commas."""
    words = [value] if isinstance(value, str) else value
    # Only words of numbers: the field rejects another type with a better message.
    if isinstance(words, list | tuple) and all(isinstance(word, str) for word in words):
        return tuple(part for word in words for part in word.strip("[]() ").replace(",", " ").split())
    return value


_INT = "tag:yaml.org,2002:int"


class _Loader(yaml.SafeLoader):
    """YAML loader with an error for duplicate keys; PyYAML would silently drop the first. Numbers are as on the command
    line: 010 is ten, where YAML 1.1 reads eight, and 0x10 and 1:30 are text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:  # the user cannot see which of both counts
                raise ValueError(
                    f"{name} is set twice, in line {lines[name]} and in line {line}; leave one of them out"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != _INT]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9]+(_[0-9]+)*$"), list("-+0123456789"))
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)


def read_yaml(text: str) -> Any:
    """Parse a YAML text. Raises ValueError."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: a file runs no code
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {shorten(' '.join(str(error).split()))}") from None
    except RecursionError:
        raise ValueError("it cannot be read as YAML: it is nested too deeply") from None
    except Exception as error:  # a tag unsuited to the value fails with the error type of the conversion
        raise ValueError(f"it cannot be read as YAML: {shorten(str(error))}") from None


def _as_yaml(value: Any) -> Any:
    """Parse structured text from the command line."""
    if not isinstance(value, str):
        return value
    return read_yaml(value)


def _as_structure(value: Any) -> Any:
    """Parse text with a leading [ or {; any other text is a path."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return _as_yaml(value)
    return value


def _as_groups(value: Any) -> Any:
    """Accept {regex: {key: number}}, a list of [regex, {key: number}], or YAML text with either."""
    value = _as_yaml(value)
    if isinstance(value, Mapping):
        return tuple(value.items())
    if value is None:
        return ()
    return value


def _as_group_value(value: Any) -> float | str:
    """Accept a finite number, or the name of an update rule."""
    if isinstance(value, str) and value in RULE_SETTINGS:
        return value
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):  # True would be 1.0
            return number
    raise ValueError(f"it should be a finite number, or for rule one of {', '.join(RULE_SETTINGS)}")


def _as_throttle(value: Any) -> Any:
    """Accept {lane: size} or {lane: {bandwidth, latency_seconds}}, also as YAML text. The lanes validate them."""
    value = _as_yaml(value)
    if value is None or value == "none":
        return None
    if not isinstance(value, Mapping):
        raise ValueError("it should be {LANE: bytes per second}, such as {h2d: 100MiB}, or none")
    lanes = {lane: dict(rate) if isinstance(rate, Mapping) else rate for lane, rate in value.items()}
    for rate in lanes.values():
        # The engine's check takes numbers alone.
        if isinstance(rate, dict) and isinstance(rate.get("latency_seconds"), str):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
                rate["latency_seconds"] = float(rate["latency_seconds"])
    return lanes


def _as_number(value: Any) -> Any:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value


def _as_flag(value: Any) -> Any:
    # A Literal takes no text for a bool, and the command line has texts alone.
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _number_or(words: tuple[str, ...], least: int, allowed: str) -> BeforeValidator:
    """Return a parser for one of `words`, or a whole number from `least` on. `allowed`: both, for the error."""

    def parse(value: Any) -> Any:
        text = str(value).strip().lower()
        if text in words:
            return text
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise ValueError(f"it should be {allowed}")

    return BeforeValidator(parse)


def _as_sources(value: Any) -> Any:
    """Convert a path, a source mapping, or a list with either to a tuple (mappings only). Raises ValueError.

    A value with another type is returned unchanged; the field type then rejects the value.
    """
    if value is None or value == "none":
        return ()
    if isinstance(value, str | Mapping):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(map(_as_source, value))
    return value


def _as_source(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"a source is a path or a mapping such as {{path: FILE, weight: 0.5}}, not {shorten(repr(value))}"
        )
    for key in value:
        if key not in _SOURCE_KEYS:
            close, listed = nearest(str(key), _SOURCE_KEYS), ", ".join(_SOURCE_KEYS)
            raise ValueError(f"a source has no key {shorten(repr(key))}{close}; its keys are {listed}")
    source = {key: value[key] for key in _SOURCE_KEYS if value.get(key) is not None}
    for key in ("path", "type", "split", "name", "revision"):
        if key in source and (not isinstance(source[key], str) or not source[key]):
            raise ValueError(f"{key} of a source should be a text, not {shorten(repr(source[key]))}")
    if "path" not in source:
        raise ValueError("a source needs its path: a file, a folder, a glob, a URL or the name of a data set")
    if "type" in source:
        if source["type"] not in _FORMATS:
            close = nearest(source["type"], _FORMATS)
            raise ValueError(f"type of a source should be one of {', '.join(_FORMATS)}, not {source['type']!r}{close}")
        source["type"] = _FORMATS[source["type"]]
    if "weight" in source:
        weight = source["weight"]
        # A bool is an int to Python.
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"weight of a source should be a number above 0, not {shorten(repr(weight))}")
    if "columns" in source:
        source["columns"] = _as_columns(source["columns"])
    return source


def _as_columns(value: Any) -> Any:
    """Return {format key: column name} as a dict. Raises ValueError."""
    if value is None or value == "none":
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError("it should say which column is meant by a key, such as {text: body}")
    return dict(value)


Size = Annotated[int | None, BeforeValidator(_as_budget)]
Chunks = Annotated[int | str | None, BeforeValidator(lambda value: parse_chunks(value))]
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Words = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MaxNorm = Annotated[Rate | None, AfterValidator(lambda norm: norm or None)]  # 0: no clipping, as in the engine
Share = Annotated[float, Field(gt=0, le=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_as_numbers)]
GroupValue = Annotated[float | str, BeforeValidator(_as_group_value)]
Groups = Annotated[tuple[tuple[str, dict[str, GroupValue]], ...], BeforeValidator(_as_groups)]
Prefetch = Annotated[int | str, _number_or(("auto",), 0, "auto or a whole number of units, 0 or more")]
Tile = Annotated[int | str, _number_or(("auto", "none"), 1, "a number of tokens, at least 1, none, or auto")]
Stage = Annotated[Literal["auto", 0, 1, 2, 3], BeforeValidator(_as_number)]
Replicas = Annotated[Count | Literal["auto"], BeforeValidator(_as_number)]
Delay = Annotated[Literal[0, 1], BeforeValidator(_as_number)]
Throttle = Annotated[dict[str, Any] | None, BeforeValidator(_as_throttle)]
Flag = Annotated[Literal["auto", True, False], BeforeValidator(_as_flag)]
Tokens = Annotated[tuple[Natural, ...], BeforeValidator(_as_numbers)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_as_numbers)]
Sources = Annotated[tuple[dict[str, Any], ...], BeforeValidator(lambda value: _as_sources(_as_structure(value)))]
Columns = Annotated[dict[str, str], BeforeValidator(lambda value: _as_columns(_as_yaml(value)))]
StateTier = Literal["auto", "device", "cpu", "nvme"]


PAIR_METHODS = ("dpo", "orpo", "reward")
"""Values of train.method with rows in pairs: a chosen and a rejected answer."""
ROW_FORMATS = {**dict.fromkeys(PAIR_METHODS, "preference"), "contrastive": "contrastive"}
"""By values of train.method, formats with several documents per row."""
DOCUMENTS = "documents"
"""Value of model.attention for packed documents computed one by one."""
PYTHON_PREFIX = "python:"
"""Prefix in model.path before the class name, for a model object passed to `Trainer`."""


class Section(BaseModel):
    """Base class for sections. Unknown keys are rejected and assignments validated. Attribute docstrings become help
    texts; those of engine settings stand in `offload.setting_texts`.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    main: ClassVar[tuple[str, ...]] = ()
    """Settings in the first help; `--help-extra` shows all."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            key = f"{cls.__name__.removesuffix('Section').lower()}.{name}"  # an engine setting
            field.description = " ".join((field.description or TEXTS[key]).split())

    @field_validator("*", mode="before")
    @classmethod
    def _words(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn `none` into None if allowed, and reject true and false as numbers and names."""
        types = nested_types(cls.model_fields[str(info.field_name)].annotation)
        # Here, once for all fields: text from the command line has no other way to say None.
        if type(None) in types and isinstance(value, str) and value.strip().lower() in ("none", "null"):
            return None
        # An unset variable of a shell: as a path it would be the working folder.
        given = value if isinstance(value, list | tuple) else [value]
        if str in types and any(isinstance(each, str) and not each.strip() for each in given):
            raise ValueError("it is empty; give a value, or leave the setting out")
        # YAML reads yes, no, on and off as booleans.
        if isinstance(value, bool) and not any(each is bool or each is value for each in types):
            raise ValueError("it cannot be true or false")
        return value


def nested_types(annotation: Any) -> list[Any]:
    """Return a type followed by all nested type arguments."""
    return [annotation, *(nested for part in typing.get_args(annotation) for nested in nested_types(part))]


class RunSection(Section):
    """Run folder, loggers and seed."""

    main = ("dir", "seed")

    dir: str | None = None
    """Run folder. none: runs/NAME, or the first free runs/NAME-N."""
    name: Annotated[str, Field(min_length=1)] = "train"
    """Run name, used for the folder and in the records."""
    seed: Natural = 0
    """Seed for initial weights, data order, dropout and the printed sample."""
    report_to: Words = ()
    """Extra loggers for the numbers in metrics.jsonl, separated by spaces: tensorboard, wandb, trackio, mlflow. Each
    needs a separate package. none: no extra logger.
    """
    debug: bool = False
    """Show tracebacks; poison freed buffers and check for races (slower)."""


class ModelSection(Section):
    """The model: a Hugging Face folder, a config.json (random weights), or a preset by name."""

    main = ("path", "preset", "init")

    path: str | None = None
    """Model folder, hub name, or config.json. none: use model.preset."""
    preset: str | None = Field(
        default=None,
        description=(
            "Name of a known shape. A published model, such as qwen3-14b, or a Llama-like shape: "
            f"{', '.join(SCALES)}. An unknown name gives the whole list. none: tiny, unless model.path is set."
        ),
    )
    init: Literal["auto", "pretrained", "random"] = "auto"
    """Initial weights. pretrained: read from model.path. random: initialization of the model family. auto: pretrained
    for a folder or hub name, random for a preset or a config.json.
    """
    attention: str = "auto"
    """Attention implementation: eager, sdpa, or another name known to transformers. documents: the default of
    transformers, but packed documents (data.packing_isolated) are computed one by one, without a mask over the row.
    auto: documents for such rows if the model allows, else the default of transformers. Models with sinks (gpt-oss),
    where this default makes all scores, then have fused attention; eager keeps the model's own.
    """

    @property
    def label(self) -> str:
        """Name of the model for messages."""
        return self.path or f"preset {self.preset or 'tiny'}"

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"it should be one of {', '.join(PRESETS)}{nearest(value.lower(), PRESETS)}")
        return value


class DataSection(Section):
    """Training data, and the conversion to rows of tokens."""

    main = ("source", "format", "tokenizer", "sequence_length", "packing", "eval_source")

    source: Strings = ("builtin:stdlib",)
    """Files, folders, globs, URLs and data set names; several form one source. Required with model.path. Built in:
    builtin:stdlib (source code of the Python standard library) and builtin:stdlib-chat.
    """
    format: Format = "auto"
    """Content of the files: plain text, or rows in a named format. auto: detected from the file name and the first row.
    """
    columns: Columns = Field(default={}, validate_default=True)
    """Column names for the keys of the format, for example {text: body}, if the names differ."""
    sources: Sources = ()
    """Several sources instead of data.source: [{path, type, split, weight, columns, name, revision}, ...]. Only path is
    required. type: like data.format. weight: share of the rows per epoch. none: data.source.
    """
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """End of an epoch over weighted sources: all_exhausted (every row appears at least once, small sources repeat) or
    first_exhausted (no row appears twice).
    """
    on_bad_row: Literal["error", "skip"] = "error"
    """Unreadable row: error stops the run, skip omits and counts the row."""
    tokenizer: str | None = None
    """Tokenizer folder, file or hub name. none: from the model folder; without one, a BPE trained on the data, for a
    model with random weights only.
    """
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens per row. none: 256 for the tiny preset, else 1024, limited by the model."""
    packing: bool = True
    """Pack several documents into a row. false: one document per row, truncated or padded. Conversations with pictures
    always take one row each, and longer ones are dropped.
    """
    packing_isolated: Flag = "auto"
    """true: documents in a row cannot attend to each other, and none is split between rows. Positions restart at 0,
    attention separates documents by them (model.attention), and a check at the start confirms the isolation. false:
    documents are concatenated, split into full rows, and can attend to each other. auto: true for conversations, or
    one document per row if the model mixes documents; false for other text.
    """
    group_by_length: Flag = "auto"
    """For one document per row (data.packing false): batch rows with similar lengths and pad to the longest in the
    batch. Every new length compiles again, so train.compile auto then means never. false: random order, padded to
    data.sequence_length. auto: true, unless train.compile is always or rows are pairs.
    """
    train_on_prompt: bool = False
    """Include prompts in the loss, not only answers; with train.method orpo, in the loss of the chosen answer."""
    num_workers: Natural | None = None
    """Tokenizer processes, about 300 MB each. 0: only the main process, with the threads of `tokenizers`. none: 0; for
    conversations from 32 MiB on, one per core, at most 16, because Python renders the template.
    """
    eval_share: Beta | None = None
    """Share of the documents held out for evaluation. none: 0.02, or 0 with data.eval_source. 0: no evaluation data."""
    eval_source: Sources = ()
    """Evaluation files, or several sources as in data.sources. Each source is evaluated and logged under a separate
    name.
    """

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats set for all sources, without auto."""
        stated = (self.format, *(str(each.get("type", "auto")) for each in (*self.sources, *self.eval_source)))
        return tuple(dict.fromkeys(each for each in stated if each != "auto"))


class TrainSection(Section):
    """Training method, length and batch."""

    main = (
        "method",
        "steps",
        "epochs",
        "max_seconds",
        "batch_size",
        "micro_batch_size",
        "precision",
        "recompute",
        "compile",
        "max_grad_norm",
        "eval_every",
    )

    method: Literal["sft", "distill", "dpo", "orpo", "reward", "contrastive"] = "sft"
    """Training objective. sft: next-token loss on text. distill: learn the token probabilities of distill.teacher. For
    answer pairs (data.format preference): dpo, prefer the chosen answer more than the initial model does; orpo, prefer
    and generate the chosen answer, without a reference model; reward, a scoring model with one output. contrastive:
    embeddings, from queries with answers (data.format contrastive).
    """
    beta: Positive = 0.1
    """For dpo: reward per nat of log-probability above the reference. For orpo: weight of the preference term relative
    to the loss of the chosen answer (lambda in the paper).
    """
    center_rewards_coefficient: Rate = 0.0
    """For reward: weight of the squared score sum of a pair. The term keeps the mean score near zero."""
    steps: Count | None = None
    """Optimizer steps. none: set by train.epochs or train.max_seconds. If all three are none: one pass over your data,
    or 400 steps over the built-in text.
    """
    epochs: Positive | None = None
    """Passes over the data, used when train.steps is none. none: as train.steps says."""
    max_seconds: Positive | None = None
    """Stop after this many seconds. none: no limit (90 for the built-in run)."""
    batch_size: Count = 8
    """Sequences (or answer pairs, or queries) per step over all ranks."""
    tokens_per_step: Count | None = None
    """Tokens per step over all ranks, padding included, in place of train.batch_size: as many rows of
    data.sequence_length as they hold, equally many on each rank. The plan then chooses train.micro_batch_size and
    train.passes, unless set. none: train.batch_size says the rows.
    """
    micro_batch_size: Count | None = None
    """Sequences (or pairs, or queries) per pass on each rank; gradients accumulate. none: the whole batch at once."""
    passes: Count = 1
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute dtype. bf16: bfloat16 with fp32 master weights. fp16: float16 with fp32 master weights and a loss scale,
    for GPUs without bf16; steps with non-finite gradients are skipped. fp32: fp32 throughout. auto: on a GPU bf16; on
    one without bf16 in hardware fp16, or fp32 with mezo; elsewhere bf16 with optimizer.master bf16 or products in FP8,
    else fp32.
    """
    matmul: Literal["precision", "fp8_rowwise", "fp8_tensorwise"] = "precision"
    recompute: Literal["auto", "always", "never", "products"] = "auto"
    compile: Literal["auto", "always", "never"] = "auto"
    sequence_tile: Tile = "auto"
    sequence_parallel: Count = 1
    max_grad_norm: MaxNorm = 1.0
    clip: Literal["auto", "speculative", "deferred"] = "auto"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    delay: Delay = 0
    delay_after: Natural = 0
    eval_every: Natural = 100
    """Evaluate every this many steps, and at the end. 0: only at the end."""
    eval_batches: Count | Literal["all"] = 8
    """Batches per evaluation from each eval source, the same batches each time. all: every row."""
    early_stopping_patience: Count | None = None
    """End the run after this many consecutive evaluations without a new lowest loss (first eval source). none: never.
    """
    early_stopping_min_delta: Rate = 0.0
    """With train.early_stopping_patience: minimum decrease to count as a lower loss."""
    log_every: Count = 10
    """Print a line every this many steps, and every half minute (a terminal shows every step)."""
    head_chunk_bytes: Chunks = "auto"

    def num_groups(self, num_ranks: int) -> int:
        """Return the number of rank groups. Ranks in a group share rows; the rows of a step are divided among the
        groups.
        """
        return num_ranks // self.sequence_parallel


class OptimizerSection(Section):
    """Update rule and learning rate."""

    main = ("name", "lr", "weight_decay", "freeze", "schedule", "warmup_steps")

    name: RuleName = "adamw"
    """Update rule. lion has one moment and saves 4 bytes per parameter; sgd has one or none; adafactor and adalomo
    store one number per row and column; lomo stores no state; muon has one moment and orthogonalizes block matrices,
    with adamw for the rest. lomo and adalomo drop each gradient at once, so clipping costs a second backward. mezo
    has no backward: mezo measures the loss on both sides of the weights, and stores no state.
    """
    reset: bool = False
    """Resume from a checkpoint with another update rule or optimizer.states. Weights, step and data position come from
    the checkpoint; optimizer states start empty.
    """
    reset_every: Natural = 0
    """Momentum reset (arXiv:2505.22922): every this many steps, set all moments to zero and start the count of updates
    for the bias correction again. The learning rate is unchanged. The paper's code uses 500. 0: never.
    """
    lr: Rate | None = None
    """Peak learning rate. none: 2e-5 for pretrained weights, 2e-4 for an adapter over pretrained weights (either
    divided by 20 with train.method dpo and orpo), 1e-3 for random weights (4e-3 for tiny). Multiplied by 0.1 for
    lion, 10 for adafactor and adalomo (relative to the weights), 100 for lomo, and 0.05 for mezo.
    """
    states: Literal["fp32", "bf16", "int8"] = "fp32"
    """Moment storage for adamw and lion: 4, 2 or about 1 byte per element. bf16 uses stochastic rounding (seed:
    run.seed). int8 has one scale per 128 elements and keeps embeddings and parameters below 4096 elements in fp32.
    Both imply deferred clipping.
    """
    betas: Betas = (0.9, 0.95)
    """Decay rates of the first and second moment, each in [0, 1). For lion: decay in the step and after the step, 0.9
    and 0.99 unless set. In Python, AdamW() has the torch defaults 0.9 and 0.999.
    """
    eps: Rate = 1e-8
    """Term added to the root of the second moment, for adamw (and the adamw part of muon). For mezo: distance from the
    weights at which the loss is measured, 1e-3 unless set.
    """
    weight_decay: Rate = 0.01
    """Decoupled weight decay, scaled by the learning rate. For sgd, added to the gradient. Unless set: 0.1 for lion
    and muon, 0 for adafactor, lomo, adalomo and mezo.
    """
    beta2_decay: Annotated[float, Field(le=0, allow_inf_nan=False)] | None = None
    """For adafactor and adalomo: weight of step t in the second moments is t^beta2_decay. none: -0.8."""
    d: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """For adafactor and adalomo: root-mean-square limit above which an update is scaled down. none: 1."""
    clip_value: Positive | None = None
    """For lomo: clamp each gradient element to this magnitude. none: no clamping."""
    momentum: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """For sgd and muon: moment decay rate. none: 0 for sgd (no optimizer state), 0.95 for muon."""
    nesterov: bool | None = None
    """For muon: Nesterov momentum. none: true."""
    ns_steps: Annotated[int, Field(ge=0, lt=100)] | None = None
    """For muon: Newton-Schulz iterations. none: 5."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """For muon: dependence of the learning rate on the matrix shape. none: match_rms_adamw, so one rate suits muon and
    the adamw part. In Python, Muon() has the torch default, original.
    """
    num_perturbations: Annotated[int, Field(ge=1, lt=32768)] | None = None
    """For mezo: random directions per step, two forward passes each. All passes run at once, each with activations and
    a copy of the trainable weights resident on the device. none: 1.
    """
    layer_fraction: Share | None = None
    """For mezo: share of the model blocks perturbed and updated in a step, sampled anew each step. none: all blocks."""
    magnitude_quantile: Share | None = None
    """For mezo: perturb and update only the weights of least magnitude in each parameter, up to this quantile; weight
    decay applies to all. none: all weights.
    """
    master: Literal["fp32", "bf16"] = "fp32"
    """For mezo with train.precision bf16: dtype of the master weights. bf16 halves the memory to 2 bytes per parameter,
    with stochastic rounding after each step (seed: run.seed).
    """
    freeze: Words = ()
    """Parameters to freeze: regular expressions separated by spaces. Each must match some parameter name. Frozen
    parameters have no gradients and no optimizer states, and stream as frozen weights. none: all train.
    """
    decay_1d: bool = False
    """Apply weight decay to biases and norms too (parameters with fewer than two dimensions)."""
    groups: Groups = ()
    """Exceptions by parameter name as YAML, first match wins: {REGEX: {lr_scale: X, weight_decay: Y, rule: NAME}}.
    Another rule reads the settings of this section.
    """
    schedule: Literal["auto", "constant", "linear", "cosine", "wsd"] = "auto"
    """Learning rate after warmup. wsd: constant, then linear decay over the last fifth. auto: cosine, or constant if
    only max_seconds is set.
    """
    warmup_steps: Natural | None = None
    """Steps until the learning rate reaches the peak. none: 1/20 of the steps, at most 100."""

    @property
    def has_gradients(self) -> bool:
        """True if a step runs a backward pass. Only rules based on forward passes alone do not."""
        return RULE_SETTINGS[self.name].has_gradients

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of all update rules, with those of groups."""
        return (self.name, *(str(each["rule"]) for _, each in self.groups if each.get("rule") in RULE_SETTINGS))

    @property
    def uncorrectable(self) -> str:
        """Title of a rule without corrections for speculative clipping; empty if updates can be corrected."""
        if self.states != "fp32":
            return f"{self.name} with states in {self.states}"
        if self.name == "adamw":
            return ""
        return self.name


def _as_init(value: Any) -> Any:
    if not re.fullmatch(r"default|gaussian|orthogonal|olora|pissa(_niter_[1-9]\d{0,2})?|loftq(_[1-9]\d?)?", str(value)):
        raise ValueError("should be default, gaussian, orthogonal, olora, pissa, or pissa_niter_16 (iterations)")
    return value  # a run with loftq is refused later, because its checkpoints can be resumed


LoraInit = Annotated[str, BeforeValidator(_as_init)]


class LoraSection(Section):
    """A PEFT adapter trained over frozen model weights. Names and defaults follow PEFT."""

    main = ("rank", "alpha", "target_modules", "adapter")

    rank: Natural = 0
    """LoRA matrix rank (r). 0: no adapter, unless lora.config or lora.adapter is set."""
    alpha: Count = 8
    """Numerator of the LoRA scale alpha/rank (lora_alpha)."""
    dropout: Beta = 0.0
    """Dropout probability on the adapter input (lora_dropout)."""
    target_modules: Words | None = None
    """Modules to adapt, by name suffix, separated by spaces. all-linear: all linear modules except the head. none: PEFT
    default for the model family.
    """
    target_parameters: Words | None = None
    """Parameters to adapt, by name suffix; for example experts.down_proj, where all experts form one tensor."""
    modules_to_save: Words | None = None
    """Modules trained in full and saved with the adapter, for example lm_head."""
    trainable_tokens: Tokens | None = None
    """Token ids with trainable embedding rows (trainable_token_indices)."""
    init: LoraInit = "default"
    """Initial matrix values (init_lora_weights): default, gaussian, orthogonal. olora, pissa or pissa_niter_16 (with
    the iteration count) move part of the base weights into the adapter; the base loses this part.
    """
    use_rslora: bool = False
    """Scale by 1/sqrt(rank) instead of 1/rank."""
    use_dora: bool = False
    """Train the norm of each adapted weight row as well (DoRA)."""
    config: str | None = None
    """JSON file with any PeftConfig, for example an adapter_config.json, in place of the settings here."""
    adapter: str | None = None
    """Adapter folder in PEFT format to start from, in place of the settings here."""
    restart_every: Natural = 0
    """ReLoRA: every this many steps, merge the LoRA into the base in fp32 and start a new one. The base must be
    unquantized and writable (offload.frozen_weights exact, offload.parameters not files). Checkpoints store the
    merged base weights, and the run exports a whole model. 0: never.
    """
    restart_prune: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Share of each LoRA moment reset to zero at a restart, smallest magnitudes first. 1: all; 0: none."""
    restart_warmup_steps: Natural | None = None
    """Steps until the learning rate recovers from 0 after a restart. none: 1/20 of lora.restart_every, at most 100."""

    @property
    def whole(self) -> str | None:
        """Name of a complete description of the adapter; None if the settings here describe the adapter."""
        return self.config or self.adapter

    @property
    def adapts(self) -> bool:
        """True if an adapter is trained over frozen weights."""
        return bool(self.rank or self.whole)


class PrefsSection(Section):
    """Preferences: the model that train.method dpo compares with."""

    reference: str | None = None
    """Folder (or hub name) of the reference of train.method dpo, a causal language model with the tokens of the trained
    model. none: the initial model. A plan also takes a preset or a config.json.
    """
    way: Literal["stored", "beside"] = "stored"
    """stored: the log-probabilities are measured once, within the same budgets, before the trained model is in memory.
    beside: the reference streams beside the model in each step.
    """


class DistillSection(Section):
    """Distillation: the model learns the token probabilities of a frozen teacher (train.method distill)."""

    teacher: str | None = None
    """Folder (or hub name) of the teacher, a causal language model with the tokens of the trained model. The weights
    stream like other frozen weights: offload.parameters, offload.frozen_weights. A plan also takes a preset or a
    config.json.
    """
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Divergence. 0: forward KL, from the teacher to the model. 1: reverse KL. Between: generalized Jensen-Shannon
    divergence with this share of the teacher in the mixture.
    """
    temperature: Positive = 1.0
    """Divides the logits of teacher and model."""
    labels: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the next-token loss on the labels in the loss; the rest is the divergence."""
    top_k: Count | None = None
    """Learn the probabilities of so many tokens, the most probable ones of the teacher, and that of all others
    together. none: of each token.
    """
    way: Literal["beside", "stored"] = "beside"
    """beside: the teacher runs in each step. stored: the teacher runs once, over all rows before the first step, and
    its probabilities are read from disk: 8 * distill.top_k + 4 bytes for each token with a target.
    """


class ContrastiveSection(Section):
    """Contrastive learning of text embeddings (train.method contrastive)."""

    negatives: Natural = 0
    """Hard negatives of each query, the first ones in its row."""
    pooling: Literal["auto", "mean", "last", "cls"] = "auto"
    """Embedding of a text from its hidden states: the mean, the last, or the first. auto: as in the folder of the model
    (1_Pooling of sentence-transformers); else last for a decoder, and mean for an encoder.
    """
    temperature: Positive = 0.05
    """Divides the cosine similarities; 1 / scale of sentence-transformers."""
    symmetric: bool = True
    """Also learn the query of each answer, in equal parts. false: only the answer to each query."""
    sizes: Counts = ()
    """Sum the loss over the first so many numbers of the embeddings, which then also work alone (matryoshka). none: all
    numbers.
    """
    margin: Rate | None = None
    """Leave out texts whose similarity to the query is above that of the answer by more than this: they are probably
    answers too. none: all texts count, except known answers.
    """


class OffloadSection(Section):
    """Tier for each kind of state, and the memory budgets."""

    main = ("parameters", "optimizer", "device_memory", "host_memory", "nvme_dir", "frozen_weights")

    parameters: Literal["auto", "device", "cpu", "nvme", "files"] = "auto"
    optimizer: StateTier = "auto"
    gradients: StateTier = "auto"
    activations: StateTier = "auto"
    graphs: StateTier = "auto"
    experts: Literal["auto", "whole", "streamed"] = "auto"
    optimizer_memory: Size = None
    graphs_memory: Size = None
    device_memory: Size = None
    host_memory: Size = None
    nvme_dir: Strings | None = None
    nvme_memory: Size = None
    prefetch: Prefetch = "auto"
    zero_stage: Stage = "auto"
    """State partitioning over ranks: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters. auto: the lowest
    stage without a loss of speed, by search; 3 if unknown.
    """
    replicas: Replicas = "auto"
    replica_states: Literal["whole", "shared"] = "whole"
    dispatch: Literal["auto", "never", "always"] = "never"
    throttle: Throttle = None
    frozen_weights: Literal["exact", "int8", "fp8", "nf4"] = "exact"
    link_weights: Literal["exact", "int8"] = "exact"
    link_gradients: Literal["exact", "int8", "int4"] = "exact"
    device: str | None = None
    update: Literal["auto", "cpu", "device", "both"] = "auto"


class CheckpointSection(Section):
    """Checkpoints, resume and export."""

    main = ("every", "resume", "export")

    every: Count | Literal["auto"] | None = "auto"
    """Save all states every this many steps, and at the end. auto: every hour if the disk has room for a checkpoint and
    the export; each replaces the previous one. none: only when the run is asked to stop.
    """
    keep: Count | None = None
    """Number of checkpoints to keep. none: all, but only the newest of the hourly ones."""
    resume: str = "auto"
    """Checkpoint to resume from: auto, never, or the path to a checkpoint or a run. auto: the newest intact one in the
    run folder, if any. never: start anew.
    """
    on_error: Literal["continue", "stop"] = "continue"
    """Reaction to a failed checkpoint write, for example on a full disk. Earlier checkpoints stay intact."""
    keep_best: bool = False
    """Also save a checkpoint after each evaluation with a new lowest loss, and keep the latest one beside the newest
    checkpoints.
    """
    export: bool = True
    """At the end, write the model as a Hugging Face folder to RUN/hf, reload and check the export."""
    export_best: bool = False
    """Export the weights with the lowest evaluation loss instead of the last weights. Requires checkpoint.keep_best."""
