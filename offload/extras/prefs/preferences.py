"""Preference training: the objective for batches with pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.app.config.config import Config
from offload.app.training.objectives import Batch, Objective
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.engine.loss.batch import IGNORED
from offload.engine.loss.group_loss import GroupLoss, has_target
from offload.extras.data.dataset import Dataset
from offload.extras.prefs.losses import DPO, ORPO, Reward
from offload.extras.prefs.reference import Say, add_reference


class Preferences(Objective):
    """Objective over answer pairs, scored by a loss. `labels_prompt`: prompt labels count in ORPO's first term."""

    count_unit = "pairs"
    loss: GroupLoss

    def __init__(self, method: str, loss: GroupLoss, labels_prompt: bool) -> None:
        self.name = f"the chosen answer rather than the rejected one ({method})"
        self.loss = loss
        self._group = loss.group
        self._labels_prompt = labels_prompt

    @classmethod
    def of(cls, config: Config, model_kind: str, tokenizer: Any, vocab_size: int) -> Preferences:  # noqa: ARG003
        """Return the objective for a training method other than sft."""
        train = config.train
        losses: Mapping[str, GroupLoss] = {
            "dpo": DPO(train.beta),
            "orpo": ORPO(train.beta),
            "reward": Reward(train.center_rewards_coefficient),
        }
        return cls(train.method, losses[train.method], config.data.train_on_prompt and train.method == "orpo")

    def prepare(
        self, config: Config, engine: Engine, data: Dataset, comm: Comm, folders: Sequence[Path], say: Say
    ) -> tuple[Dataset, Mapping[str, bytes]]:
        """Return the data with `reference` in the batches and the file with the values, if the loss has a reference."""
        if "reference" not in self.loss.own:
            return data, {}
        return add_reference(config, engine, data, comm, folders, say)

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
