"""Trains the model of real_model.py with the plain Trainer and with OffloadTrainer, and compares all weights:

python examples/real_trainer.py smollm2 [--lora] [--steps 3] [--device-memory 256MiB]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from offload.integrations.transformers import OffloadTrainer

LENGTH = 128
"""Tokens in a row."""


def load_rows(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the conversations one after the other, cut into rows of LENGTH tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    conversations = [json.loads(line)["messages"] for line in (folder / "train.jsonl").read_text().splitlines()]
    tokens = tokenizer("".join(tokenizer.apply_chat_template(conversations, tokenize=False)))["input_ids"]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def build_model(folder: Path, with_lora: bool) -> Any:
    """Return the model in fp32, or a LoRA adapter over the frozen model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config) if with_lora else model


def main() -> None:
    """Train twice and compare. Exit code 1: a weight differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of real_model.py")
    parser.add_argument("--lora", action="store_true", help="train an adapter over the frozen model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device-memory", default="256MiB", help="budget of the engine (default: 256MiB)")
    words = parser.parse_args()
    rows = load_rows(words.folder)
    arguments = TrainingArguments(
        output_dir=str(words.folder / "trainer"),
        max_steps=words.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        max_grad_norm=0,  # clipping sums squares in another order: equal to about six digits
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
    )
    plain = Trainer(build_model(words.folder, words.lora), arguments, train_dataset=rows)
    plain.train()
    offload = {"placement": {"device_memory": words.device_memory, "activations": "cpu"}}
    streamed = OffloadTrainer(build_model(words.folder, words.lora), arguments, train_dataset=rows, offload=offload)
    streamed.train()
    device = streamed.engine.counters.peak_device_bytes / 2**20
    saved = words.folder / "streamed"
    streamed.save_model(str(saved))
    if words.lora:
        weights = PeftModel.from_pretrained(build_model(words.folder, False), str(saved)).state_dict()
    else:
        weights = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
    expected = plain.model.state_dict()
    differing = [name for name, value in expected.items() if not torch.equal(value.cpu(), weights[name])]
    states = sum(4 * value.numel() for value in expected.values()) + sum(
        12 * each.numel() for each in plain.model.parameters() if each.requires_grad
    )
    print(f"{states / 2**20:.0f} MiB of weights, gradients and moments, through a device that held {device:.0f} MiB")
    print(f"{len(expected) - len(differing)} of {len(expected)} tensors bit-equal to the plain Trainer's")
    if differing:
        raise SystemExit(f"different: {', '.join(differing[:5])}")


if __name__ == "__main__":
    main()
