"""Models after one training step, as checkpoints and as folders exported by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import Engine
from offload.extras.data.tokenizer import train_bpe
from offload.files.safetensors_file import TensorFile

TEXT = "the weights of a block are fetched, used and given back; then the next block is fetched. "


@dataclass(frozen=True)
class Trained:
    """One trained model: checkpoint folder, exported folder, and fp32 masters by parameter name."""

    checkpoint: Path
    export: Path
    masters: dict[str, torch.Tensor]


def tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer with at most `vocab_size` tokens."""
    return train_bpe([TEXT, TEXT.upper()], vocab_size)


def train(model: nn.Module, batch: dict[str, torch.Tensor], folder: Path, **settings: Any) -> Trained:
    """Train one step. Save a checkpoint with tokenizer in folder/checkpoints/step-1 and an export in folder/theirs."""
    tokenizer(64).save_pretrained(folder / "tokenizer")
    files = {path.name: path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    engine = Engine(model, **settings)
    engine.step(batch)
    engine.save_checkpoint(folder / "checkpoints" / "step-1", files=files)
    engine.export(folder / "theirs", files=files)
    masters = dict(engine.named_parameters())
    engine.close()
    return Trained(folder / "checkpoints" / "step-1", folder / "theirs", masters)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in a Hugging Face folder by stored name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with TensorFile(path) as file:
            found.update({name: file.read(name).view(entry.shape) for name, entry in file.entries.items()})
    return found
