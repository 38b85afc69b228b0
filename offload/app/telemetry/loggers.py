"""Send metrics to experiment trackers. metrics.jsonl remains the complete record."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import xxhash

from offload.errors import ConfigError, nearest

_PROJECT = "offload"


class Logger(Protocol):
    """Connection to one tracker for one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers for a step, counted from 1."""

    def close(self) -> None:
        """Finish the connection."""


class _TensorBoard:
    """Event files in RUN/tensorboard. On resume, events after the resumed step are purged."""

    def __init__(self, folder: Path, last_step: int, _config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer_class: Any = SummaryWriter
        self._writer = writer_class(str(folder / "tensorboard"), purge_step=last_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A Weights & Biases run, resumed for the same run folder. Respects the wandb environment variables."""

    def __init__(self, folder: Path, _last_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=os.environ.get("WANDB_RUN_ID", _identity(folder)),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A trackio run, resumed for a run folder with the same name."""

    def __init__(self, folder: Path, _last_step: int, config: Mapping[str, Any]) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT), name=folder.name, resume="allow", config=dict(config)
        )
        self._finish = trackio.finish

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._finish()


class _Mlflow:
    """An MLflow run, resumed for the same run folder. Respects the MLflow environment variables."""

    def __init__(self, folder: Path, _last_step: int, config: Mapping[str, Any]) -> None:
        import mlflow

        identity = _identity(folder)
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        runs = mlflow.search_runs(filter_string=f"tags.offload_run = '{identity}'", output_format="list")
        run_options: dict[str, Any] = {"run_id": runs[0].info.run_id} if runs else {"tags": {"offload_run": identity}}
        mlflow.start_run(**({"run_name": folder.name} | run_options))
        if not runs:
            mlflow.log_params({key: str(value)[:500] for key, value in config.items()})
        self._mlflow: Any = mlflow

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_LOGGER_CLASSES: dict[str, Callable[[Path, int, Mapping[str, Any]], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown or missing tracker."""
    for name in names:
        if name not in _LOGGER_CLASSES:
            raise ConfigError(
                f"run.report_to is {name!r}{nearest(name, _LOGGER_CLASSES)}; it should list some of "
                f"{', '.join(_LOGGER_CLASSES)}, or be none."
            )
        if find_spec(name) is None:
            raise ConfigError(f"run.report_to is {name}, which is not installed: pip install {name}, or leave it out.")


class Loggers:
    """All trackers of a run. A failing tracker is reported once and dropped; the run continues."""

    def __init__(
        self, names: Sequence[str], folder: Path, last_step: int, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Open the trackers. folder: run folder. last_step: step the run resumes at. config: all settings by key."""
        self._say, self._loggers = say, dict[str, Logger]()
        for name in names:
            self._try(name, partial(self._open_logger, name, folder, last_step, config))

    def _open_logger(self, name: str, folder: Path, last_step: int, config: Mapping[str, Any]) -> None:
        self._loggers[name] = _LOGGER_CLASSES[name](folder, last_step, config)

    def log(self, fields: Mapping[str, Any]) -> None:
        """Send a metrics.jsonl line, or a part of one, to all trackers."""
        values = _numbers(fields)
        for name, logger in list(self._loggers.items()):
            self._try(name, partial(logger.log, fields["step"], values))

    def close(self) -> None:
        """Finish all connections."""
        for name, logger in list(self._loggers.items()):
            self._try(name, logger.close)
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
        group, _, rest = key.partition("_") if key.startswith("eval_") else ("train", "", key)
        numbers[f"{group}/{rest}"] = value
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and name != "train/step" and math.isfinite(value)
    }


def _identity(folder: Path) -> str:
    """Return an identifier for the run folder."""
    return xxhash.xxh3_64_hexdigest(str(folder.resolve()).encode())
