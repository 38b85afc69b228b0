"""The objective of distillation: a teacher beside the model, and a divergence as the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from offload.app.config.config import Config
from offload.app.hf.companion import check_companion, companion_at
from offload.app.hf.models import BuiltModel, load_model_config, locate
from offload.app.stored_model import TEACHER_MARK
from offload.app.training.objectives import BuildModel, Objective, Say
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.companions import companions_of
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.extras.adapters.adapters import as_base
from offload.extras.adapters.over_base import is_base, mark_base
from offload.extras.data.tokenizer import check_same_tokens
from offload.extras.distill.losses import Distillation

KEY = "distill.teacher"
TEACHER = "teacher"
"""Name of the teacher among the submodules of the trained model."""


class FromTeacher(Objective):
    """Next-token probabilities of a frozen teacher. The labels of the data decide which tokens count."""

    name = "token probabilities of the teacher"

    @classmethod
    def of(cls, config: Config, model_kind: str, tokenizer: Any, vocab_size: int) -> FromTeacher:  # noqa: ARG003
        if model_kind != "causal":
            raise ConfigError(
                f"train.method is distill, but the model is a {model_kind} one: only causal language models learn the "
                "token probabilities of a teacher. Give a causal model, or set --train.method sft."
            )
        with companion_at(config, KEY) as section:
            check_same_tokens(KEY, section.path, locate(section), tokenizer)
        return cls()

    @classmethod
    def companions(cls, config: Config, model: nn.Module, build: BuildModel) -> Mapping[str, BuiltModel]:
        with companion_at(config, KEY) as section:
            if is_base(section, config, model):
                return {}
            return {TEACHER: build(section)}

    @classmethod
    def loss_over(
        cls, config: Config, model: Any, companions: Mapping[str, BuiltModel], num_tokens: int
    ) -> Distillation:
        section = config.distill
        options = section.beta, section.temperature, section.labels
        if not companions:
            return Distillation(model.get_base_model(), *options, as_base)
        teacher = companions[TEACHER].model
        check_companion(config, KEY, teacher.config, num_tokens)
        return Distillation(teacher, *options)

    def prepare(
        self, config: Config, engine: Engine, data: Any, comm: Comm, folders: Sequence[Path], say: Say, /
    ) -> tuple[Any, Mapping[str, bytes]]:
        """Return the mark of the teacher's files, which a resumed run compares."""
        if not companions_of(engine.model):
            say("the teacher is the base of the adapter: no second copy of it streams.")
        with share_failure(comm, "comparison of the teacher"):
            return data, {TEACHER_MARK: _mark(config, folders)}


def _mark(config: Config, folders: Sequence[Path]) -> bytes:
    """Return a mark of the teacher's files. Raises ConfigError if the checkpoints in `folders` have another."""
    with companion_at(config, KEY) as section:
        mark = mark_base(section, load_model_config(section), config.run.seed).mark.encode()
    for file in (folder / TEACHER_MARK for folder in folders):
        if file.is_file() and file.read_bytes() != mark:
            raise ConfigError(
                f"{file.parent} is of a run with another teacher than {section.path}, or its files have changed since. "
                "Set --distill.teacher to the teacher of that run, or begin a new run in another run.dir."
            )
    return mark
