"""PEFT adapters over a streamed frozen base, against resident models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offload.checkpoint.reader import Reader
from tests.cases import models
from tests.engine.compare import train_both
from tests.engine.reference import count_labels
from tests.engine.test_frozen_weights import dequantised
from tests.integrations.plain import (
    assert_same_run,
    needs,
    offload_trainer,
    plain_trainer,
)

needs("accelerate", "peft")

from peft import LoraConfig, PrefixTuningConfig, get_peft_model  # noqa: E402

from offload.integrations.transformers import OffloadTrainer  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_an_adapter_over_a_base_in_few_bits(codec: str, tmp_path: Path) -> None:
    base = models.build(lambda: models.llama(hidden_size=64, intermediate_size=96, num_key_value_heads=4))
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    own = {"kwargs": {"offload": {"frozen_weights": codec}}}
    plain = plain_trainer(tmp_path / "plain", dequantised(model, codec), **how)
    offloaded = offload_trainer(tmp_path / "offloaded", copy.deepcopy(model), OffloadTrainer, **how, **own)
    resumed = offload_trainer(tmp_path / "offloaded", model, OffloadTrainer, **how, **own)
    plain.train()
    offloaded.train()
    assert_same_run(offloaded, plain)
    with Reader(tmp_path / "offloaded" / "checkpoint-2" / "offload") as reader:
        assert set(reader.contents) == {n for n, p in plain.model.named_parameters() if p.requires_grad}
    assert offloaded.engine.told_frozen_weights.startswith(f"14 frozen parameters are stored in {codec}")
    resumed.train(resume_from_checkpoint=str(tmp_path / "offloaded" / "checkpoint-2"))
    assert_same_run(resumed, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "task", "settings"),
    [
        (models.llama, "CAUSAL_LM", {"micro_batch_size": 2}),
        (models.gemma2, "CAUSAL_LM", {"recompute": "never"}),
        (models.t5, "SEQ_2_SEQ_LM", {"recompute": "always"}),
    ],
)
def test_a_prefix_is_seen_and_trained(make: Callable[[], nn.Module], task: str, settings: dict[str, Any]) -> None:
    """PEFT passes the prefix keys and values as a non-empty cache."""
    model = get_peft_model(models.build(make), PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).eval()
    count = count_labels if make is models.t5 else None
    train_both(model, [models.tokens(seed) for seed in range(2)], count=count, within=1e-4, **settings)
