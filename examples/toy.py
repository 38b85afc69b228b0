"""Common parts of the examples: a tiny model, tokenizer and texts, made without a network, and the flags to use real
ones.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offload import Placement


def parse(description: str, **defaults: Any) -> argparse.Namespace:
    """Read the flags common to all examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or hub name; empty: a toy of random weights")
    parser.add_argument("--output", default=f"runs/{Path(sys.argv[0]).stem}", help="folder for what is trained")
    parser.add_argument("--steps", type=int, default=defaults.get("steps", 10))
    parser.add_argument("--batch-size", type=int, default=4, help="rows a step and rank")
    parser.add_argument("--length", type=int, default=128, help="tokens a row, at most")
    parser.add_argument("--lr", type=float, default=defaults.get("lr", 1e-3))
    parser.add_argument("--device-memory", default="", help="budget of the device, as 20GiB; empty: 4MiB for the toy")
    parser.add_argument("--host-memory", default="", help="budget of the host; empty: none")
    parser.add_argument("--nvme-dir", default="", help="a folder on a local disk, for states that no memory holds")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bf16, over fp32 masters; wants a GPU to be fast"
    )
    return parser.parse_args()


def placement(flags: argparse.Namespace) -> Placement:
    """Return the placement of states: host memory, and with a folder the rest on disk."""
    device_memory = flags.device_memory or (None if flags.model else "4MiB")
    where = "auto" if flags.nvme_dir else "cpu"
    return Placement(
        parameters=where,
        optimizer=where,
        device_memory=device_memory,
        host_memory=flags.host_memory or None,
        nvme_dir=flags.nvme_dir or None,
    )


def texts(count: int = 64, characters: int = 600) -> list[str]:
    """Return pieces of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:count]
    return [file.read_text(encoding="utf-8", errors="replace")[:characters] for file in files]


def tokenizer(flags: argparse.Namespace) -> Any:
    """Return the model's tokenizer, or a byte-level BPE trained on the texts."""
    if flags.model:
        return AutoTokenizer.from_pretrained(flags.model)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", model_max_length=512)


def model(flags: argparse.Namespace) -> Any:
    """Return the model to train: a real model in its own dtype, on the host."""
    if flags.model:
        return AutoModelForCausalLM.from_pretrained(flags.model, dtype="auto")
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def arguments(flags: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the common trainer arguments."""
    return {
        "output_dir": flags.output,
        "max_steps": flags.steps,
        "per_device_train_batch_size": flags.batch_size,
        "learning_rate": flags.lr,
        "logging_steps": max(1, flags.steps // 5),
        "save_strategy": "no",
        "report_to": [],
        "bf16": flags.bf16,
        "use_cpu": not torch.accelerator.is_available(),
        **more,
    }
