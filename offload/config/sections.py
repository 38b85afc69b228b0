"""The sections of a configuration: every setting with its type, default and help. `config.py` puts them together."""

from __future__ import annotations

import contextlib
import math
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from offload.config.data_sources import Format, as_columns, as_sources
from offload.config.presets import PRESETS
from offload.config.rules import OFFERS, RuleName
from offload.errors import ConfigError, nearest, shorten

_SIZE_UNITS = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
"""Bytes by unit, in lower case. A letter alone is a binary unit, as of `free -h`, Slurm and Docker."""
_LEAST_TYPED, _LEAST_BARE = 2**20, 2**10
"""Budgets below, without a unit, have lost one: as a text, and as a number, in which a run writes its own budgets."""


def parse_size(value: Any, key: str | None = None) -> int | None:
    """Return a number of bytes from "6GiB", "6G" (the same), "512MiB", "1.5GB" or a number; None stays None
    (no limit).

    Raises ConfigError; its message begins with `key` if that is given.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return None
    text = str(value).strip().lower().replace("_", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    try:
        if isinstance(value, bool):
            raise ValueError
        num_bytes = float(number) * _SIZE_UNITS[unit]
        if not 0 <= num_bytes < 2**63:
            raise ValueError
    except (ValueError, KeyError):
        what = f"{key} is {shorten(repr(value))}; " if key else ""
        raise ConfigError(
            f'{what}it should be a size such as "6GiB", "512MiB", "1.5GB", a number of bytes, or none'
        ) from None
    return int(num_bytes)


def _as_budget(value: Any) -> int | None:
    """Do what `parse_size` does, and refuse a number that has lost its unit."""
    num_bytes = parse_size(value)
    least = _LEAST_TYPED if isinstance(value, str) else _LEAST_BARE
    if num_bytes and num_bytes < least and not str(value).strip()[-1:].isalpha():
        unit = "GiB" if num_bytes < 2**10 else "MiB"
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
    """Take several words as a list, as several arguments, or as one text with spaces."""
    words = _as_list(value)
    if isinstance(words, tuple) and all(isinstance(word, str) for word in words):
        return tuple(part for word in words for part in word.split())
    return words


def _as_numbers(value: Any) -> Any:
    """Take [0.9, 0.95] as a list, as several words, or as one word with commas."""
    words = [value] if isinstance(value, str) else value
    if isinstance(words, list | tuple) and all(isinstance(word, str) for word in words):
        return tuple(part for word in words for part in word.strip("[]() ").replace(",", " ").split())
    return value


class _Loader(yaml.SafeLoader):
    """YAML in which no key of a mapping may stand twice: the first would be dropped."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(
                    f"{name} stands twice, in line {lines[name]} and in line {line}; leave one of them out"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return what a text in YAML says. Raises ValueError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {shorten(' '.join(str(error).split()))}") from None
    except RecursionError:
        raise ValueError("it is not YAML that can be read: it is nested too deeply") from None
    except Exception as error:  # a tag that does not fit its value is met by whatever conversion it leads to
        raise ValueError(f"it is not YAML that can be read: {shorten(str(error))}") from None


def _as_yaml(value: Any) -> Any:
    """Read structured text from the command line."""
    if not isinstance(value, str):
        return value
    return read_yaml(value)


def _as_structure(value: Any) -> Any:
    """Read a text that begins as a list or a mapping does; another one is a path."""
    return _as_yaml(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value


def _as_groups(value: Any) -> Any:
    """Take {regex: {key: number}}, or a list of [regex, {key: number}], or either of them as YAML text."""
    value = _as_yaml(value)
    if isinstance(value, Mapping):
        return tuple(value.items())
    return () if value is None else value


def _as_group_value(value: Any) -> float | str:
    """Take a finite number, or the name of an update rule."""
    if isinstance(value, str) and value in OFFERS:
        return value
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    raise ValueError(f"it should be a finite number, or for rule one of {', '.join(OFFERS)}")


def _as_throttle(value: Any) -> Any:
    """Take {lane: size} or {lane: {bandwidth, latency_seconds}}, also as YAML text. What is in it, the lanes check."""
    value = _as_yaml(value)
    if value is None or value == "none":
        return None
    if not isinstance(value, Mapping):
        raise ValueError("it should be {LANE: bytes per second}, such as {h2d: 100MiB}, or none")
    return {lane: _with_latency(rate) if isinstance(rate, Mapping) else rate for lane, rate in value.items()}


def _with_latency(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Read a number that YAML takes for text, such as 1e-3."""
    latency = fields.get("latency_seconds")
    with contextlib.suppress(ValueError):
        latency = float(latency) if isinstance(latency, str) else latency
    return {key: latency if key == "latency_seconds" else value for key, value in fields.items()}


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def _as_flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _as_prefetch(value: Any) -> Any:
    text = str(value).strip().lower()
    if text == "auto":
        return "auto"
    if text.isdecimal():
        return int(text)
    raise ValueError("it should be auto or a whole number of units, 0 or more")


def _as_tile(value: Any) -> Any:
    text = "none" if value is None else str(value).strip().lower()
    if text in ("auto", "none"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError("it should be a number of tokens, at least 1, none, or auto")


def parse_chunks(value: Any, key: str | None = None) -> int | str | None:
    """Return auto, or what `parse_size` does."""
    return "auto" if str(value).strip().lower() == "auto" else parse_size(value, key)


Size = Annotated[int | None, BeforeValidator(_as_budget)]
Chunks = Annotated[int | str | None, BeforeValidator(lambda value: parse_chunks(value))]
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Words = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_as_numbers)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
GroupValue = Annotated[float | str, BeforeValidator(_as_group_value)]
Groups = Annotated[tuple[tuple[str, dict[str, GroupValue]], ...], BeforeValidator(_as_groups)]
Prefetch = Annotated[int | str, BeforeValidator(_as_prefetch)]
Tile = Annotated[int | str, BeforeValidator(_as_tile)]
Stage = Annotated[Literal["auto", 0, 1, 2, 3], BeforeValidator(_as_number)]
Replicas = Annotated[Count | Literal["auto"], BeforeValidator(_as_number)]
Delay = Annotated[Literal[0, 1], BeforeValidator(_as_number)]
Throttle = Annotated[dict[str, Any] | None, BeforeValidator(_as_throttle)]
Flag = Annotated[Literal["auto", True, False], BeforeValidator(_as_flag)]
Tokens = Annotated[tuple[Natural, ...], BeforeValidator(_as_numbers)]
Sources = Annotated[tuple[dict[str, Any], ...], BeforeValidator(lambda value: as_sources(_as_structure(value)))]
Columns = Annotated[dict[str, str], BeforeValidator(lambda value: as_columns(_as_yaml(value)))]
StateTier = Literal["auto", "device", "cpu", "nvme"]


GIVEN = "python:"
"""Before the class of a model that `Trainer` was given, as model.path."""


class Section(BaseModel):
    """Settings: unknown keys are refused, assignments are checked. What stands below a field is its help."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join(str(field.description).split())

    @field_validator("*", mode="before")
    @classmethod
    def _words(cls, value: Any, info: ValidationInfo) -> Any:
        """Read `none` where nothing is allowed, and keep true and false out of numbers and names."""
        kinds = kinds_in(cls.model_fields[str(info.field_name)].annotation)
        if type(None) in kinds and isinstance(value, str) and value.strip().lower() in ("none", "null"):
            return None
        if isinstance(value, bool) and not any(kind is bool or kind is value for kind in kinds):
            raise ValueError("it cannot be true or false")
        return value


def kinds_in(annotation: Any) -> list[Any]:
    """Return a type and all that it is made of."""
    return [annotation, *(kind for part in typing.get_args(annotation) for kind in kinds_in(part))]


class RunSection(Section):
    """Where the run is written, and what makes it repeatable."""

    dir: str | None = None
    """Folder of this run. none: runs/NAME, or the first free runs/NAME-N."""
    name: Annotated[str, Field(min_length=1)] = "train"
    """Name of the run: of its folder and in its records."""
    seed: Natural = 0
    """Seed of initial weights, data order, dropout and the printed sample."""
    report_to: Strings = ()
    """Loggers that get the numbers of metrics.jsonl too, several separated by spaces: tensorboard, wandb, trackio,
    mlflow. Each is a package of its own. none: none.
    """
    debug: bool = False
    """Show tracebacks; poison freed buffers and check for races (slower)."""


class ModelSection(Section):
    """The model: a Hugging Face folder, a config.json, or a named shape."""

    path: str | None = None
    """Model folder, hub name, or config.json. none: model.preset decides."""
    preset: str | None = Field(
        default=None, description=f"Named Llama-like shape: {', '.join(PRESETS)}. none: tiny, unless model.path is set."
    )
    init: Literal["auto", "pretrained", "random"] = "auto"
    """Weights: pretrained (read from model.path) or random (the family's own initialisation). auto: pretrained for a
    folder or hub name, random for a preset or a config.json.
    """
    attention: str = "auto"
    """Attention implementation: eager, sdpa, or any that transformers knows. auto: its choice."""

    @field_validator("preset")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"it should be one of {', '.join(PRESETS)}{nearest(value, PRESETS)}")
        return value


class DataSection(Section):
    """The text, and how it becomes rows of tokens."""

    source: Strings = ("builtin:stdlib",)
    """builtin:stdlib (the sources of Python's standard library), builtin:stdlib-chat, or files, folders, globs, URLs
    and names of data sets; several may be given, which are one source. A model of your own needs it to be set.
    """
    format: Format = "auto"
    """What the files say: text, or rows with the keys of a format. auto: by their name and first row."""
    columns: Columns = Field(default={}, validate_default=True)
    """Which column is meant by a key of the format, such as {text: body}, where it has another name."""
    sources: Sources = ()
    """Several sources in place of data.source: [{path, type, split, weight, columns, name, revision}, ...], of which
    only path is needed. type: as data.format. weight: share of the rows of an epoch. none: data.source.
    """
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When an epoch of weighted sources ends: all_exhausted (each row came at least once, small sources repeat) or
    first_exhausted (no row came twice).
    """
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read is an error, or is left out and counted."""
    tokenizer: str | None = None
    """Tokenizer folder, file or hub name. none: the model folder's; none there: a BPE trained on the data, for a model
    with random weights.
    """
    sequence_length: Count | None = None
    """Tokens a row. none: 256 for the tiny preset, else 1024, at most what the model allows."""
    packing: bool = True
    """Several documents a row. false: one document a row, cut off or padded. Of conversations with pictures, of which
    each is a row, those are left out that are longer.
    """
    packing_isolated: Flag = "auto"
    """true: documents of a row do not see each other, and none is cut by a border of rows: each has positions from 0,
    by which transformers makes the mask, and the model is asked at the start whether it keeps them apart. false: one
    after the other, cut into full rows, and those in a row see each other. auto: true for conversations, and where the
    model mixes them a document a row; false for other text.
    """
    group_by_length: Flag = "auto"
    """Where a row is a document (data.packing false): batches of rows of about one length, padded to the longest of
    them. false: batches in a mixed order, padded to data.sequence_length. auto: true, unless blocks are compiled, which
    each length would be anew, or train.method is not sft.
    """
    train_on_prompt: bool = False
    """Count the loss on prompts too, not on answers alone; with train.method orpo in the loss of the chosen answer."""
    num_workers: Natural | None = None
    """Processes that tokenize, each with about 300 MB. 0: only this one, by the threads of `tokenizers`. none: 0, but
    for 32 MiB of conversations or more, whose template Python renders, as many as there are cores, 16 at most.
    """
    eval_share: Beta | None = None
    """Share of the documents held out for evaluation. none: 0.02, or 0 with data.eval_source. 0: nothing is."""
    eval_source: Sources = ()
    """Files to evaluate on, or several sources as in data.sources; each is evaluated, and logged by its name."""


class TrainSection(Section):
    """How long and how to train."""

    method: Literal["sft", "dpo", "orpo", "reward"] = "sft"
    """What is learned. sft: the text. Of pairs of answers (data.format preference): dpo, to prefer the chosen one more
    than the model did at the start; orpo, to prefer and to write it, without a reference; reward, a model with one
    output, which scores answers.
    """
    beta: Positive = 0.1
    """For dpo: what a nat of log-probability over the reference's is worth as a reward; for orpo the weight of the
    preference beside the chosen answer's loss (the paper's lambda).
    """
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """For dpo: the loss of a pair's margin."""
    center_rewards_coefficient: Rate = 0.0
    """For reward: weight of the squared sum of a pair's scores, which keeps their mean at zero."""
    steps: Count | None = None
    """Optimizer steps. none: as train.epochs or train.max_seconds say; if they are none too, 400."""
    epochs: Positive | None = None
    """Passes over the data, when train.steps is none. none: no limit by data."""
    max_seconds: Positive | None = None
    """Stop stepping after this many seconds. none: no limit (90 for the built-in run)."""
    batch_size: Count = 8
    """Sequences a step, over all ranks; pairs of them unless train.method is sft."""
    micro_batch_size: Count | None = None
    """Sequences, or pairs, of one forward and backward, per rank; gradients are summed. none: the whole batch at once.
    """
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: bfloat16 compute over fp32 master weights; fp32: all fp32. auto: bf16 on a GPU, or with optimizer.master
    bf16, else fp32.
    """
    recompute: Literal["auto", "always", "never"] = "auto"
    """Recompute a unit's forward in backward. auto: as the device budget allows."""
    compile: Literal["never", "auto"] = "never"
    """auto: run blocks as torch.compile makes them, one compilation for all equal ones; what cannot be compiled, or
    gives something else, runs as it is, which is said. The last bits differ from those of never.
    """
    sequence_tile: Tile = "auto"
    """Tokens of a sequence that those modules of a block compute at a time that are functions of single tokens, as MLPs
    and norms are, which is tried out. Each tile is recomputed in the backward. auto: whole sequences, and tiles where
    a block would not fit the device otherwise; none: whole sequences.
    """
    sequence_parallel: Count = 1
    """Neighbouring ranks of a machine that share the same sequences: each has a part of the tokens of every row, and in
    attention all tokens of a part of the heads (DeepSpeed-Ulysses), so that what a step holds for a sequence is shared
    out, too. A step's rows are cut over the groups of so many ranks. With it train.recompute auto is always.
    """
    max_grad_norm: Positive | None = 1.0
    """Clip gradients to this global norm. none: no clipping."""
    clip: Literal["auto", "speculative", "deferred"] = "auto"
    """When clipped updates are made: deferred (once the norm is known) or speculative (as gradients arrive, and
    corrected once it is). auto: deferred; but where updates outlast a forward, speculative from step 9 on if no step
    up to then was clipped.
    """
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On an infinite or NaN gradient: stop with an error, or skip the step and leave every state as it was."""
    delay: Delay = 0
    """1: updates come one step late: each is made beside all of the next step, which computes with the weights from
    before. Another training than without, and one more copy of the weights on the host.
    """
    delay_after: Natural = 0
    """With train.delay: how many steps come before it."""
    eval_every: Natural = 100
    """Evaluate after this many steps, and at the end. 0: at the end alone."""
    eval_batches: Count | Literal["all"] = 8
    """How much an evaluation is of: so many batches of each eval source, the same each time. all: every row."""
    early_stopping_patience: Count | None = None
    """End the run once this many evaluations, one after the other, had no lower loss than the best before them; of
    several eval sources that is the loss of the first. none: never.
    """
    early_stopping_min_delta: Rate = 0.0
    """With train.early_stopping_patience: by how much a loss has to be lower to count."""
    noise_scale: bool = False
    """Estimate the gradient noise scale, in tokens: about the batch beyond which larger ones save few steps (McCandlish
    et al., arXiv:1812.06162). From the norms of the gradients of micro-batches and ranks, of which there have to be
    several; over those parameters whose gradients come part by part.
    """
    log_every: Count = 10
    """Print a line after this many steps (a terminal shows every step)."""
    head_chunk_bytes: Chunks = "auto"
    """Largest size of the logits made at once, counted in fp32; above it the head runs in chunks of those tokens that
    have a target. auto: a thirtieth of the device's budget, since loss and gradients take twice as much again, and at
    least 256 MiB. none: all at once.
    """

    @property
    def group(self) -> int:
        """Rows that are learned from together: the two answers of a preference."""
        return 1 if self.method == "sft" else 2

    def num_groups(self, num_ranks: int) -> int:
        """Return over how many groups of ranks the rows of a step are cut: those of a group share them."""
        return num_ranks // self.sequence_parallel

    @property
    def num_rows(self) -> int:
        """Rows a step, over all ranks."""
        return self.batch_size * self.group

    @property
    def micro_rows(self) -> int | None:
        """Rows of one forward and backward, per rank; None for all."""
        return None if self.micro_batch_size is None else self.micro_batch_size * self.group


class OptimizerSection(Section):
    """The update rule and its learning rate."""

    name: RuleName = "adamw"
    """Update rule. lion has one moment, and takes 4 bytes less of each parameter; sgd has one or none; adafactor and
    adalomo keep a number for each row and column; lomo keeps nothing; muon has one moment and orthogonalises the
    updates of the blocks' matrices, beside adamw for the rest. With lomo and adalomo no gradient waits: clipping costs
    a second backward. mezo makes no backward: it measures the loss on both sides of the weights, and keeps nothing.
    """
    reset: bool = False
    """Resume from a checkpoint of another update rule, or width of its states: weights, step and position in the data
    are its, and the states begin anew.
    """
    lr: Rate | None = None
    """Peak learning rate. none: 2e-5 for pretrained weights, 2e-4 for an adapter over them, of either a twentieth with
    train.method dpo and orpo, 1e-3 for random ones (4e-3 for tiny); with lion a tenth of it, with adafactor and
    adalomo, for which it is a share of the weights, ten times, with lomo a hundred times, with mezo a twentieth.
    """
    states: Literal["fp32", "bf16", "int8"] = "fp32"
    """How adamw and lion store moments: 4, 2 or about 1 byte each. bf16 is rounded at random (from run.seed); int8 has
    a scale for 128, and keeps embeddings and parameters of fewer than 4096 elements in fp32. Clipping is deferred with
    both.
    """
    betas: Betas = (0.9, 0.95)
    """Decay of the first and of the second moment, each in [0, 1); of lion's moment in the step and after it, 0.9 and
    0.99 unless set. AdamW() in Python has torch's instead, 0.9 and 0.999.
    """
    eps: Rate = 1e-8
    """Term added to the root of the second moment, for adamw, and with muon for the rest. For mezo: how far on either
    side of the weights the loss is measured, 1e-3 unless set.
    """
    weight_decay: Rate = 0.01
    """Decoupled weight decay, scaled by the learning rate; with sgd added to the gradient. With lion and muon 0.1
    unless set, with adafactor, lomo, adalomo and mezo 0.
    """
    beta2_decay: Annotated[float, Field(le=0, allow_inf_nan=False)] | None = None
    """For adafactor and adalomo: step t counts t^beta2_decay in the second moments. none: -0.8."""
    d: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """For adafactor and adalomo: the root mean square above which an update is scaled down. none: 1."""
    clip_value: Positive | None = None
    """For lomo: clamp each element of a gradient to this. none: no clamping."""
    momentum: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """For sgd and muon: decay of the moment. none: 0 for sgd, which then keeps no state but the weights, and 0.95 for
    muon.
    """
    nesterov: bool | None = None
    """For muon: look ahead along the moment. none: true."""
    ns_steps: Annotated[int, Field(ge=0, lt=100)] | None = None
    """For muon: steps of the orthogonalisation. none: 5."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """For muon: how the learning rate goes by a matrix's shape. none: match_rms_adamw, so that one rate is good for
    muon and for adamw beside it. Muon() in Python has torch's instead, original.
    """
    num_perturbations: Annotated[int, Field(ge=1, lt=32768)] | None = None
    """For mezo: random directions of a step, of two forward passes each. All passes of a step are under way at once,
    each with activations and a copy of the trained weights that stay on the device. none: 1.
    """
    layer_fraction: Share | None = None
    """For mezo: the share of the model's blocks that a step perturbs and updates, others in each step. none: all of
    them.
    """
    magnitude_quantile: Share | None = None
    """For mezo: of each parameter the weights of least magnitude take part, up to this quantile; all of them decay.
    none: all take part.
    """
    master: Literal["fp32", "bf16"] = "fp32"
    """For mezo, where train.precision is bf16: what the weights are between steps. bf16 is half of the bytes, 2 a
    parameter, rounded at random after each step (from run.seed).
    """
    freeze: Words = ()
    """Parameters that do not train: regular expressions, several separated by spaces, each found in some parameter's
    name. They have no gradients and no states, and stream as frozen weights do. none: all train.
    """
    decay_1d: bool = False
    """Decay biases and norms too (parameters with fewer than two dimensions)."""
    groups: Groups = ()
    """Exceptions by parameter name, first match wins: {REGEX: {lr_scale: X, weight_decay: Y, rule: NAME}} as YAML.
    Another rule goes by the settings here that it has.
    """
    schedule: Literal["auto", "constant", "linear", "cosine", "wsd"] = "auto"
    """Learning rate after warmup. wsd: constant, then down over the last fifth. auto: cosine, or constant if only
    max_seconds is set.
    """
    warmup_steps: Natural | None = None
    """Steps over which the learning rate rises to its peak. none: a twentieth of the steps, at most 100."""


def _as_init(value: Any) -> Any:
    if not re.fullmatch(r"default|gaussian|orthogonal|olora|pissa(_niter_[1-9]\d{0,2})?|loftq(_[1-9]\d?)?", str(value)):
        known = "default, gaussian, orthogonal, olora, pissa, pissa_niter_16 (iterations), loftq, or loftq_5 (rounds)"
        raise ValueError(f"should be {known}")
    return value


LoraInit = Annotated[str, BeforeValidator(_as_init)]


class LoraSection(Section):
    """An adapter of PEFT, which trains over the model's own weights, frozen. Names and defaults are PEFT's."""

    rank: Natural = 0
    """Rank of a LoRA's matrices (r). 0: no adapter, unless lora.config or lora.adapter is set."""
    alpha: Count = 8
    """What the product of the matrices is scaled by, times 1/rank (lora_alpha)."""
    dropout: Beta = 0.0
    """Share of an adapted module's inputs that the adapter does not see (lora_dropout)."""
    target_modules: Strings | None = None
    """Modules to adapt, by the ends of their names, several separated by spaces; all-linear: all linear ones but the
    head. none: PEFT's choice for the family.
    """
    target_parameters: Strings | None = None
    """Parameters to adapt, by the ends of their names, such as experts.down_proj, experts that are one tensor."""
    modules_to_save: Strings | None = None
    """Modules that train as a whole and are kept with the adapter, such as lm_head."""
    trainable_tokens: Tokens | None = None
    """Numbers of tokens whose rows of the embedding train (trainable_token_indices)."""
    init: LoraInit = "default"
    """Initial values of the matrices (init_lora_weights): default, gaussian, orthogonal; olora, pissa or pissa_niter_16
    (of so many iterations) begin as a part of the weights, which the frozen ones lack from then on; loftq or loftq_5
    (of so many rounds) as what the codes of offload.frozen_weights lose of them.
    """
    use_rslora: bool = False
    """Scale by 1/sqrt(rank) instead of 1/rank."""
    use_dora: bool = False
    """Train the norm of each row of an adapted weight as well (DoRA)."""
    config: str | None = None
    """JSON file of any PeftConfig, such as an adapter_config.json, instead of the settings here."""
    adapter: str | None = None
    """Folder of an adapter to begin from, as PEFT saves it, instead of the settings here."""
    restart_every: Natural = 0
    """ReLoRA: each time after so many steps merge the LoRA into the base, in fp32, and begin it anew. The base has to
    rest as it is (offload.frozen_weights exact, and not in files); its merged weights are in the checkpoints, and the
    run leaves a whole model. 0: never.
    """
    restart_prune: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Share of each of the LoRA's moments that a restart sets to zero, those of least magnitude. 1: all of them; 0:
    none.
    """
    restart_warmup_steps: Natural | None = None
    """Steps over which the learning rate rises from 0 after a restart. none: a twentieth of lora.restart_every, at most
    100.
    """


class OffloadSection(Section):
    """Which tier holds what, and how much of it may be used."""

    parameters: Literal["auto", "device", "cpu", "nvme", "files"] = "auto"
    """Tier of the parameters at rest. files: frozen ones stay in the model's own files, are read whenever they come up,
    and are copied nowhere; the others are on the cpu.
    """
    optimizer: StateTier = "auto"
    """Tier of the optimizer states."""
    gradients: StateTier = "auto"
    """Tier where gradients wait for the update."""
    activations: StateTier = "auto"
    """Tier of the unit inputs that wait for backward."""
    graphs: StateTier = "auto"
    """Tier of the graphs that wait for backward where the device has no room, instead of a recompute. auto: cpu where a
    GPU's step is foretold to be faster by it, else none but the device.
    """
    experts: Literal["auto", "whole", "streamed"] = "auto"
    """How the experts of a mixture come up. whole: all of a layer's at once, with the rest of it. streamed: those alone
    that tokens are routed to, a few at a time, so that the device need not hold a layer. auto: whole, and streamed
    where the device does not hold a layer.
    """
    optimizer_memory: Size = None
    """Most memory of the device, per rank, that optimizer states take there where offload.optimizer is auto and not all
    of them have room, same forms as of device_memory. none: as much as its budget holds beside all weights.
    """
    graphs_memory: Size = None
    """Most memory that graphs take there, per machine, same forms as of host_memory; the other units recompute. none:
    as far as memory reaches.
    """
    device_memory: Size = None
    """Budget of the device, per rank: "6GiB" or "6G", "512MiB", a number of bytes. none: no limit (9MiB for the
    built-in run on a CPU).
    """
    host_memory: Size = None
    """Budget of the CPU memory, per machine, same forms. none: no limit."""
    nvme_dir: Strings | None = None
    """Folder, or several on different disks (separated by spaces), for the nvme tier."""
    nvme_memory: Size = None
    """Budget of the nvme tier, same forms. none: no limit."""
    prefetch: Prefetch = "auto"
    """Units fetched ahead of the one that computes; they get room for certain. 0: none; auto: as far as the memory
    reaches.
    """
    zero_stage: Stage = "auto"
    """What the ranks share out: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters. auto: no more than
    pays, by search; 3 where that is not known.
    """
    replicas: Replicas = "auto"
    """Copies of the model that the ranks hold, each shared out over equally many of them, on one machine where that is
    possible; gradients are summed between copies. auto: one on each machine where there are several, or one over all
    machines where that is faster or alone fits, by search; else one.
    """
    replica_states: Literal["whole", "shared"] = "whole"
    """What each copy (offload.replicas) holds of the optimizer's states: whole: all of them; shared: the copies share
    them out, so that each state is on one rank of all, which updates its weights and sends them to the other copies.
    Weights stay whole in each copy. For zero_stage 3.
    """
    throttle: Throttle = None
    """Slow lanes down on purpose, to play a link: {LANE: bytes per second} or {LANE: {bandwidth, latency_seconds}} as
    YAML. Lanes: h2d, d2h, collective, network, nvme_read, nvme_write, update. none: as fast as they are.
    """
    frozen_weights: Literal["exact", "int8", "nf4"] = "exact"
    """How the matrices of frozen blocks rest and travel: as they are; in int8, a byte each with a scale for 128; or in
    nf4, half a byte each as in QLoRA. They are decoded on the device. Embeddings, what is outside of the blocks, and
    parameters of fewer than 4096 elements stay as they are.
    """
    link_weights: Literal["exact", "int8"] = "exact"
    """How trained weights travel to the device and between ranks: as they are; or in int8, a byte each with a scale for
    128, made of the exact master weights by each update, which is approximate: the run computes with what these stand
    for. Checkpoints and exports hold the master weights. Vectors, and parameters of fewer than 4096 elements, travel
    as they are.
    """
    link_gradients: Literal["exact", "int8", "int4"] = "exact"
    """How gradients travel between replicas (offload.replicas): as they are; or in int8 or int4, a byte or half of one
    each with a scale for 128, which is approximate: what the codes leave out of a step is added to the next one, for
    which each rank keeps 2 bytes for a weight of its part. All replicas make the same update.
    """
    device: str | None = None
    """What computes, as torch names it: cpu, cuda, cuda:1. none: this rank's accelerator, or the CPU where there is
    none.
    """
    update: Literal["auto", "cpu", "device", "both"] = "auto"
    """Where states that rest on the host are updated: cpu; device, to which they stream beside compute and back; both:
    the device has the optimizer states of as many regions as it has room for (offload.optimizer_memory) and updates
    these, while the host updates the others; auto: whichever is measured to be fastest. States that rest on the device
    as a whole are updated there.
    """


class CheckpointSection(Section):
    """What is saved, and what a run begins from."""

    every: Count | Literal["auto"] | None = "auto"
    """Save all states after this many steps, and at the end. auto: every hour, where the disk has room for it beside
    the export; the next one takes its place. none: only when told to stop.
    """
    keep: Count | None = None
    """How many checkpoints stay. none: all, but of hourly ones the newest alone."""
    resume: str = "auto"
    """auto: from the newest checkpoint of the run folder that is whole, if there is one; never; or the path of a
    checkpoint or of a run.
    """
    on_error: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint cannot be written, on a full disk for example. The earlier ones stay as they are."""
    keep_best: bool = False
    """Save a checkpoint after each evaluation whose loss is the lowest so far, too, and keep the last of these beside
    the newest ones.
    """
    export: bool = True
    """At the end, write the model as a Hugging Face folder to RUN/hf, reload and check it."""
    export_best: bool = False
    """Write the weights of the evaluation with the lowest loss, instead of the last ones; with checkpoint.keep_best."""
