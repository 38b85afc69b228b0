"""Which tier holds which kind of state, and within which budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import ConfigError, nearest

TIERS = ("device", "cpu")


@dataclass(frozen=True)
class Placement:
    """The tier of each kind of state; budgets in bytes or as text ("6GiB"), None for no limit.

    `auto` keeps parameters and optimizer states on the device where all of them fit its budget, else on the cpu.
    Gradients wait where the optimizer states are.
    """

    parameters: str = "cpu"
    optimizer: str = "cpu"
    gradients: str = "auto"
    activations: str = "device"
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    nvme_dir: str | Sequence[str] | None = None
    nvme_memory: int | str | None = None

    def __post_init__(self) -> None:
        from offload.sections import parse_size

        for key in ("device_memory", "host_memory", "nvme_memory"):
            object.__setattr__(self, key, parse_size(getattr(self, key), f"offload.{key}"))
        for key in ("parameters", "optimizer", "gradients", "activations"):
            value, allowed = getattr(self, key), ("auto", *TIERS)
            if value == "nvme":
                raise ConfigError(
                    f"offload.{key} is nvme, and this version has no nvme tier yet; allowed: auto, device, cpu."
                )
            if value not in allowed:
                raise ConfigError(
                    f"offload.{key} is {value!r}{nearest(str(value), allowed)}; allowed: auto, device, cpu."
                )
        if self.optimizer == "device" and self.parameters == "cpu":
            raise ConfigError(
                "offload.optimizer is device and offload.parameters is cpu: states above their parameters save "
                "nothing. Set --offload.parameters device, or --offload.optimizer cpu."
            )
        if (self.gradients == "device" and self.optimizer == "cpu") or (
            self.gradients == "cpu" and self.optimizer == "device"
        ):
            raise ConfigError(
                f"offload.gradients is {self.gradients} and offload.optimizer is {self.optimizer}: gradients wait "
                "beside the optimizer states. Set --offload.gradients auto."
            )
