"""Preference training: the objective for batches with pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offload.app.config.config import Config
from offload.app.hf.companion import check_companion, companion_at
from offload.app.hf.models import load_model_config, locate
from offload.app.training.objectives import Batch, Objective, OpenFrozen, Say
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.engine import Engine
from offload.engine.loss.batch import IGNORED
from offload.engine.loss.group_loss import GroupLoss, has_target
from offload.extras.data.dataset import Dataset
from offload.extras.data.tokenizer import check_same_tokens
from offload.extras.prefs.losses import DPO, ORPO, Reward
from offload.extras.prefs.reference import measure, read_stored, with_reference


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
        return cls(train.method, losses[train.method], labels_prompt, vocab_size)

    def measure_others(self, config: Config, open_frozen: OpenFrozen, data: Dataset, comm: Comm, say: Say) -> None:
        if config.prefs.reference is None:
            return
        with share_failure(comm, "check of the reference"), companion_at(config, "prefs.reference") as section:
            check_same_tokens("prefs.reference", section.path, locate(section), data.tokenizer)
            check_companion(config, "prefs.reference", load_model_config(section), self._num_tokens)
        with open_frozen(section) as engine:
            self._measured = measure(config, engine, data, comm, say)

    def prepare(
        self, config: Config, engine: Engine, data: Dataset, comm: Comm, folders: Sequence[Path], say: Say
    ) -> tuple[Dataset, Mapping[str, bytes]]:
        """Return the data with `reference` in the batches and the file with the values, if the loss has a reference."""
        if "reference" not in self.loss.own:
            return data, {}
        values = self._measured
        if folders:
            values = read_stored(folders, data, comm)
        elif values is None:
            # Before the first step: the engine has the weights of the reference.
            values = measure(config, engine, data, comm, say)
        return with_reference(data, values)

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
