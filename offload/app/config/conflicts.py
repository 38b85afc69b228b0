"""Refused settings of a run."""

from offload.app.config.rules import RULE_SETTINGS
from offload.app.config.sections import ROW_FORMATS, DataSection, OptimizerSection
from offload.conflicts import Condition, Conflict, is_above, is_parallel, is_set, is_unset, other_than, show

GROUPED = tuple(ROW_FORMATS)
DATA = (
    Conflict("data.source", other_than(DataSection.model_fields["source"].default), "data.sources", is_set,
        "data.sources is set too", "put it into data.sources, as {path: ...}, or leave one of them out"),
)  # fmt: skip
"""Rows for every configuration, also before a run is resumed."""
SOURCES = (
    Conflict("train.method", GROUPED, "origin.data.source", "default",
        "data.source is not set", "name files of rows for this method",
        {"data.sources": is_unset}),
    Conflict("model.path", other_than(None), "origin.data.source", "default",
        "data.source is not set, so the model would be trained on the sources of Python's standard library",
        "set --data.source to your files, a folder or a glob, or to builtin:stdlib (text) or builtin:stdlib-chat if "
        "that is meant", {"data.sources": is_unset}),
)  # fmt: skip
"""Rows for a run with training data."""


def _rules_with(key: str) -> list[str]:
    return [name for name, settings in RULE_SETTINGS.items() if key in settings.keys]


def _without(key: str) -> Condition:
    return lambda rules, _: not set(_rules_with(key)) & set(rules)


# Nobody would read a setting of another rule, and a user would expect an effect.
_OF_SOME_RULES = {
    key: OptimizerSection.model_fields[key].default for settings in RULE_SETTINGS.values() for key in settings.keys
}
_BEST = (
    ("train.early_stopping_patience", other_than(None)),
    ("checkpoint.keep_best", True),
    ("checkpoint.export_best", True),
)
ROWS = (
    Conflict("train.micro_batch_size", is_above, "train.batch_size", is_set,
        "train.batch_size is {train.batch_size}",
        "set --train.micro_batch_size to {train.batch_size} or less, or raise --train.batch_size"),
    Conflict("train.passes", is_above, "train.batch_size", is_set,
        "train.batch_size is {train.batch_size}",
        "set --train.passes to {train.batch_size} or less, or raise --train.batch_size"),
)  # fmt: skip
"""Rows about the rows of a step, once they are known."""
RUN = (
    Conflict("train.sequence_parallel", is_parallel, "train.method", GROUPED,
        "the loss of train.method {train.method} compares whole sequences, which cannot be split over ranks",
        "set --train.sequence_parallel 1, or --train.method sft"),
    Conflict("data.packing", True, "train.method", GROUPED,
        "train.method {train.method} compares documents, each in a separate row",
        "leave it out, or set it to false", {"origin.data.packing": other_than("default", "resolved")}),
    Conflict("data.packing_isolated", True, "train.method", GROUPED,
        "train.method {train.method} does not pack rows", "leave it out"),
    Conflict("data.group_by_length", True, "train.method", GROUPED,
        "train.method {train.method} needs the rows in a mixed order", "leave it out"),
    Conflict("optimizer.warmup_steps", is_above, "train.steps", is_set,
        "train.steps is {train.steps}, so the learning rate would never reach its peak",
        "lower --optimizer.warmup_steps or raise --train.steps"),
    Conflict("optimizer.schedule", other_than("auto", "constant"), "train.max_seconds", is_set,
        "this schedule needs the number of the last step, and only train.max_seconds limits the run",
        "set --train.steps or --train.epochs as well, or --optimizer.schedule constant",
        {"train.steps": None, "train.epochs": None}),
    Conflict("data.group_by_length", True, "data.packing", True,
        "packed rows all have the same length", "set --data.packing false for one document in each row, or leave it "
        "out", {"train.method": other_than(*GROUPED)}),
    *(
        Conflict(f"optimizer.{key}", other_than(default),
            "optimizer.rules", _without(key),
            "{optimizer.name} has no such setting",
            f"set --optimizer.{key} {show(default)}, or --optimizer.name {' or '.join(_rules_with(key))}")
        for key, default in _OF_SOME_RULES.items()
    ),
    Conflict("optimizer.reset_every", is_set, "optimizer.name", "sgd",
        "sgd without momentum has no moments", "set --optimizer.momentum, such as 0.9, or --optimizer.reset_every 0",
        {"optimizer.momentum": is_unset}),
    *(
        Conflict("optimizer.freeze", is_set, key, value,
            f"checkpoints of a partly frozen model contain all weights, and with {key} {{{key}}} the frozen ones "
            "cannot be saved", f"set --{key} {fix}, or train an adapter (--lora.rank)")
        for key, value, fix in (
            ("offload.parameters", "files", "cpu"),
            ("offload.frozen_weights", other_than("exact"), "exact"),
        )
    ),
    *(
        Conflict(key, value, "train.eval_every", 0,
            "train.eval_every is 0, so the only evaluation is at the end", "set --train.eval_every, such as 100")
        for key, value in _BEST
    ),
    *(
        Conflict(key, value, "data.eval_share", 0,
            "data.eval_share is 0, so there is nothing to evaluate",
            "set --data.eval_share, such as 0.02, or --data.eval_source", {"data.eval_source": is_unset})
        for key, value in _BEST
    ),
    Conflict("train.early_stopping_min_delta", is_set, "train.early_stopping_patience", None,
        "early stopping is off",
        "set --train.early_stopping_patience, such as 3, or --train.early_stopping_min_delta 0"),
    *(
        Conflict("checkpoint.export_best", True, f"checkpoint.{other}", False,
            f"checkpoint.{other} is false", f"set --checkpoint.{other} true, or --checkpoint.export_best false")
        for other in ("export", "keep_best")
    ),
    Conflict("model.path", is_set, "model.preset", is_set,
        "model.preset is {model.preset}", "leave one of them out"),
    Conflict("model.init", "pretrained", "model.path", None,
        "there are no weights to read without --model.path", "set it, or --model.init random"),
)  # fmt: skip
"""Rows for every run."""
