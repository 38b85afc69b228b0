"""Machines in YAML files, shipped ones by name."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml

from offload.accelerators import parse_device
from offload.errors import ConfigError, nearest, shorten
from offload.machine.hardware import FP8, SYSTEM_BYTES, Hardware, Rates
from offload.sizes import parse_size

_HOST_EXCHANGE_SHARE = 0.8
"""Assumed exchange rate between ranks through the host, relative to the H2D rate."""
_BUILTIN_FOLDER = Path(__file__).parent / "described"
_LEFT_OUT: dict[str, Any] = {
    "num_devices": None, "device_bytes": None, "disk_bytes": None, "endurance_bytes": None, "shares_memory": False,
    "num_machines": 1, "system_bytes": SYSTEM_BYTES,
}  # fmt: skip
"""Defaults for omitted keys."""
_PRECISIONS = ("fp32", "bf16", "fp16", FP8)
_FLOPS = ("flops_per_s", "attention_flops_per_s")
"""Rates by precision."""


def read_machine(path_or_name: str | Path) -> Hardware:
    """Load a machine from a YAML file, or a built-in one by name, such as "h100" or "RTX 4090".

    The file has the fields of `Hardware`, with `Rates` fields under `rates`. `host_bytes` there is all of the host's
    memory, with `system_bytes`. Sizes may be "24GiB" or "26GB". Raises ConfigError.
    """
    path = _find(str(path_or_name))
    try:
        description = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"the description {path} cannot be read: {_yaml_problem(error)}.") from error
    if not isinstance(description, dict):
        known = ", ".join(each.name for each in fields(Hardware))
        raise ConfigError(f"{path} does not describe a machine: it is not a mapping of {known}; give another file.")
    return _MachineFile(path).hardware(description)


def parse_link(value: Any) -> float:
    """Parse a network rate to bytes per second.

    Accepts bits such as "25Gbit", "25Gbps" and "25Gb/s", and any size for `parse_size`. Raises ConfigError.
    """
    text = str(value).strip().removesuffix("/s")
    bits = re.fullmatch(r"(.*?)(?:bits?|bps|(?<=[KMGT])b)", text)
    if bits is None:
        return float(parse_size(text) or 0)
    return float(parse_size(f"{bits[1]}b") or 0) / 8


def _yaml_problem(error: Exception) -> str:
    """Return the YAML error without file content, because the file may be a different one than intended."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}"
    return shorten(" ".join(str(error).split()))


def builtin_names() -> list[str]:
    """Return the names of the built-in machines."""
    return sorted(path.stem for path in _BUILTIN_FOLDER.glob("*.yaml"))


def _find(path_or_name: str) -> Path:
    with suppress(OSError, RuntimeError):  # not a path: too long, or an unknown user
        path = Path(path_or_name).expanduser()
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return path
    name = "-".join(path_or_name.lower().replace("_", " ").split())
    if name not in builtin_names():
        raise ConfigError(
            f"--hardware is {shorten(repr(path_or_name))}, which is neither a YAML file nor a known "
            f"machine{nearest(name, builtin_names())}: give a file, or one of {', '.join(builtin_names())}."
        )
    return _BUILTIN_FOLDER / f"{name}.yaml"


class _MachineFile:
    """Parser for a machine file. Every error names the key and the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def hardware(self, description: Any) -> Hardware:
        """Return the parsed hardware. Raises ConfigError."""
        values = _LEFT_OUT | self._dataclass_keys(description, "", Hardware)
        device = self._device(values["device"])
        if values["device_bytes"] is None and device != "cpu":
            raise self._error("device_bytes", None, "the memory of the device, required for all devices but a CPU")
        rates = self._dataclass_keys(values["rates"], "rates.", Rates)
        figures = [each.name for each in (*fields(Hardware), *fields(Rates))]
        numbers: dict[str, Any] = {}
        for key in ("device_bytes", "disk_bytes", "endurance_bytes", "num_devices", "num_machines", "system_bytes"):
            numbers[key] = values[key]
            if values[key] is not None:
                numbers[key] = int(self._number(key, values[key], is_whole=key.startswith("num_")))
        if not isinstance(values["shares_memory"], bool):
            raise self._error("shares_memory", values["shares_memory"], "true or false")
        host_bytes = int(self._number("host_bytes", values["host_bytes"]))
        if host_bytes <= numbers["system_bytes"]:
            raise self._error("host_bytes", values["host_bytes"], "more than system_bytes, which the system keeps")
        return Hardware(
            name=self._word("name", values["name"]),
            device=device,
            capability=self._capability(values.get("capability")),
            shares_memory=values["shares_memory"],
            rates=Rates(**{key: self._rate(key, value) for key, value in rates.items() if value is not None}),
            sources={
                key: self._word(f"sources.{key}", value)
                for key, value in self._checked_keys(values.get("sources", {}), "sources.", figures, ()).items()
            },
            host_bytes=host_bytes - numbers["system_bytes"],
            **numbers,
        )

    def _dataclass_keys(self, mapping: Any, prefix: str, dataclass_type: type) -> dict[str, Any]:
        """Return the mapping after checking for unknown and missing dataclass fields."""
        parts = fields(dataclass_type)
        needed = [each.name for each in parts if each.default is MISSING and each.default_factory is MISSING]
        needed = [name for name in needed if name not in _LEFT_OUT]  # code must name these, a file need not
        return self._checked_keys(mapping, prefix, [each.name for each in parts], needed)

    def _checked_keys(
        self, mapping: Any, prefix: str, allowed: Collection[str], needed: Collection[str]
    ) -> dict[str, Any]:
        if not isinstance(mapping, dict):
            raise self._error(prefix.rstrip("."), mapping, f"a mapping of {', '.join(allowed)}")
        for key in mapping:
            if key not in allowed:
                near = nearest(str(key), allowed)
                raise ConfigError(
                    f"{self._path}: {prefix}{shorten(str(key))} is not a key of a machine{near}; leave it out."
                )
        if missing := [prefix + key for key in needed if mapping.get(key) is None]:
            raise ConfigError(f"{self._path} lacks {', '.join(missing)}, needed for a plan: add them.")
        return mapping

    def _word(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self._error(key, value, "a text")
        return value

    def _capability(self, value: Any) -> tuple[int, int] | None:
        found = re.fullmatch(r"(\d+)\.(\d+)", str(value))
        if value is None or found:
            return found and (int(found[1]), int(found[2]))
        raise self._error("capability", value, 'a text such as "8.9"')

    def _device(self, value: Any) -> str:
        with suppress(ConfigError):
            device = parse_device(self._word("device", value))
            if device is not None and str(device) == device.type:  # without a number: a file describes any one device
                return device.type
        raise self._error("device", value, 'a device type of torch, such as "cuda" or "cpu", without a number')

    def _rate(self, key: str, value: Any) -> Any:
        """Parse a rate, or rates by precision."""
        if key not in _FLOPS:
            return self._number(f"rates.{key}", value)
        needed: tuple[str, ...] = ()
        if key == _FLOPS[0]:
            needed = ("fp32", "bf16")
            if isinstance(value, dict) and "fp16" in value:  # a device without bf16
                needed = ("fp32",)
        by_precision = self._checked_keys(value, f"rates.{key}.", _PRECISIONS, needed)
        return {precision: self._number(f"rates.{key}.{precision}", rate) for precision, rate in by_precision.items()}

    def _number(self, key: str, value: Any, is_whole: bool = False) -> float:
        """Parse a positive number, or a size with a unit."""
        try:
            number = float(value) if isinstance(value, float | str) else 0.0  # YAML parses 1e-5 as text
        except ValueError:
            number = 0.0
        try:
            number = number or parse_link(value)  # a size such as 24GiB, or a rate in bits
        except ConfigError:
            number = 0.0
        if not (math.isfinite(number) and number > 0) or (is_whole and number % 1):
            raise self._error(key, value, 'a number above 0, or a size such as "24GiB"')
        return number

    def _error(self, key: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key} is {shorten(repr(value))}; it must be {allowed}.")


def share_of_rank(hardware: Hardware, num_ranks: int) -> Hardware:
    """Return the rates and the memory available to each of `num_ranks` ranks.

    Host memory, disk, network and CPU compute are divided. With an unknown collective rate, exchanges are assumed to go
    through the host.
    """
    rates = hardware.rates
    if num_ranks == 1:
        return hardware
    shared = ["host_bytes_per_s", "nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "network_bytes_per_s"]
    shared += ["nvme_both_ways_bytes_per_s"]
    flops: dict[str, Any] = {}
    if hardware.device == "cpu":  # otherwise each rank has a device and its link
        shared += ["h2d_bytes_per_s", "d2h_bytes_per_s", "both_ways_bytes_per_s", "device_bytes_per_s"]
        shared += ["moved_bytes_per_s", "fresh_bytes_per_s"]
        flops = {
            name: {precision: rate / num_ranks for precision, rate in by_precision.items()}
            for name in ("flops_per_s", "attention_flops_per_s")
            if (by_precision := getattr(rates, name)) is not None
        }
    divided = {name: rate / num_ranks for name in shared if (rate := getattr(rates, name)) is not None}
    rank_rates = replace(rates, **flops, **divided)
    if rank_rates.collective_bytes_per_s is None:
        rank_rates = replace(rank_rates, collective_bytes_per_s=_HOST_EXCHANGE_SHARE * rank_rates.h2d_bytes_per_s)
    disk_bytes = None if hardware.disk_bytes is None else hardware.disk_bytes // num_ranks
    return replace(hardware, rates=rank_rates, host_bytes=hardware.host_bytes // num_ranks, disk_bytes=disk_bytes)
