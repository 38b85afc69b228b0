"""offload: exact training of models larger than device memory.

The names below are imported on first use, so `import offload` and `--help` stay fast.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from offload.system import is_wsl

if TYPE_CHECKING:
    from offload.app.config.config import Config as Config
    from offload.app.training.trainer import Trainer as Trainer
    from offload.engine.analysis import Analysis as Analysis
    from offload.engine.engine import Engine as Engine
    from offload.extras.rules.factored import Adafactor as Adafactor
    from offload.extras.rules.factored import AdaLomo as AdaLomo
    from offload.extras.rules.lion import Lion as Lion
    from offload.extras.rules.lomo import LOMO as LOMO
    from offload.extras.rules.muon import Muon as Muon
    from offload.extras.zeroth.mezo import MeZO as MeZO
    from offload.integrations.wrap import wrap as wrap
    from offload.optim.adamw import AdamW as AdamW
    from offload.optim.rule import UpdateRule as UpdateRule
    from offload.optim.sgd import SGD as SGD
    from offload.planning.settings import Settings as Settings
    from offload.tiers.placement import Placement as Placement

__version__ = "0.1.0"

# OpenMP reads these variables at torch import; CUDA and HIP read theirs at the first GPU use. User values take
# precedence. OMP_WAIT_POLICY: OpenMP threads spin at barriers by default; with another busy process, a small-model step
# was measured ten times slower. Allocator: expandable segments let cached memory serve any size; under WSL drivers
# before R615 fail at the first allocation with them.
# CUDA_DEVICE_MAX_CONNECTIONS: nine to eleven streams would share eight GPU queues.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not ({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & set(os.environ) or is_wsl()):  # names in older torch
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_HOMES = {
    "Analysis": "offload.engine.analysis",
    "Config": "offload.app.config.config",
    "Engine": "offload.engine.engine",
    "AdaLomo": "offload.extras.rules.factored",
    "Adafactor": "offload.extras.rules.factored",
    "AdamW": "offload.optim.adamw",
    "LOMO": "offload.extras.rules.lomo",
    "Lion": "offload.extras.rules.lion",
    "MeZO": "offload.extras.zeroth.mezo",
    "Muon": "offload.extras.rules.muon",
    "SGD": "offload.optim.sgd",
    "UpdateRule": "offload.optim.rule",
    "Placement": "offload.tiers.placement",
    "Settings": "offload.planning.settings",
    "Trainer": "offload.app.training.trainer",
    "wrap": "offload.integrations.wrap",
}
__all__ = [*_HOMES, "native"]


def __getattr__(name: str) -> Any:
    if name == "native":
        return importlib.import_module("offload.native")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'offload' has no attribute {name!r}")
