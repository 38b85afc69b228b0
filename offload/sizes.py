"""Sizes in bytes as text."""

from __future__ import annotations

from typing import Any

from offload.errors import ConfigError, shorten

_SIZE_UNITS = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
"""Bytes per unit, in lower case. A single letter is a binary unit, as in `free -h`, Slurm and Docker."""


def parse_size(value: Any, key: str | None = None) -> int | None:
    """Return a number of bytes from "6GiB", "6G" (the same), "512MiB", "1.5GB" or a number. None stays None (no limit).

    Raises ConfigError. The message begins with `key` if given.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return None
    text = str(value).strip().lower().replace("_", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    try:
        if isinstance(value, bool):  # "true" is no number of bytes
            raise ValueError
        num_bytes = float(number) * _SIZE_UNITS[unit]
        if not 0 <= num_bytes < 2**63:
            raise ValueError
    except (ValueError, KeyError):
        prefix = ""
        if key:
            prefix = f"{key} is {shorten(repr(value))}; "
        raise ConfigError(
            f'{prefix}it should be a size such as "6GiB", "512MiB", "1.5GB", a number of bytes, or none'
        ) from None
    return int(num_bytes)


def parse_chunks(value: Any, key: str | None = None) -> int | str | None:
    """Return "auto", or a number of bytes like `parse_size`."""
    if str(value).strip().lower() == "auto":
        return "auto"
    return parse_size(value, key)
