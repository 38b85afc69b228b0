"""Which resource of a machine limits a step, before there is a model: what moves for each parameter, over the rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.machine.hardware import Hardware

NUM_PARAMETERS = 10**9
"""Of which seconds are told."""
_FLOPS = 8
"""Of a parameter and a token: forward 2, forward again 2, backward 4 (arXiv:2104.07857, equation 7)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves for each parameter, with AdamW's states in fp32 and gradients that wait for the norm.

    update: read and written in the host's memory: weights, two moments, and the gradient.
    h2d: weights, for the forward and the backward. d2h: gradients.
    nvme_read, nvme_write: with weights and optimizer states on disk.
    """

    update: int
    h2d: int
    d2h: int
    nvme_read: int
    nvme_write: int


TRAFFIC = {"bf16": Traffic(26, 4, 2, 16, 12), "fp32": Traffic(28, 8, 4, 20, 12)}
"""By the precision in which the device computes."""


@dataclass(frozen=True)
class Bounds:
    """What limits a step of NUM_PARAMETERS parameters.

    precision: in what it computes. seconds: of each lane, by its name. lane: the one that takes longest.
    num_tokens: of a step, from which on compute takes longer than that and hides it.
    """

    precision: str
    seconds: Mapping[str, float]
    lane: str
    num_tokens: int


def find_bounds(machine: Hardware) -> Bounds:
    """Return what limits a step that is offloaded as far as the machine's folders allow. Pure."""
    precision = "fp32" if machine.device == "cpu" else "bf16"
    traffic, rates = TRAFFIC[precision], machine.rates
    seconds = {
        "update": traffic.update * NUM_PARAMETERS / rates.host_bytes_per_s,
        "h2d": traffic.h2d * NUM_PARAMETERS / rates.h2d_bytes_per_s,
        "d2h": traffic.d2h * NUM_PARAMETERS / rates.d2h_bytes_per_s,
    }
    if rates.nvme_read_bytes_per_s and rates.nvme_write_bytes_per_s:
        seconds["nvme_read"] = traffic.nvme_read * NUM_PARAMETERS / rates.nvme_read_bytes_per_s
        seconds["nvme_write"] = traffic.nvme_write * NUM_PARAMETERS / rates.nvme_write_bytes_per_s
    lane = max(seconds, key=seconds.__getitem__)
    num_tokens = seconds[lane] * rates.flops_per_s[precision] / (_FLOPS * NUM_PARAMETERS)
    return Bounds(precision, seconds, lane, round(num_tokens))
