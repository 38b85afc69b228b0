"""Throttles: artificial link limits, to simulate slower PCIe links and disks on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import ConfigError, nearest
from offload.sizes import parse_size

LANES = ("h2d", "d2h", "collective", "network", "nvme_read", "nvme_write", "update")
"""Links with a throttle and a row on the timeline. Several lanes may share one link, see `Lanes`."""
_KEYS = ("bandwidth", "latency_seconds")


@dataclass(frozen=True)
class Throttle:
    """Minimum work duration: `seconds(num_bytes)`. Slower work takes the real time."""

    bytes_per_second: float | None = None
    """Bandwidth in bytes per second. None: no limit."""
    latency_s: float = 0.0
    """Latency per work item, in seconds."""

    def seconds(self, num_bytes: int) -> float:
        """Return the minimum duration in seconds for a transfer of `num_bytes`."""
        return self.latency_s + (num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0)


def parse_throttle(setting: Any) -> dict[str, Throttle]:
    """Parse {lane: bytes per second} or {lane: {"bandwidth": size per second, "latency_seconds": s}}. None means no
    throttles. Raises ConfigError for anything else.
    """
    lanes = ", ".join(LANES)
    if setting is not None and not isinstance(setting, Mapping):
        raise ConfigError(f"offload.throttle is {setting!r}; it must map lanes to bandwidths, with the lanes {lanes}.")
    throttles = {}
    for lane, value in (setting or {}).items():
        key = f"offload.throttle.{lane}"
        if lane not in LANES:
            raise ConfigError(f"{key}: unknown lane{nearest(str(lane), LANES)}; the lanes are {lanes}.")
        fields = value if isinstance(value, Mapping) else {"bandwidth": value}
        for name in fields:
            if name not in _KEYS:
                raise ConfigError(f"{key}.{name}: unknown key{nearest(str(name), _KEYS)}; allowed: {', '.join(_KEYS)}.")
        bandwidth = fields.get("bandwidth")
        rate = float(bandwidth) if isinstance(bandwidth, float) else parse_size(bandwidth, f"{key}.bandwidth")
        latency = fields.get("latency_seconds", 0.0)
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"{key} is {bandwidth!r}; a bandwidth must be more than 0 bytes per second.")
        if isinstance(latency, bool) or not isinstance(latency, int | float) or not 0 <= latency < float("inf"):
            raise ConfigError(f"{key}.latency_seconds is {latency!r}; it must be a number of seconds, at least 0.")
        throttles[lane] = Throttle(rate, float(latency))
    return throttles
