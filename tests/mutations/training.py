"""Other trainers over engines, and the trainer of the command line."""

from __future__ import annotations

from offload.integrations.optimizer import OffloadOptimizer
from tests.mutations import enter_as, replaced

enter_as(
    "rates-of-schedulers-not-followed",
    replaced(OffloadOptimizer, "_prepare", lambda self: None),
    "tests/integrations/test_trainer.py",
    fuzzed=True,
)
