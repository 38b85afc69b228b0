"""`python -m offload.init`: write a configuration for `train`, for this machine or one from a description."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offload.app.config.command_line import (
    HOST_MEMORY,
    CommandOption,
    importing,
    parse_command,
    run_command,
    say,
    take_gpus,
)
from offload.errors import ConfigError, DoesNotFitError

if TYPE_CHECKING:
    from offload.app.config.config import Config
    from offload.extras.plan.forecast import Forecast, Forecaster
    from offload.machine.hardware import Hardware

DESCRIPTION = (
    "Write the settings of a run that fits into a YAML file, for train --config. Settings not given stay automatic, "
    "but for train.micro_batch_size (and train.passes beside train.tokens_per_step): of the largest that fit, the "
    "fastest. No weights or data are read. Exit codes: 0 written, 2 bad configuration, 3 nothing fits, with the "
    "smallest change that does."
)
OPTIONS = {
    "out": CommandOption("FILE.yaml", "(default: offload.yaml)", "The file to write; a file there is kept."),
    "hardware": CommandOption(
        "FILE|NAME",
        "(default: this machine)",
        "Write for a described machine: a YAML file, or the name of one that is shipped, such as rtx-4090 or h100.",
    ),
    "host-memory": HOST_MEMORY,
}


def main(words: list[str]) -> int:
    num_ranks, words = take_gpus(words)
    config, own = parse_command(words, prog="python -m offload.init", description=DESCRIPTION, own=OPTIONS)
    path = Path(own["out"] or "offload.yaml").expanduser()
    if path.exists():
        raise ConfigError(f"{path} exists, and is kept; give another file with --out.")
    with importing():
        from offload.app.hf.models import quiet_transformers
        from offload.extras.plan.alternatives import choose_hardware
        from offload.extras.plan.forecast import Forecaster
        from offload.extras.plan.run_forecast import describe_misfit
    quiet_transformers()
    hardware = choose_hardware(config, own["hardware"], own["host-memory"])
    forecaster = Forecaster(config, num_ranks, plans_downloads=own["hardware"] is not None)
    config, prediction = _fitting(forecaster, config, hardware)
    if not prediction.fits:
        say(describe_misfit(prediction))
        return DoesNotFitError.exit_code
    ranks = ""
    if num_ranks > 1:
        ranks = f"--gpus {num_ranks} "
    command = f"offload train {ranks}--config {path}"
    path.write_text(f"# {_forecast(prediction)}\n# {command}\n\n{config.to_yaml(defaults=False)}", encoding="utf-8")
    print(f"{path}: {_forecast(prediction)}\n{command}")
    return 0


def _fitting(forecaster: Forecaster, config: Config, hardware: Hardware) -> tuple[Config, Forecast]:
    """Return the configuration with the micro-batch that fits best, and the forecast; without a fit, with the fix."""
    from offload.extras.plan.alternatives import in_parts, place_or_fix

    initial = in_parts(forecaster, forecaster.predict(config, hardware), opens=("train.micro_batch_size",))
    train = initial.config.train
    chosen = config.with_resolved(train__micro_batch_size=train.micro_batch_size, train__passes=train.passes)
    return chosen, place_or_fix(forecaster, initial, say)


def _forecast(prediction: Forecast) -> str:
    """Return the forecast in one line: model, machine, speed, memory by tier."""
    from offload.extras.plan.run_forecast import describe_forecast

    return f"{prediction.name} on {prediction.hardware.name}, by the plan {describe_forecast(prediction)}"


if __name__ == "__main__":
    run_command(main)
