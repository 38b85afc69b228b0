"""Build the engine and its settings from a configuration, and describe a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

from pydantic import BaseModel
from torch import nn

from offload.amounts import Amount, Tally, Tell
from offload.app.config.config import Config
from offload.app.training.lr import learning_rate, restart_factor
from offload.app.training.task import Task, unit_of
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.errors import counted, plural, ratio
from offload.files.sources import Source
from offload.optim.rule import UpdateRule
from offload.optim.rules import RULES
from offload.planning.settings import Settings, settle_compile
from offload.tiers.placement import Placement


def build_engine(config: Config, built: Any, comm: Comm) -> Engine:
    """Return an engine over a built model. Collective. Raises ConfigError and DoesNotFitError."""
    return Engine(built.model, settings=make_settings(config), fill=built.fill, quantized=built.quantized, comm=comm)


class MeasuredFill:
    """A `fill` of a built model that knows how many bytes of the weights the engine has taken."""

    def __init__(self, built: Any, num_ranks: int) -> None:
        """num_ranks: the ranks take turns at calling `fill`, so a rank sees only its own share of the calls."""
        self._fill = built.fill
        self._num_ranks = num_ranks
        self._left = {name: parameter.nbytes for name, parameter in built.model.named_parameters()}  # not yet taken
        self._total = sum(self._left.values())
        self._num_done = 0
        self._num_current = 0  # of the module being taken
        self._name = ""

    def __call__(self, name: str, module: nn.Module) -> Mapping[nn.Parameter, Source] | None:
        self._num_done += self._num_current  # the engine calls again once the parameters are taken
        prefix = ""  # of all
        if name:
            prefix = f"{name}."
        self._num_current = sum(self._left.pop(each) for each in list(self._left) if each.startswith(prefix))
        self._name = name
        return cast("Mapping[nn.Parameter, Source] | None", self._fill(name, module))

    def amount(self) -> Amount:
        return Amount(min(self._num_done * self._num_ranks, self._total), self._total, place=self._name)


_LEAST_EPOCHS, _MOST_EPOCHS = 0.5, 20.0
"""Passes over the data outside these limits get a note."""


def stages(tell: Tell, alive: Callable[[], object]) -> Callable[[str, float], None]:
    """Return a progress callback: tells each stage once, in percent, and calls `alive` on every update."""
    tallies: dict[str, Tally] = {}

    def progress(stage: str, fraction: float) -> None:
        alive()
        if stage not in tallies:
            tallies[stage] = Tally(100, "%")
            tell(f"data: {stage}", tallies[stage])
        tallies[stage].done = round(100 * fraction)

    return progress


def describe_length(config: Config, data: Task) -> Iterator[str]:
    """Yield the steps of a run and the passes over the data, with a note if these are unusually many or few."""
    steps = config.train.steps
    if steps is None:
        return
    epochs = steps * data.batch_size / data.num_train_rows
    rows = counted(data.batch_size // data.group, unit_of(data.group))
    passes = f"{ratio(epochs)} {plural('epoch', epochs)}"
    yield f"steps: {steps:,} of {rows}: {passes}"
    if config.has_own_data and not _LEAST_EPOCHS <= epochs <= _MOST_EPOCHS:
        reason = "each row comes as many times"
        if epochs < 1:
            reason = "most rows are left out"
        yield f"note: the run makes {passes}: {reason}. --train.epochs sets the number of passes."


def describe_differences(config: Config, engine: Engine) -> Iterator[str]:
    """Yield lines about settings that change the bits of a run."""
    train = config.train
    if train.delay:
        first = train.delay_after + 1
        yield f"updates are one step late, from step {first} on (train.delay 1): results differ from train.delay 0."
    if engine.compiles:
        yield (
            "blocks are compiled in the first steps, which takes a minute or more. The last bits differ from those of "
            "uncompiled blocks (--train.compile never)."
        )
    if isinstance(train.sequence_tile, int):
        yield (
            "modules that compute each token separately (found in the first step) run over tiles of "
            f"{train.sequence_tile} tokens: gradients differ by the order of their sums."
        )


def rate_at(step: int, config: Config, num_skipped: int = 0) -> float:
    """Return the learning rate for a step, counted from 0. `num_skipped`: earlier steps that moved no schedule."""
    optimizer, lora = config.optimizer, config.lora
    factor = restart_factor(step, every=lora.restart_every, warmup_steps=lora.restart_warmup_steps)
    return factor * learning_rate(
        step - num_skipped,
        base=float(optimizer.lr or 0.0),
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps or 0,
        num_steps=config.train.steps,
    )


def make_placement(config: Config) -> Placement:
    """Return the state placement. Raises ConfigError if impossible."""
    return Placement(**_matching_fields(Placement, config.offload))


def make_update_rule(config: Config) -> UpdateRule:
    """Return the update rule. Raises ConfigError."""
    section = config.optimizer
    return make_rule(section.name, dict(section) | {"lr": float(section.lr or 0.0)})


def make_settings(config: Config) -> Settings:
    """Return the engine settings for a resolved configuration. Raises ConfigError."""
    named = _matching_fields(Settings, config.train, config.offload, config.run)
    named["compile"] = settle_compile(
        config.train.compile,
        experts=config.offload.experts,
        has_many_lengths=config.has_many_lengths,
    )
    of_rows = {"micro_batch_size": config.micro_rows}  # in rows: a setting counts pairs, if rows are pairs
    return Settings(**named | of_rows | {"optimizer": make_update_rule(config), "placement": make_placement(config)})


def _matching_fields(dataclass_type: Any, *sections: BaseModel) -> dict[str, Any]:
    """Return the values from config sections for dataclass fields with the same name."""
    # A setting with an engine's name reaches the engine without a further line.
    values = {name: value for section in sections for name, value in section}
    return {field.name: values[field.name] for field in fields(dataclass_type) if field.name in values}


def make_rule(name: str, settings: Mapping[str, Any]) -> UpdateRule:
    """Create the rule `name` from the settings known to the rule, including the rules named in groups. Raises
    ConfigError.
    """
    groups = []
    for pattern, values in settings["groups"]:
        other = str(values.get("rule"))
        if other in RULES:  # the rule of a group reads the settings of the section, and has no groups
            values = {**values, "rule": RULES[other].configured({**settings, "groups": ()})}
        groups.append((pattern, values))
    return RULES[name].configured({**settings, "groups": tuple(groups)})
