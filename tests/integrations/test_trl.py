"""TRL's trainers over an engine, against themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, set_seed

from tests.integrations.plain import (
    SameBits,
    assert_same_run,
    decays,
    letters,
    llama,
    needs,
    offload_trainer,
    plain_trainer,
)

needs("accelerate", "datasets", "trl")

import trl  # noqa: E402
from datasets import Dataset  # noqa: E402

from offload.integrations.transformers import OffloadMixin  # noqa: E402


class SFT(OffloadMixin, trl.SFTTrainer): ...


class DPO(OffloadMixin, trl.DPOTrainer): ...


class KTO(OffloadMixin, trl.KTOTrainer): ...


class Reward(OffloadMixin, trl.RewardTrainer): ...


class GRPO(OffloadMixin, trl.GRPOTrainer): ...


TEXTS = [{"text": "the quick brown fox jumps over the lazy dog " * (1 + number % 3)} for number in range(32)]
PAIRS = [
    {"prompt": "say a word ", "chosen": "a good answer" + "." * (number % 4), "rejected": "bad answer"}
    for number in range(32)
]
JUDGED = [
    {"prompt": "say a word ", "completion": "an answer" + "." * (number % 4), "label": number % 3 > 0}
    for number in range(32)
]


def judge() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=64, max_position_embeddings=128, num_labels=1, pad_token_id=0, **shape)
    return LlamaForSequenceClassification(config)


def number_of_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


CASES: dict[str, tuple[type, type, type, list[dict[str, Any]], dict[str, Any]]] = {
    "sft nll": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": 64, "loss_type": "nll"}),
    "sft chunked_nll": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": 64, "loss_type": "chunked_nll"}),
    "sft padding_free": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": None, "padding_free": True}),
    "sft packing": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": 64, "packing": True}),
    "dpo": (DPO, trl.DPOTrainer, trl.DPOConfig, PAIRS, {"max_length": 64}),
    "kto": (KTO, trl.KTOTrainer, trl.KTOConfig, JUDGED, {"max_length": 64}),
    "reward": (Reward, trl.RewardTrainer, trl.RewardConfig, PAIRS, {"max_length": 64}),
    "grpo": (
        GRPO,
        trl.GRPOTrainer,
        trl.GRPOConfig,
        [{"prompt": "say a word "}] * 32,
        {"max_completion_length": 8, "num_generations": 4},
    ),
}


def made(name: str, folder: Path, offloads: bool, **more: Any) -> Any:
    kind, plain, arguments, data, settings = CASES[name]
    kwargs: dict[str, Any] = {"train_dataset": Dataset.from_list(data), "processing_class": letters()}
    if name in ("dpo", "kto"):
        kwargs["ref_model"] = llama()
    if name == "grpo":
        kwargs["reward_funcs"] = number_of_letters
    model = judge() if name == "reward" else llama()
    make = offload_trainer if offloads else plain_trainer
    kwargs |= more.pop("kwargs", {})
    return make(folder, model, kind if offloads else plain, arguments, bf16=False, kwargs=kwargs, **settings, **more)


@pytest.mark.parametrize("accumulation", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_the_plain_trainer(tmp_path: Path, name: str, accumulation: int) -> None:
    """With gradient checkpointing, which TRL turns on by itself."""
    how: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 2}
    plain, offloaded = (made(name, tmp_path, offloads, **how) for offloads in (False, True))
    for trainer in (plain, offloaded):
        set_seed(1)  # of what GRPO draws
        trainer.train()
    assert_same_run(offloaded, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft chunked_nll", "dpo", "grpo"])
def test_an_adapter_over_a_frozen_base(tmp_path: Path, name: str) -> None:
    """Whose reference, in DPO, is the base with the adapter off; GRPO generates with it on."""
    needs("peft")
    from peft import LoraConfig

    runs = []
    for offloads in (False, True):
        torch.manual_seed(5)
        own = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
        own |= {"ref_model": None} if name == "dpo" else {}
        runs.append(made(name, tmp_path, offloads, max_steps=2, kwargs=own))
        if not offloads:
            runs[0].optimizer = SameBits(runs[0].model, decayed=decays(runs[0].model))
        set_seed(1)
        runs[-1].train()
    assert_same_run(runs[1], runs[0])
    runs[1].save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
