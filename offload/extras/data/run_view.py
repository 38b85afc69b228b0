"""Prepare and show training data without a run."""

from __future__ import annotations

from collections.abc import Callable

from offload.accelerators import own_accelerator
from offload.app.config.config import Config
from offload.app.hf.models import vocab_size
from offload.app.training.build import RunSetup
from offload.app.training.objectives import OBJECTIVES
from offload.app.training.parts import stages
from offload.app.training.resume import ResumePoint
from offload.extras.data.task import FileRows
from offload.extras.data.view import DataView

_ISOLATION_NOTE = (
    "note: before the first step a run tests whether the model keeps the documents of a row apart; a model that mixes "
    "them gets one document in each row, as with --data.packing false."
)


def look_at_data(config: Config, num_ranks: int, num_samples: int, say: Callable[[str], None]) -> DataView:
    """Prepare the data for a new run, and return a view. No weights are read. Raises OffloadError like the run.

    `say` receives each long stage.
    """
    config.check_source()
    config.check_ranks(num_ranks)
    has_accelerator = own_accelerator(config.offload.device) is not None
    config, architecture, model_kind, _, _ = RunSetup.read(ResumePoint(config), has_accelerator=has_accelerator)
    vocabulary = vocab_size(architecture)
    data = FileRows.build(config, model_kind, vocabulary, stages(say, lambda: None))
    objective = OBJECTIVES[config.train.method].of(config, model_kind.name, data.tokenizer, vocabulary)
    description = list(data.describe(objective))
    if data.is_isolated and config.data.packing_isolated == "auto":
        description.append(_ISOLATION_NOTE)
    num_steps = int(config.resolve_steps(data.num_steps).train.steps or 0)
    return DataView.of(data, objective, description, num_steps=num_steps, num_samples=num_samples)
