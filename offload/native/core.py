"""The C++ module `offload._core`, or why there is none."""

from __future__ import annotations

from types import ModuleType

core: ModuleType | None
try:
    from offload import _core as core
except ImportError as error:  # no compiler when this was installed, or built for another Python
    core = None
    missing_because = str(error)
else:
    missing_because = ""
