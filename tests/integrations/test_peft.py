"""PEFT adapters over a streamed frozen base, against resident models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from offload.checkpoint.reader import Reader
from tests.cases import models
from tests.engine.compare import train_both
from tests.engine.reference import count_labels
from tests.engine.test_frozen_weights import dequantised
from tests.integrations.plain import (
    assert_same_run,
    assert_same_weights,
    letters,
    llama,
    needs,
    offload_trainer,
    plain_trainer,
)

needs("accelerate", "peft")

from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model  # noqa: E402

from offload.integrations.transformers import OffloadTrainer  # noqa: E402


def lora(**more: Any) -> Any:
    model = llama()
    torch.manual_seed(5)
    targets = ["q_proj", "v_proj", "gate_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **more))


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora, dropout": {"use_dora": True, "lora_dropout": 0.1},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "parameters": {"target_parameters": ["down_proj.weight"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_is_trained_and_saved_as_without_an_engine(tmp_path: Path, name: str) -> None:
    how: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "gradient_accumulation_steps": 2,
        "kwargs": {"processing_class": letters()},
    }
    plain = plain_trainer(tmp_path / "plain", lora(**CASES[name]), **how)
    offloaded = offload_trainer(tmp_path / "offloaded", lora(**CASES[name]), OffloadTrainer, **how)
    for trainer in (plain, offloaded):
        torch.manual_seed(3)
        trainer.train()
        trainer.save_model()
    assert_same_run(offloaded, plain)
    for folder in (".", "checkpoint-2"):
        there, here = tmp_path / "plain" / folder, tmp_path / "offloaded" / folder
        own = {"offload"} if folder != "." else set()
        assert {each.name for each in here.iterdir()} == {each.name for each in there.iterdir()} | own
        assert_same_weights(*(load_file(each / "adapter_model.safetensors") for each in (here, there)))
    # an adapter checkpoint has no base weights
    with Reader(tmp_path / "offloaded" / "checkpoint-2" / "offload") as reader:
        assert set(reader.contents) == {n for n, p in plain.model.named_parameters() if p.requires_grad}
    resumed = offload_trainer(tmp_path / "offloaded", lora(**CASES[name]), OffloadTrainer, **how)
    torch.manual_seed(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "offloaded" / "checkpoint-2"))
    assert_same_run(resumed, plain)
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "offloaded", is_trainable=True)
    trained = {n: p.detach() for n, p in plain.model.named_parameters() if p.requires_grad}
    assert_same_weights({n: p.detach() for n, p in loaded.named_parameters() if n in trained}, trained)


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
