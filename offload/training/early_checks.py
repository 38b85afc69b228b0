"""Check names in a configuration before torch is loaded, so a wrong name fails in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

from offload.config.config import Config
from offload.config.sections import PYTHON_PREFIX
from offload.data.sources import check_exists
from offload.hf.model_path import find_model


def check_names(config: Config) -> None:
    """Raise ConfigError if model or data for a new run do not exist.

    A resumed run may lack the model path, because the checkpoint contains the model.
    """
    goes_on = config.run.dir is not None and (Path(config.run.dir) / "checkpoints").is_dir()
    if goes_on or config.checkpoint.resume not in ("auto", "never"):
        return
    if config.model.path is not None and not config.model.path.startswith(PYTHON_PREFIX):
        find_model(config.model.path)
    for setting in ("source", "sources", "eval_source"):
        for each in getattr(config.data, setting):
            check_exists(each if isinstance(each, str) else each["path"], f"data.{setting}")
