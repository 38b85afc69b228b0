"""Refused combinations of settings: one row each, and the message composed from the row.

The core, the application and the extras (`offload.extras.ENTRIES`) have tables of rows:

    CONFLICTS = (
        Conflict("train.delay_after", is_set, "train.delay", 0,
            "train.delay is 0, so no update is delayed", "set --train.delay 1, or --train.delay_after 0"),
    )

The message begins "train.delay_after is 3, but train.delay is 0, so no update is delayed: set --train.delay 1".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from offload.doors import Door
from offload.errors import ConfigError, shorten

Condition = Any
"""A value, a tuple of values, or a function (value, value of the other setting) -> bool."""


class Conflict(NamedTuple):
    """Two settings with values against each other. Texts may quote any setting, as in {train.batch_size}."""

    key: str
    """Full key of the refused setting."""
    value: Condition
    """Values of this setting in the conflict."""
    other: str
    """Full key of the other setting."""
    other_value: Condition
    """Values of the other setting in the conflict."""
    why: str
    """Continues "KEY is VALUE, but"."""
    fix: str
    """Advice, with the settings to change. A value to give up is named by its default, as in "set --train.passes 1": a
    setting left out at a resume comes from the earlier run, unless it is fixed for a run.
    """
    given: Mapping[str, Condition] = {}
    """Further settings with values required for the conflict."""

    def applies(self, get: Callable[[str], Any]) -> bool:
        """Tell whether all conditions hold. `get` returns the value for a full key."""
        value, other = get(self.key), get(self.other)
        return (
            _holds(self.value, value, other)
            and _holds(self.other_value, other, value)
            and all(_holds(condition, get(key), value) for key, condition in self.given.items())
        )

    def message(self, get: Callable[[str], Any]) -> str:
        """Return the error text for the current values."""
        text = f"{self.key} is {{{self.key}}}, but {self.why}: {self.fix}."
        return re.sub(r"\{([a-z]\w*\.\w+)\}", lambda match: show(get(match[1])), text)


def is_set(value: Any, _: Any) -> bool:
    """Condition: a value other than none, false, 0 or empty."""
    return bool(value)


def is_unset(value: Any, _: Any) -> bool:
    """Condition: none, false, 0 or empty."""
    return not value


def is_above(value: Any, other: Any) -> bool:
    """Condition: a number larger than the number of the other setting."""
    return value is not None and other is not None and value > other


def is_parallel(value: Any, _: Any) -> bool:
    """Condition: several ranks or passes."""
    return bool(value > 1)


def other_than(*allowed: Any) -> Callable[[Any, Any], bool]:
    """Return the condition for all values except these."""
    return lambda value, _: value not in allowed


_OFFLOADED = ("cpu", "nvme")
PLACEMENT = (
    *(
        Conflict(f"offload.{kind}", "nvme", "offload.nvme_dir", None,
            "offload.nvme_dir is not set",
            "set --offload.nvme_dir to a folder on a local disk, or to several on different disks")
        for kind in ("parameters", "optimizer", "gradients", "activations", "graphs")
    ),
    Conflict("offload.graphs_memory", other_than(None), "offload.graphs", "device",
        "offload.graphs is device, and graphs_memory limits only graphs that are moved off the device",
        "set --offload.graphs cpu, or --offload.graphs_memory none"),
    Conflict("offload.optimizer_memory", other_than(None), "offload.optimizer", other_than("auto"),
        "offload.optimizer is {offload.optimizer}, and optimizer_memory limits the states kept on the device in mode "
        "auto", "set --offload.optimizer auto, or --offload.optimizer_memory none"),
    Conflict("offload.optimizer", "device", "offload.parameters", (*_OFFLOADED, "files"),
        "offload.parameters is {offload.parameters}, and keeping optimizer states on the device while parameters are "
        "offloaded saves nothing", "set --offload.parameters device, or --offload.optimizer cpu"),
    *(
        Conflict("offload.gradients", gradients, "offload.optimizer", optimizer,
            "offload.optimizer is {offload.optimizer}, and gradients must be in the tier of the optimizer states",
            "set --offload.gradients auto")
        for gradients, optimizer in (("device", _OFFLOADED), (_OFFLOADED, "device"))
    ),
)  # fmt: skip
"""Rows about tiers and budgets."""
FORMATS = (
    Conflict("optimizer.master", "bf16", "train.precision", "fp32",
        "train.precision fp32 computes with all 32 bits of the weights",
        "set --train.precision bf16, or --optimizer.master fp32"),
    Conflict("optimizer.master", "bf16", "train.precision", "fp16",
        "train.precision fp16 computes with copies of fp32 masters",
        "set --train.precision bf16, or --optimizer.master fp32"),
    Conflict("train.precision", "fp16", "optimizer.has_gradients", False,
        "{optimizer.name} has no gradients for a loss scale, and perturbs weights in bf16 or fp32",
        "set --train.precision bf16 or fp32"),
    Conflict("train.precision", "fp16", "offload.link_gradients", other_than("exact"),
        "gradients in fp16 are sent as they are", "set --offload.link_gradients exact, or --train.precision bf16"),
    Conflict("train.clip", "speculative", "optimizer.uncorrectable", is_set,
        "it updates before the norm is known and corrects the updates afterwards, and {optimizer.uncorrectable} "
        "cannot be corrected", "set --train.clip deferred or auto"),
)  # fmt: skip
"""Rows about number formats and update rules, checked in a configuration and in the engine."""
ENGINE = (
    Conflict("offload.graphs_memory", other_than(None), "train.recompute", "never",
        "with train.recompute never all saved autograd graphs are stored off the device, without a limit",
        "set --train.recompute always or auto, or --offload.graphs_memory none", {"offload.graphs": _OFFLOADED}),
    Conflict("train.sequence_parallel", is_parallel, "offload.graphs", _OFFLOADED,
        "with offload.graphs {offload.graphs} ranks recompute different graphs, and wait for each other in attention "
        "forever", "set --train.recompute never, or --offload.graphs device, or --train.sequence_parallel 1",
        {"train.recompute": other_than("never")}),
    Conflict("offload.replica_states", "shared", "offload.zero_stage", (0, 1, 2),
        "with offload.zero_stage {offload.zero_stage} each rank holds all weights",
        "set --offload.zero_stage 3, or --offload.replicas 1 (all ranks then share the states), and "
        "--offload.replica_states whole"),
    Conflict("train.delay_after", is_set, "train.delay", 0,
        "train.delay is 0, so no update is delayed", "set --train.delay 1, or --train.delay_after 0"),
    Conflict("train.passes", is_parallel, "optimizer.has_gradients", False,
        "{optimizer.name} has no gradients to add up", "set --train.passes 1"),
    Conflict("train.passes", is_parallel, "train.sequence_parallel", is_parallel,
        "train.sequence_parallel is {train.sequence_parallel}, and shared rows are computed in one pass",
        "set --train.passes 1, or --train.sequence_parallel 1"),
    *(
        Conflict("train.delay", 1, key, value,
            f"{key} is {value}, and delayed updates run on the host, after the norm is known",
            "set --train.delay 0, or --train.clip deferred and --offload.optimizer cpu")
        for key, value in (("train.clip", "speculative"), ("offload.optimizer", "device"))
    ),
    Conflict("train.delay", 1, "optimizer.drops_gradients", True,
        "{optimizer.name} updates during the backward and keeps no gradients for a later step",
        "set --train.delay 0, or another --optimizer.name"),
    Conflict("offload.update", ("device", "both"), "train.host_bound", is_set,
        "{train.host_bound}", "set --offload.update cpu or auto"),
    Conflict("offload.update", "both", "offload.optimizer", _OFFLOADED,
        "with offload.optimizer {offload.optimizer} no states are stored on the device for updates there",
        "set --offload.optimizer auto, or --offload.update cpu or auto"),
)  # fmt: skip
"""Rows about the settings of an engine."""
CONFLICTS: Door[Iterable[Conflict]] = Door("conflicts", {"formats": FORMATS})
"""Tables for the configuration of a run."""
ENGINE_CONFLICTS: Door[Iterable[Conflict]] = Door("engine conflicts", {"formats": FORMATS, "engine": ENGINE})
"""Tables for `Settings`."""


def refuse(conflicts: Iterable[Conflict], get: Callable[[str], Any]) -> None:
    """Raise ConfigError for the first applying row."""
    for conflict in conflicts:
        if conflict.applies(get):
            raise ConfigError(conflict.message(get))


def show(value: Any) -> str:
    """Format any value in the form a user would write."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return shorten(" ".join(map(str, value))) or "none"
    # YAML and the command line write true and false in lower case.
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(str(value))


def _holds(condition: Condition, value: Any, other: Any) -> bool:
    if callable(condition):
        return bool(condition(value, other))
    if isinstance(condition, tuple):
        return value in condition
    return bool(value == condition)
