"""MeZO in plain PyTorch: every parameter resident, the model called twice, with the engine's generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offload import MeZO
from offload.native import kernels, philox
from offload.native.directions import PURPOSE, ROUNDING, normal
from offload.optim.rule import parameter_key
from tests.engine.device import own_device, twin
from tests.engine.reference import untie

Batch = Mapping[str, Any]


class PlainMeZO:
    """Trains a copy of `model`. In bf16 it computes in bf16, under masters as the rule has them; `kept(name)` says
    where not.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: MeZO,
        precision: str = "fp32",
        kept: Callable[[str], bool] = lambda name: False,
        seed: int = 0,
    ) -> None:
        self.rule, self.seed, self.num_steps = rule, seed, 0
        self.model = twin(model)
        for module in self.model.modules():
            if getattr(getattr(module, "config", None), "use_cache", None) is not None:
                module.config.use_cache = False
        self.named = untie(self.model)
        self.masters = {name: uses[0].detach().to("cpu", torch.float32, copy=True) for name, uses in self.named.items()}
        self.short = {name for name in self.named if precision == "bf16" and not kept(name)}
        self.alone = self.short if rule.master == "bf16" else set()
        for name in self.alone:
            self.masters[name] = self.masters[name].bfloat16().float()

    def used(self, name: str) -> torch.Tensor:
        """Return a parameter as the device uses it."""
        master = self.masters[name]
        return kernels.split(master)[0] if name in self.short else master

    def direction(self, name: str, number: int) -> torch.Tensor:
        """Return z of a parameter, of which large weights may have none."""
        used, key = self.used(name).float(), parameter_key(name, self.seed)
        words = philox.words(used.numel(), key, self.num_steps, PURPOSE + (number << 16), 0, used.device)
        rank = max(1, math.ceil(self.rule.magnitude_quantile * used.numel()))
        return normal(words).view(used.shape) * (used.abs() <= used.abs().flatten().kthvalue(rank).values)

    def rounded(self, name: str) -> torch.Tensor:
        """Return a master as bf16 has it: up or down at random, by 16 bits that are added to those that are dropped."""
        master, key = self.masters[name].flatten(), parameter_key(name, self.seed)
        element = torch.arange(master.numel())
        words = philox.words(64 * (master.numel() // 128 + 1), key, self.num_steps, ROUNDING, 0, element.device)
        half = words[16 * (element // 32) + element % 16] >> 16 * (element % 32 // 16)
        bits = (master.view(torch.int32) + (half & 0xFFFF)) >> 16 << 16
        return bits.to(torch.int32).view(torch.float32).view_as(self.masters[name])

    @torch.no_grad()
    def step(
        self, batch: Batch, loss_fn: Callable[..., Any] | None = None, taking: Callable[[str], bool] | None = None
    ) -> list[tuple[float, float]]:
        """Train on a batch; return the losses on both sides. `taking`: of the parameters that take part, by name."""
        rule, names = self.rule, [name for name in self.named if taking is None or taking(name)]
        self.num_steps += 1
        losses, updates = [], {name: torch.zeros(()) for name in names}
        batch = {k: v.to(own_device()) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for number in range(rule.num_perturbations):
            both = []
            for sign in (1, -1):
                for name, uses in self.named.items():
                    used = self.used(name)
                    moved = used + sign * (rule.eps * self.direction(name, number)) if name in names else used
                    for p in uses:
                        p.data = moved.to(own_device(), used.dtype, copy=True)
                torch.manual_seed(torch.initial_seed())  # both sides draw alike
                inputs = batch if loss_fn is None else {k: v for k, v in batch.items() if k != "labels"}
                outputs = self.model(**inputs)
                both.append(float(outputs.loss if loss_fn is None else loss_fn(outputs, batch)))
            slope = (both[0] - both[1]) / (2 * rule.eps)
            for name in names:
                term = self.direction(name, number) * (slope / rule.num_perturbations)
                updates[name] = updates[name] + term if number else term
            losses.append((both[0], both[1]))
        for name in names:
            decay = rule.weight_decay if self.masters[name].dim() > 1 else 0.0
            self.masters[name] -= rule.lr * (updates[name] + decay * self.masters[name])
            if name in self.alone:
                self.masters[name] = self.rounded(name)
        return losses
