"""metrics.jsonl: one line of JSON a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends lines; each is on its way to the file when `write` returns.

    A number that is not finite is written as null.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, fields: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(fields)) + "\n")

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
