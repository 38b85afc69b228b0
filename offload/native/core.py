"""Import the C++ module `offload._core`. Without the module: None and a reason."""

from __future__ import annotations

from types import ModuleType

core: ModuleType | None
try:
    from offload import _core as core
except ImportError as error:  # built without a compiler, or for another Python version
    core = None
    missing_because = str(error)
else:
    missing_because = ""
