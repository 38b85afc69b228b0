"""The objective of distillation: a teacher beside the model, or measured before, and a divergence as the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from offload.app.config.config import Config
from offload.app.config.sections import LoraSection, OptimizerSection, RunSection
from offload.app.hf.companion import build_checked, check_companion, companion_at
from offload.app.hf.models import BuiltModel, load_model_config, locate, rope_limit
from offload.app.stored_model import MEASURED_ROWS, TEACHER_MARK, TEACHER_VALUES
from offload.app.training.isolation import isolate
from offload.app.training.objectives import BuildModel, Objective, OpenFrozen, Say
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.companions import companions_of
from offload.engine.engine import Engine
from offload.engine.loss.loss import Loss
from offload.errors import ConfigError, common, format_bytes
from offload.extras.adapters.adapters import as_base
from offload.extras.adapters.over_base import is_base, mark_other
from offload.extras.data.dataset import Dataset
from offload.extras.data.tokenizer import check_same_tokens
from offload.extras.distill.classes import record_type
from offload.extras.distill.losses import Distillation, StoredDistillation
from offload.extras.distill.stored import TeacherClasses, open_stored
from offload.extras.frozen.measurement import is_of_rows, measure, rows_mark
from offload.user_cache import default_cache_dir

KEY = "distill.teacher"
TEACHER = "teacher"
"""Name of the teacher among the submodules of the trained model."""


class FromTeacher(Objective):
    """Next-token probabilities of a frozen teacher. The labels of the data decide which tokens count."""

    name = "token probabilities of the teacher"

    @classmethod
    def of(cls, config: Config, model_kind: str, tokenizer: Any, vocab_size: int) -> FromTeacher:
        if model_kind != "causal":
            raise ConfigError(
                f"train.method is distill, but the model is a {model_kind} one: only causal language models learn the "
                "token probabilities of a teacher. Give a causal model, or set --train.method sft."
            )
        if _is_stored(config):
            return FromStored(vocab_size)
        with companion_at(config, KEY) as section:
            check_same_tokens(KEY, section.path, locate(section), tokenizer)
        return cls()

    @classmethod
    def companions(cls, config: Config, model: nn.Module, build: BuildModel) -> Mapping[str, BuiltModel]:
        with companion_at(config, KEY) as section:
            if _is_stored(config) or is_base(section, config, model):
                return {}
            return {TEACHER: build(section)}

    @classmethod
    def loss_over(cls, config: Config, model: Any, companions: Mapping[str, BuiltModel], num_tokens: int) -> Loss:
        section = config.distill
        options = section.beta, section.temperature, section.labels
        if _is_stored(config):
            return StoredDistillation(record_type(section.top_k, num_tokens), *options)
        if not companions:
            return Distillation(model.get_base_model(), *options, as_base, section.top_k)
        teacher = companions[TEACHER].model
        check_companion(config, KEY, teacher.config, num_tokens)
        return Distillation(teacher, *options, top_k=section.top_k)

    @classmethod
    def measured_first(cls, config: Config, build: BuildModel, num_tokens: int) -> Mapping[str, BuiltModel]:
        if not _is_stored(config):
            return {}
        return {KEY: build_checked(config, KEY, build, num_tokens)}

    @classmethod
    def plan_notes(cls, config: Config, num_tokens: int) -> Iterator[str]:
        if _is_stored(config):
            token_bytes = record_type(config.distill.top_k, num_tokens).itemsize
            row_bytes = token_bytes * int(config.data.sequence_length or 0)
            yield (
                f"the probabilities of the teacher take {token_bytes:,} bytes on disk, in {_stored_dir()}, for each "
                f"token with a target: at most {format_bytes(row_bytes)} a row. No plan counts the time for this."
            )

    def prepare(
        self, config: Config, engine: Engine, data: Any, comm: Comm, folders: Sequence[Path], say: Say, /
    ) -> tuple[Any, Mapping[str, bytes]]:
        """Return the mark of the teacher's files, which a resumed run compares."""
        if not companions_of(engine.model):
            say("the teacher is the base of the adapter: no second copy of it streams.")
        with share_failure(comm, "comparison of the teacher"):
            return data, _mark(config, folders)


class FromStored(FromTeacher):
    """Token probabilities of a teacher, measured before the engine of the run holds memory."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._path = Path()
        """File with the probabilities."""
        self._data: Dataset | None = None
        """The data with these probabilities."""

    def measure_others(
        self, config: Config, open_frozen: OpenFrozen, data: Dataset, comm: Comm, folders: Sequence[Path], say: Say
    ) -> None:
        self._data = data
        with share_failure(comm, "look for the probabilities of the teacher"):
            newest = next((folder for folder in folders if (folder / TEACHER_VALUES).is_file()), None)
            if newest is not None and is_of_rows(newest, data):
                self._path = _stored_dir() / (newest / TEACHER_VALUES).read_text()
        # A resumed run needs no teacher, unless somebody has emptied the cache or changed the evaluation data.
        if comm.from_rank(0, self._path.is_file(), "the probabilities of the teacher"):
            return
        with share_failure(comm, "check of the teacher"), companion_at(config, KEY) as section:
            check_same_tokens(KEY, section.path, locate(section), data.tokenizer)
            check_companion(config, KEY, load_model_config(section), self._num_tokens)
            _mark(config, folders)
        with open_frozen(KEY) as engine:
            limit = rope_limit(engine.model.config)
            _, why_mixed = isolate(engine, data, config, comm, self._num_tokens, limit)
            if why_mixed:
                raise common(
                    ConfigError(
                        f"{KEY} is {section.path}, and {why_mixed}: packed documents would not be isolated. "
                        "Set --data.packing false for one document in each row."
                    )
                )
            wanted = TeacherClasses(config.distill.temperature, config.distill.top_k, self._num_tokens)
            # The teacher has no adapter, no update and nothing random: many runs may learn from one measurement.
            unused = {"lora": LoraSection(), "optimizer": OptimizerSection(), "run": RunSection()}
            of_teacher = config.model_copy(update=unused)
            self._path = measure(of_teacher, engine, data, comm, say, wanted)

    def prepare(
        self, config: Config, _engine: Engine, data: Dataset, comm: Comm, folders: Sequence[Path], _say: Say
    ) -> tuple[Dataset, Mapping[str, bytes]]:
        """Return the data with the probabilities in the batches, and the files by which a resumed run finds them."""
        if data is not self._data:
            raise common(
                ConfigError(
                    "the model cannot keep the documents of a row apart, and the probabilities of the teacher are of "
                    "packed rows: set --data.packing false for one document in each row."
                )
            )
        with share_failure(comm, "reading of the probabilities of the teacher"):
            record = record_type(config.distill.top_k, self._num_tokens)
            try:
                values = open_stored(self._path, record, data)
            except OSError as error:
                raise ConfigError(
                    f"{self._path}, with the probabilities of the teacher, cannot be read: {error}. All ranks read "
                    "this file: set XDG_CACHE_HOME to a folder that all machines share."
                ) from error
            own = {TEACHER_VALUES: self._path.name.encode(), MEASURED_ROWS: rows_mark(data)}
            files = {**_mark(config, folders), **own}
        return replace(data, values=values), files


def _is_stored(config: Config) -> bool:
    return config.distill.way == "stored"


def _stored_dir() -> Path:
    return default_cache_dir() / TeacherClasses.name


def _mark(config: Config, folders: Sequence[Path]) -> Mapping[str, bytes]:
    return {TEACHER_MARK: mark_other(config, KEY, TEACHER_MARK, folders, may_be_gone=_is_stored(config))}
