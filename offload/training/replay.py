"""A run by forward passes alone, made again from the weights that it began with and the numbers in its log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.given import is_checkpoint
from offload.checkpoint.stored import DTYPES, rebuild_model
from offload.config.config import Config
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.hf.models import build_model, load_model_config, quiet_transformers
from offload.planning.from_config import update_rule
from offload.planning.settings import Settings
from offload.tiers.placement import Placement
from offload.training.parts import grow_vocabulary
from offload.training.run_folder import RunFolder


def replay_run(base: Path, run: Path, out: Path, dtype: str, say: Callable[[str], None]) -> int:
    """Write the weights that a run ended with to `out`, a Hugging Face folder; return how many steps the run made.
    `base`: a Hugging Face folder, or a checkpoint of the run. `dtype`: by a name of DTYPES. Raises OffloadError.
    """
    quiet_transformers()
    folder = RunFolder(run)
    config = Config.load(run / "config.yaml")
    if config.optimizer.name != "mezo":
        raise ConfigError(
            f"{run} was trained with --optimizer.name {config.optimizer.name}, whose steps need their gradients: only "
            "runs with mezo can be replayed. Its weights are in its checkpoints."
        )
    with _open(base, config) as engine:
        first = engine.num_steps
        records = [line for line in _lines(folder.metrics) if line["step"] > first]
        say(f"replaying {len(records)} steps ...")
        engine.replay(line for line in records if line.get("projected_grad") is not None)
        engine.export(out, DTYPES[dtype])
        return records[-1]["step"] if records else first


def _open(base: Path, config: Config) -> Engine:
    """Return an engine over the weights of a folder, on the host, with the rule of the run."""
    settings = Settings(
        optimizer=update_rule(config),
        placement=Placement(parameters="cpu", optimizer="cpu"),
        precision=config.train.precision,
        seed=config.run.seed,
        device="cpu",
    )
    if is_checkpoint(base):
        engine = Engine(rebuild_model(base, config.model), settings=settings)
        engine.load_checkpoint(base)
        return engine
    section = config.model.model_copy(update={"path": str(base), "preset": None, "init": "pretrained"})
    torch.manual_seed(config.run.seed)
    architecture = load_model_config(section)
    grows = config.model.path is not None and grow_vocabulary(config, architecture)
    built = build_model(section, seed=config.run.seed, config=architecture, grow=grows)
    engine = Engine(built.model, settings=settings, fill=built.fill)
    built.close()
    return engine


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a log; a process that was killed may have left half a line at its end."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
