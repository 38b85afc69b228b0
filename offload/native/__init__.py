"""The C++ kernels and the I/O engine, and what stands in for them.

What `offload.native.kernels` has can be had here, too; it is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("offload.native.kernels"), name)
