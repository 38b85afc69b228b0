"""Plain trainers with the engine arithmetic in the optimizer: the reference for offloaded trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from offload import Placement
from offload.native import kernels

LR, CLIP = 1e-2, 0.5
PLACEMENT = Placement(parameters="cpu", optimizer="cpu", device_memory="2MiB")


class KernelAdamW(torch.optim.AdamW):
    """torch's AdamW with the C++ kernel of the engine: torch's own differs in the last bits of an update.

    scale: clipping coefficient for the next step.
    """

    scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale, self.scale = self.scale, 1.0
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p)}
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                flat = [t.view(-1) for t in (p.data, state["exp_avg"], state["exp_avg_sq"], p.grad.contiguous())]
                settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                kernels.adamw(*flat, step=int(state["step"]), grad_scale=scale, **settings)


class SameBits(KernelAdamW):
    """The optimizer of a whole model, clipped by the engine's norm."""

    def __init__(
        self,
        model: nn.Module,
        clip: float = CLIP,
        decayed: Callable[[str], bool] = lambda name: True,
        eps: float = 1e-8,
    ) -> None:
        self.clip, self.norms = clip, []
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._all = [p for _, p in trained]
        groups = [
            {"params": [p for name, p in trained if decayed(name) is is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, 0.1), (False, 0.0))
        ]
        super().__init__([group for group in groups if group["params"]], lr=LR, eps=eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        squares = [kernels.sum_squares(p.grad.reshape(-1)) for p in self._all if p.grad is not None]
        norm = math.sqrt(sum(squares))
        self.norms.append(norm)
        if self.clip:
            self.scale = min(1.0, self.clip / (norm + 1e-6))
        super().step()


def llama(vocabulary: int = 64, made: Any = LlamaForCausalLM, **config: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return made(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=128, **shape, **config))


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter."""
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def rows(count: int = 48, length: int = 12, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return token rows with some ignored targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (count, length), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(tokens.shape, generator=generator) < 0.3] = -100
    return [{"input_ids": t, "labels": each} for t, each in zip(tokens, labels, strict=True)]


def common(folder: Path, **more: Any) -> dict[str, Any]:
    """Return arguments for any trainer."""
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    } | more


def logged(trainer: Trainer, key: str = "loss") -> list[Any]:
    return [each[key] for each in trainer.state.log_history if key in each]


def decays(model: nn.Module) -> Callable[[str], bool]:
    return set(Trainer.get_decay_parameter_names(None, model)).__contains__


def plain_trainer(
    folder: Path, model: nn.Module, kind: type = Trainer, arguments: type = TrainingArguments, **more: Any
) -> Any:
    """Return a plain trainer over `SameBits`, with clipping in the optimizer.

    `more` has training arguments. `kwargs` in `more` has keyword arguments for the trainer.
    """
    kwargs = {"train_dataset": rows(), **more.pop("kwargs", {})}
    set_seed(0)
    args = arguments(**common(folder, **more) | {"max_grad_norm": 0.0})
    return kind(model=model, args=args, optimizers=(SameBits(model, decayed=decays(model)), None), **kwargs)


def offload_trainer(
    folder: Path, model: nn.Module, kind: type, arguments: type = TrainingArguments, **more: Any
) -> Any:
    """Return an engine trainer from the same arguments."""
    kwargs = {"train_dataset": rows(), "offload": {"placement": PLACEMENT}, **more.pop("kwargs", {})}
    set_seed(0)
    return kind(model=model, args=arguments(**common(folder, **more)), **kwargs)


def assert_same_run(offloaded: Any, plain: Any) -> None:
    """Check that losses, norms and final weights are equal in every bit."""
    assert logged(offloaded) == logged(plain)
    assert logged(offloaded)
    assert logged(offloaded, "learning_rate") == logged(plain, "learning_rate")
    optimizer = getattr(plain.optimizer, "optimizer", plain.optimizer)
    assert logged(offloaded, "grad_norm") == optimizer.norms
    found = dict(offloaded.engine.named_parameters())
    assert_same_weights(found, {name: p.detach() for name, p in plain.model.named_parameters()})


def assert_same_weights(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different, f"{len(different)} of {len(wanted)} differ, first {different[:3]}"


def reset_accelerate() -> None:
    """Reset the process-wide state of accelerate, if installed."""
    with suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def needs(*libraries: str) -> None:
    """Skip the module if a library is missing."""
    for library in libraries:
        pytest.importorskip(library, reason=f"{library} is not installed: pip install '.[dev]'")
