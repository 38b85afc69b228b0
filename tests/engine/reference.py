"""Plain PyTorch, as DESIGN section 8 states it: every parameter resident, one autograd graph, gradients through `native.adamw`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offload import AdamW, native


class Reference:
    """Trains `model` in place. In bf16 the model computes in bf16 (`kept` names stay fp32), the masters are fp32."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW | None = None,
        precision: str = "fp32",
        max_grad_norm: float | None = 1.0,
        micro_batch_size: int | None = None,
        kept: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.model, self.rule, self.max_grad_norm, self.rows = model, optimizer or AdamW(), max_grad_norm, micro_batch_size
        for module in model.modules():
            if getattr(getattr(module, "config", None), "use_cache", None) is not None:
                module.config.use_cache = False
        self.named = dict(model.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.named.items()}
        self.split = {name for name in self.named if precision == "bf16" and not kept(name)}
        for name, p in self.named.items():
            if name in self.split:
                p.data = native.split(self.masters[name])[0]
        self.moments = {name: (torch.zeros_like(m), torch.zeros_like(m)) for name, m in self.masters.items()}
        self.steps = dict.fromkeys(self.named, 0)
        self.gradients: dict[str, torch.Tensor] = {}

    def losses(self, batch: Mapping[str, torch.Tensor], loss_fn: Any, tokens: Callable[[Mapping[str, torch.Tensor]], int]) -> Any:
        total = next(iter(batch.values())).shape[0]
        rows = self.rows or total
        for start in range(0, total, rows):
            part = {k: v[start : start + rows] for k, v in batch.items()}
            outputs = self.model(**part) if loss_fn is None else self.model(**{k: v for k, v in part.items() if k != "labels"})
            loss = outputs.loss if loss_fn is None else loss_fn(outputs, part)
            yield loss if rows >= total else loss * (tokens(part) / tokens(batch))

    def step(self, batch: Mapping[str, torch.Tensor], loss_fn: Any = None, tokens: Any = None) -> tuple[torch.Tensor, float]:
        tokens = tokens or (lambda b: int((b["labels"][:, 1:] != -100).sum()))
        sums: dict[str, torch.Tensor] = {}
        total = torch.zeros(())
        for loss in self.losses(batch, loss_fn, tokens):
            loss.backward()
            total += loss.detach().float()
            for name, p in self.named.items():
                if p.grad is not None:
                    sums[name] = p.grad.float() if name not in sums else sums[name] + p.grad.float()
                    p.grad = None
        return total, self.update(sums)

    def update(self, sums: dict[str, torch.Tensor]) -> float:
        norm = math.sqrt(sum(native.sum_squares(g.contiguous()) for g in (sums[n] for n in self.named if n in sums)))
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        self.gradients = sums
        for name, gradient in sums.items():
            if name in self.split:
                gradient = gradient.bfloat16()
            p = self.named[name]
            lr_scale, decay = self.rule.settings(name, p.dim())
            self.steps[name] += 1
            native.adamw(
                self.masters[name], *self.moments[name], gradient.contiguous(), step=self.steps[name], lr=self.rule.lr * lr_scale,
                betas=self.rule.betas, eps=self.rule.eps, weight_decay=decay, grad_scale=scale,
            )
            p.data = native.split(self.masters[name])[0] if name in self.split else self.masters[name].clone()
        return norm
