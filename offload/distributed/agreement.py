"""Value comparison between ranks: find different ranks and keys. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash


def digest(value: Any) -> int:
    """Hash `value` (dicts, lists, numbers, strings, bytes) to a signed 64-bit number."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=repr).encode()
    return xxhash.xxh64_intdigest(data) - (1 << 63)


def difference(name: str, digests: Sequence[int], values: Sequence[Any]) -> str:
    """Return an error message with the ranks and keys that differ from the majority value (in a draw, from rank 0)."""
    most = max(digests, key=digests.count)  # in a draw the first one
    reference = digests.index(most)
    same = _names([rank for rank, digest in enumerate(digests) if digest == most])
    parts = []
    for digest in dict.fromkeys(digests):
        if digest != most:
            ranks = [rank for rank, other in enumerate(digests) if other == digest]
            own, expected = _flatten(values[ranks[0]]), _flatten(values[reference])
            keys = [key for key in {**expected, **own} if own.get(key, _UNSET) != expected.get(key, _UNSET)]
            listed = "; ".join(f"{key}{_show(own, key)} instead of {_show(expected, key).strip()}" for key in keys[:8])
            more = f"; and {len(keys) - 8} more" if len(keys) > 8 else ""
            parts.append(f"{_names(ranks)}: {listed}{more}")
    return f"{name} must be the same on all ranks, but differs from {same} on {', and on '.join(parts)}."


_UNSET = object()


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _show(values: Mapping[str, Any], key: str) -> str:
    text = repr(values[key]) if key in values else "nothing"
    text = text if len(text) <= 80 else text[:77] + "..."
    return f" {text}" if key else text


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as a flat dict with dotted keys. Any other value gets the empty key."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat
