"""Which tier holds which kind of state, and within which budgets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from offload.config.arguments import check_types
from offload.config.sections import parse_size
from offload.errors import ConfigError, nearest, shorten

TIERS = ("device", "cpu", "nvme")
_EXPERTS = ("auto", "whole", "streamed")
_KINDS = ("parameters", "optimizer", "gradients", "activations", "graphs")


@dataclass(frozen=True)
class Placement:
    """The tier of each kind of state, and the budgets of tiers.

    `auto` keeps parameters and optimizer states on the device where all of them fit its budget, else on the cpu, and,
    where `nvme_dir` is given, on disk what the cpu does not hold. Budgets are bytes, or text ("6GiB"); None is no
    limit.
    """

    parameters: str = "cpu"
    """Where the weights rest: device, cpu, nvme, auto, or files: frozen ones stay in the model's own files, from which
    they are read whenever they come up, and are copied nowhere; the others are on the cpu.
    """
    optimizer: str = "cpu"
    """Where the low halves and the moments rest: device, cpu, nvme or auto."""
    gradients: str = "auto"
    """Where gradients wait for the norm. `auto`: where the optimizer's states are; on disk only where there is no
    memory for them.
    """
    activations: str = "device"
    """Where the inputs of units wait for their backward: device, cpu or nvme."""
    graphs: str = "device"
    """Where the graphs of units wait for their backward, instead of a recompute: on the device as far as `recompute`
    says, and with cpu or nvme as far as memory reaches there.
    """
    experts: str = "auto"
    """How the experts of a mixture come up: whole, all of a layer at once with the rest of it; streamed, those alone
    that tokens are routed to, a few at a time; or auto: whole, and streamed where the device does not hold a layer.
    """
    optimizer_memory: float | str | None = None
    """The most memory of the device that states take there, where `optimizer` is auto; the others rest below. None: all
    of them, or none that its budget does not hold beside all weights.
    """
    graphs_memory: float | str | None = None
    """The most memory that graphs take there, of this machine's; the other units recompute."""
    device_memory: float | str | None = None
    """The budget of the device. torch's allocator has no more for the whole process, but for what others hold on the
    device before the engine and 256 MiB, until the engine is closed.
    """
    host_memory: float | str | None = None
    """The budget of the host."""
    nvme_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """The folder of the nvme tier, or several on different disks."""
    nvme_memory: float | str | None = None
    """The budget of the disk."""

    @classmethod
    def of(cls, given: Placement | Mapping[str, Any]) -> Placement:
        """Return a placement as it is, or one of its fields by name. Raises ConfigError."""
        if isinstance(given, Placement):
            return given
        names = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping):
            raise ConfigError(f"the placement is {shorten(repr(given))}; give a Placement, or its fields by name.")
        if unknown := [name for name in given if name not in names]:
            raise ConfigError(
                f"placement has {unknown[0]!r}{nearest(str(unknown[0]), names)}, which it does not know: see "
                "help(offload.Placement)."
            )
        return cls(**given)

    def __post_init__(self) -> None:
        check_types(Placement, vars(self))
        for key in ("device_memory", "host_memory", "nvme_memory", "optimizer_memory", "graphs_memory"):
            object.__setattr__(self, key, parse_size(getattr(self, key), f"offload.{key}"))
        for key in _KINDS:
            value, allowed = getattr(self, key), ("auto", *TIERS, *(("files",) if key == "parameters" else ()))
            if value not in allowed:
                raise ConfigError(
                    f"offload.{key} is {value!r}{nearest(str(value), allowed)}; allowed: {', '.join(allowed)}."
                )
        if self.experts not in _EXPERTS:
            raise ConfigError(
                f"offload.experts is {self.experts!r}{nearest(str(self.experts), _EXPERTS)}; allowed: "
                f"{', '.join(_EXPERTS)}."
            )
        if self.nvme_dir is not None:
            dirs = [self.nvme_dir] if isinstance(self.nvme_dir, str | os.PathLike) else self.nvme_dir
            object.__setattr__(self, "nvme_dir", tuple(str(folder) for folder in dirs) or None)
        for key in _KINDS:
            if getattr(self, key) == "nvme" and self.nvme_dir is None:
                raise ConfigError(
                    f"offload.{key} is nvme, and there is no folder for it: set --offload.nvme_dir to one on a local "
                    "disk, or to several on different disks."
                )
        if self.graphs_memory is not None and self.graphs == "device":
            raise ConfigError(
                f"offload.graphs_memory is {self.graphs_memory} and offload.graphs is device: it limits what "
                "graphs take below the device. Set --offload.graphs cpu, or leave it out."
            )
        if self.optimizer_memory is not None and self.optimizer != "auto":
            raise ConfigError(
                f"offload.optimizer_memory is {self.optimizer_memory} and offload.optimizer is {self.optimizer}: it "
                "says how many of the states rest on the device. Set --offload.optimizer auto, or leave it out."
            )
        if self.optimizer == "device" and self.parameters in ("cpu", "nvme", "files"):
            raise ConfigError(
                f"offload.optimizer is device and offload.parameters is {self.parameters}: states above their "
                "parameters save nothing. Set --offload.parameters device, or --offload.optimizer cpu."
            )
        if (self.gradients == "device") != (self.optimizer == "device") and "auto" not in (
            self.gradients,
            self.optimizer,
        ):
            raise ConfigError(
                f"offload.gradients is {self.gradients} and offload.optimizer is {self.optimizer}: gradients wait "
                "beside the optimizer states. Set --offload.gradients auto."
            )

    def share(self, num_ranks: int) -> Placement:
        """Return what one of so many ranks of a machine has: an equal part of the budgets that are the machine's."""
        budgets = (self.host_memory, self.nvme_memory, self.graphs_memory)
        host, disk, graphs = (None if size is None else int(size) // num_ranks for size in budgets)
        return replace(self, host_memory=host, nvme_memory=disk, graphs_memory=graphs)

    @property
    def dirs(self) -> Sequence[str]:
        """The folders of the nvme tier."""
        assert self.nvme_dir is None or isinstance(self.nvme_dir, tuple), "__post_init__ has seen to it"
        return self.nvme_dir or ()
