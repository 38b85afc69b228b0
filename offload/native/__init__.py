"""C++ kernels, the I/O engine, and torch fallbacks.

All names in `offload.native.kernels` are available here too, with an import on first use.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("offload.native.kernels"), name)
