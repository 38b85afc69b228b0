"""Placement: tiers for all kinds of state, and tier budgets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from offload.arguments import check_types
from offload.conflicts import PLACEMENT, refuse
from offload.errors import ConfigError, nearest, shorten
from offload.layout.residence import DEVICE, DISK, FILES, HOST
from offload.setting_texts import PLACEMENT_TEXTS, with_texts
from offload.sizes import parse_size

TIERS = {DEVICE: "device_memory", HOST: "host_memory", DISK: "nvme_memory"}
"""Fields of `Placement` with the budget, by tier."""
OFFLOADED = (HOST, DISK)
_ALLOWED = {
    "parameters": ("auto", *TIERS, FILES),
    **dict.fromkeys(("optimizer", "gradients", "activations", "graphs"), ("auto", *TIERS)),
    "experts": ("auto", "whole", "streamed"),
}
"""Allowed values by field of `Placement`."""


@dataclass(frozen=True)
class Placement:
    """Tiers of states, and tier budgets.

    `auto` puts parameters and optimizer states on the device if all of them fit the budget, otherwise on the CPU; with
    `nvme_dir`, states beyond the CPU budget go to disk. Tiers are device, cpu, nvme or auto. Budgets are bytes or text
    ("6GiB"). None: no limit.

    {texts}
    """

    parameters: str = "cpu"
    optimizer: str = "cpu"
    gradients: str = "auto"
    activations: str = "device"
    graphs: str = "device"
    experts: str = "auto"
    optimizer_memory: float | str | None = None
    graphs_memory: float | str | None = None
    device_memory: float | str | None = None
    host_memory: float | str | None = None
    nvme_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    nvme_memory: float | str | None = None

    @classmethod
    def of(cls, placement: Placement | Mapping[str, Any]) -> Placement:
        """Return `placement` if it is a Placement, otherwise build one from field names. Raises ConfigError."""
        if isinstance(placement, Placement):
            return placement
        names = [each.name for each in fields(cls)]
        if not isinstance(placement, Mapping):
            raise ConfigError(
                f"the placement is {shorten(repr(placement))}; it must be a Placement, or a mapping of its fields."
            )
        if unknown := [name for name in placement if name not in names]:
            raise ConfigError(
                f"placement has the unknown field {unknown[0]!r}{nearest(str(unknown[0]), names)}: see "
                "help(offload.Placement)."
            )
        return cls(**placement)

    def __post_init__(self) -> None:
        check_types(Placement, vars(self))
        # The dataclass is frozen, and sizes given as text become numbers.
        for key in (*TIERS.values(), "optimizer_memory", "graphs_memory"):
            object.__setattr__(self, key, parse_size(getattr(self, key), f"offload.{key}"))
        for key, allowed in _ALLOWED.items():
            value = getattr(self, key)
            if value not in allowed:
                raise ConfigError(
                    f"offload.{key} is {value!r}{nearest(str(value), allowed)}; allowed: {', '.join(allowed)}."
                )
        if self.nvme_dir is not None:
            dirs = self.nvme_dir
            if isinstance(dirs, str | os.PathLike):
                dirs = [dirs]
            object.__setattr__(self, "nvme_dir", tuple(str(folder) for folder in dirs) or None)
        refuse(PLACEMENT, lambda key: getattr(self, key.partition(".")[2]))

    def share(self, num_ranks: int) -> Placement:
        """Return the placement for one rank on a machine with `num_ranks`: host, disk and graph budgets are divided
        equally.
        """
        # The device is one rank's alone; the others are shared by the machine.
        budgets = (self.host_memory, self.nvme_memory, self.graphs_memory)
        host, disk, graphs = (None if size is None else int(size) // num_ranks for size in budgets)
        return replace(self, host_memory=host, nvme_memory=disk, graphs_memory=graphs)

    def budget(self, tier: str) -> int | None:
        """Return the budget of a tier in bytes; None: no limit."""
        size = getattr(self, TIERS[tier])
        if size is None:
            return None
        return int(size)

    @property
    def dirs(self) -> Sequence[str]:
        """Directories for the NVMe tier."""
        assert self.nvme_dir is None or isinstance(self.nvme_dir, tuple), "__post_init__ has seen to it"
        return self.nvme_dir or ()


Placement.__doc__ = with_texts(Placement.__doc__, PLACEMENT_TEXTS)
