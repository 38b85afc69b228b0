"""Send metrics to experiment trackers. metrics.jsonl remains the complete record."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from offload.errors import ConfigError, nearest

_PROJECT = "offload"


Log = Callable[[int, Mapping[str, float]], Any]
"""Logs numbers for a step, counted from 1."""
Close = Callable[[], Any]


def _tensorboard(folder: Path, last_step: int, _config: Mapping[str, Any]) -> tuple[Log, Close]:
    """Open event files in RUN/tensorboard. On resume, events after the resumed step are purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer_class: Any = SummaryWriter
    writer = writer_class(str(folder / "tensorboard"), purge_step=last_step + 1)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(folder: Path, _last_step: int, config: Mapping[str, Any]) -> tuple[Log, Close]:
    """Open a Weights & Biases run, resumed for the same run folder. Respects the wandb environment variables."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=os.environ.get("WANDB_NAME", folder.name),
        id=os.environ.get("WANDB_RUN_ID", _identity(folder)),
        resume="allow",
        dir=str(folder),
        config=dict(config),
    )
    return lambda step, values: run.log(dict(values), step=step), run.finish


def _trackio(folder: Path, _last_step: int, config: Mapping[str, Any]) -> tuple[Log, Close]:
    """Open a trackio run, resumed for a run folder with the same name."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
    run: Any = trackio.init(project=project, name=folder.name, resume="allow", config=dict(config))
    return lambda step, values: run.log(dict(values), step=step), trackio.finish


def _mlflow(folder: Path, _last_step: int, config: Mapping[str, Any]) -> tuple[Log, Close]:
    """Open an MLflow run, resumed for the same run folder. Respects the MLflow environment variables."""
    import mlflow

    identity = _identity(folder)
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
    # Find the run by a tag: MLflow chooses the identifiers itself.
    runs = mlflow.search_runs(filter_string=f"tags.offload_run = '{identity}'", output_format="list")
    if runs:
        mlflow.start_run(run_name=folder.name, run_id=runs[0].info.run_id)
    else:
        mlflow.start_run(run_name=folder.name, tags={"offload_run": identity})
        # MLflow refuses longer values, and other values for a run with some.
        mlflow.log_params({key: str(value)[:500] for key, value in config.items()})
    return lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run


_TRACKERS: dict[str, Callable[[Path, int, Mapping[str, Any]], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
"""Trackers by name: from run folder, resumed step and all settings to the functions of a connection."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown or missing tracker."""
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(
                f"run.report_to is {name!r}{nearest(name, _TRACKERS)}; it should list some of "
                f"{', '.join(_TRACKERS)}, or be none."
            )
        if find_spec(name) is None:
            raise ConfigError(
                f"run.report_to is {name}, which is not installed: pip install {name}, or set --run.report_to none."
            )


class Loggers:
    """All trackers of a run. A failing tracker is reported once and dropped; the run continues."""

    def __init__(
        self, names: Sequence[str], folder: Path, last_step: int, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Open the trackers. folder: run folder. last_step: step the run resumes at. config: all settings by key."""
        self._say = say
        self._loggers = dict[str, tuple[Log, Close]]()

        def connect(name: str) -> None:
            self._loggers[name] = _TRACKERS[name](folder, last_step, config)

        for name in names:
            self._try(name, partial(connect, name))

    def log(self, fields: Mapping[str, Any]) -> None:
        """Send a metrics.jsonl line, or a part of one, to all trackers."""
        values = _numbers(fields)
        for name, (log, _) in list(self._loggers.items()):  # a copy: a failing one is dropped
            self._try(name, partial(log, fields["step"], values))

    def close(self) -> None:
        for name, (_, close) in list(self._loggers.items()):
            self._try(name, close)
        self._loggers.clear()

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # trackers raise anything
            self._loggers.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"note: {name} (run.report_to) failed, and the run continues without it: {reason[:300]}")


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers in a line as `train/loss`; for evaluations `eval/loss` and `eval/NAME/loss`."""
    sources = fields.get("eval_sources", {})
    numbers = {f"eval/{name}/{key}": value for name, each in sources.items() for key, value in each.items()}
    for key, value in fields.items():
        path = f"train/{key}"
        if key.startswith("eval_"):
            path = key.replace("_", "/", 1)
        numbers[path] = value
    return {
        name: float(value)
        for name, value in numbers.items()
        # Trackers have the step as the axis.
        if isinstance(value, int | float) and name != "train/step" and math.isfinite(value)
    }


def _identity(folder: Path) -> str:
    """Return an identifier for the run folder."""
    return xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
