"""Check names in a configuration before torch is loaded, so a wrong name fails in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

from offload.app.config.config import Config
from offload.app.config.sections import PYTHON_PREFIX
from offload.app.hf.model_path import find_model
from offload.app.training.task import TASKS


def check_names(config: Config) -> None:
    """Raise ConfigError if model or data for a new run do not exist.

    A resumed run may lack the model path, because the checkpoint contains the model.
    """
    goes_on = config.run.dir is not None and (Path(config.run.dir) / "checkpoints").is_dir()
    if goes_on or config.checkpoint.resume not in ("auto", "never"):
        return
    if config.model.path is not None and not config.model.path.startswith(PYTHON_PREFIX):
        find_model(config.model.path)
    TASKS["rows"].check_names(config)
