"""Preference training: the objective for batches with pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from offload.app.config.config import Config
from offload.app.hf.companion import build_checked, check_companion, companion_at
from offload.app.hf.models import BuiltModel, load_model_config, locate
from offload.app.stored_model import REFERENCE_MARK
from offload.app.training.objectives import Batch, BuildModel, Objective, OpenFrozen, Say
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.loss.batch import IGNORED
from offload.engine.loss.group_loss import GroupLoss, has_target
from offload.extras.adapters.adapters import as_base
from offload.extras.adapters.over_base import is_base, mark_other
from offload.extras.data.dataset import Dataset
from offload.extras.data.tokenizer import check_same_tokens
from offload.extras.prefs.beside import DPOBeside
from offload.extras.prefs.losses import DPO, ORPO, Reward
from offload.extras.prefs.reference import measure_reference, read_stored, with_reference

KEY = "prefs.reference"
NAME = "reference"
"""Name of the reference among the submodules of the trained model."""


class Preferences(Objective):
    """Objective over answer pairs, scored by a loss. `labels_prompt`: prompt labels count in ORPO's first term."""

    count_unit = "pairs"
    loss: GroupLoss

    def __init__(self, method: str, loss: GroupLoss, labels_prompt: bool, num_tokens: int = 0) -> None:
        self.name = f"the chosen answer rather than the rejected one ({method})"
        self.loss = loss
        self._group = loss.group
        self._labels_prompt = labels_prompt
        self._num_tokens = num_tokens
        self._measured: np.ndarray | None = None
        """Log-probabilities of a reference that is another model."""

    @classmethod
    def of(cls, config: Config, model_kind: str, tokenizer: Any, vocab_size: int) -> Preferences:  # noqa: ARG003
        """Return the objective for a training method other than sft."""
        train = config.train
        losses: Mapping[str, GroupLoss] = {
            "dpo": DPO(train.beta),
            "orpo": ORPO(train.beta),
            "reward": Reward(train.center_rewards_coefficient),
        }
        labels_prompt = config.data.train_on_prompt and train.method == "orpo"
        if config.prefs.way == "beside":
            with companion_at(config, KEY) as section:
                check_same_tokens(KEY, section.path, locate(section), tokenizer)
        return cls(train.method, losses[train.method], labels_prompt, vocab_size)

    @classmethod
    def companions(cls, config: Config, model: nn.Module, build: BuildModel) -> Mapping[str, BuiltModel]:
        if config.prefs.way == "stored":
            return {}
        with companion_at(config, KEY) as section:
            if is_base(section, config, model):
                return {}
            return {NAME: build(section)}

    @classmethod
    def loss_over(cls, config: Config, model: Any, companions: Mapping[str, BuiltModel], num_tokens: int) -> DPO | None:
        if config.prefs.way == "stored":
            return None
        if not companions:
            return DPOBeside(config.train.beta, model.get_base_model(), as_base)
        reference = companions[NAME].model
        check_companion(config, KEY, reference.config, num_tokens)
        return DPOBeside(config.train.beta, reference)

    @classmethod
    def measured_first(cls, config: Config, build: BuildModel, num_tokens: int) -> Mapping[str, BuiltModel]:
        if config.prefs.reference is None or config.prefs.way == "beside":
            return {}
        return {KEY: build_checked(config, KEY, build, num_tokens)}

    def measure_others(
        self, config: Config, open_frozen: OpenFrozen, data: Dataset, comm: Comm, folders: Sequence[Path], say: Say
    ) -> None:
        if config.prefs.reference is None or config.prefs.way == "beside" or folders:  # a checkpoint has the values
            return
        with share_failure(comm, "check of the reference"), companion_at(config, KEY) as section:
            check_same_tokens(KEY, section.path, locate(section), data.tokenizer)
            check_companion(config, KEY, load_model_config(section), self._num_tokens)
        with open_frozen(KEY) as engine:
            self._measured = measure_reference(config, engine, data, comm, say)

    def prepare(
        self, config: Config, engine: Engine, data: Dataset, comm: Comm, folders: Sequence[Path], say: Say
    ) -> tuple[Dataset, Mapping[str, bytes]]:
        """Return the data with `reference` in the batches and the file with the values, if the loss has a reference."""
        marks: Mapping[str, bytes] = {}
        if config.prefs.reference is not None:
            is_stored = config.prefs.way == "stored"
            with share_failure(comm, "comparison of the reference"):
                marks = {REFERENCE_MARK: mark_other(config, KEY, REFERENCE_MARK, folders, may_be_gone=is_stored)}
        if "reference" not in self.loss.own:
            return data, marks
        values = self._measured
        if folders:
            values = read_stored(folders, data, comm)
        elif values is None:
            # Before the first step: the engine has the weights of the reference.
            values = measure_reference(config, engine, data, comm, say)
        compared, files = with_reference(data, values)
        return compared, {**files, **marks}

    def apply(self, batch: Batch, _step: int, _first_row: int = 0, _num_rows: int | None = None, /) -> Batch:
        if not self._labels_prompt:
            return batch
        labels, is_answer = batch["input_ids"], (batch["labels"] != IGNORED).long()
        # All tokens of a row become labels, and no padding.
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
        labels = labels.masked_fill(~has_target(batch["labels"])[:, None], IGNORED)  # empty row on a rank without data
        return {**batch, "labels": labels, "answers": is_answer}

    def count(self, batch: Batch) -> int:
        """Return the pairs in a batch."""
        return int(has_target(batch["labels"]).sum()) // self._group
