"""MeZO in plain PyTorch: resident parameters, two forwards per direction, the engine's random generator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload import MeZO
from offload.extras.zeroth.directions import PURPOSE, ROUNDING, normal
from offload.native import kernels, moments
from offload.optim.rule import parameter_key
from tests.engine.device import own_device, twin
from tests.engine.reference import untie

Batch = Mapping[str, Any]


class PlainMeZO:
    """Trains a copy of `model` by MeZO.

    With precision bf16 the copy computes in bf16, except for names with `kept(name)`. The masters are fp32 or bf16, as
    the rule configures.
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
        """Return a parameter's direction z. Elements above the magnitude quantile are zero."""
        used, key = self.used(name).float(), parameter_key(name, self.seed)
        words = moments.words(used.numel(), key, self.num_steps, PURPOSE + (number << 16), 0, used.device)
        if not used.numel():
            return used
        rank = math.ceil(self.rule.magnitude_quantile * used.numel())
        return normal(words).view(used.shape) * (used.abs() <= used.abs().flatten().kthvalue(rank).values)

    def rounded(self, name: str) -> torch.Tensor:
        """Round a master to bf16 stochastically: add 16 random bits to the dropped bits."""
        master, key = self.masters[name].flatten(), parameter_key(name, self.seed)
        element = torch.arange(master.numel())
        words = moments.words(64 * (master.numel() // 128 + 1), key, self.num_steps, ROUNDING, 0, element.device)
        half = words[16 * (element // 32) + element % 16] >> 16 * (element % 32 // 16)
        bits = (master.view(torch.int32) + (half & 0xFFFF)) >> 16 << 16
        return bits.to(torch.int32).view(torch.float32).view_as(self.masters[name])

    def chosen(self, blocks: Sequence[nn.Module], own: nn.Module) -> set[str]:
        """Return the names of the parameters in the next step: trainable, and of the blocks only the sampled ones.

        `blocks` belong to `own`, the model before the ties were removed.
        """
        words = moments.words(len(blocks), parameter_key("(blocks)", self.seed), self.num_steps + 1, 2, 0, "cpu")
        count = max(1, round(self.rule.layer_fraction * len(blocks)))
        active = set(sorted(range(len(blocks)), key=words.tolist().__getitem__)[:count])
        users: dict[int, set[int]] = {}
        numbers = {id(m): number for number, block in reversed(list(enumerate(blocks))) for m in block.modules()}
        for module in own.modules():
            for parameter in module._parameters.values():
                users.setdefault(id(parameter), set()).add(numbers.get(id(module), -1))
        named = ((name, p) for name, p in own.named_parameters() if p.requires_grad)
        return {name for name, p in named if min(users[id(p)]) in active | {-1}}

    @torch.no_grad()
    def step(
        self, batch: Batch, loss_fn: Callable[..., Any] | None = None, taking: Callable[[str], bool] | None = None
    ) -> list[tuple[float, float]]:
        """Train on a batch. Return the losses on both sides. `taking`: filter for participating parameters, by name."""
        batch = {k: v.to(own_device()) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        inputs = batch if loss_fn is None else {k: v for k, v in batch.items() if k != "labels"}

        def loss() -> float:
            outputs = self.model(**inputs)
            return float(outputs.loss if loss_fn is None else loss_fn(outputs, batch))

        losses = self.measure(loss, taking)
        self.move([(plus - minus) / (2 * self.rule.eps) for plus, minus in losses], taking)
        return losses

    def _taking(self, taking: Callable[[str], bool] | None) -> list[str]:
        return [name for name in self.named if taking is None or taking(name)]

    @torch.no_grad()
    def measure(
        self, loss: Callable[[], float], taking: Callable[[str], bool] | None = None
    ) -> list[tuple[float, float]]:
        """Begin a step. Return (loss at +eps, loss at -eps) for each direction."""
        names, losses = self._taking(taking), []
        self.num_steps += 1
        for number in range(self.rule.num_perturbations):
            both = []
            for sign in (1, -1):
                for name, uses in self.named.items():
                    used = self.used(name)
                    moved = used + sign * (self.rule.eps * self.direction(name, number)) if name in names else used
                    for p in uses:
                        p.data = moved.to(own_device(), used.dtype, copy=True)
                torch.manual_seed(torch.initial_seed())  # both sides sample the same random numbers
                both.append(loss())
            losses.append((both[0], both[1]))
        return losses

    @torch.no_grad()
    def move(self, slopes: Sequence[float], taking: Callable[[str], bool] | None = None) -> None:
        """Finish a step: move along the directions, scaled by the slopes."""
        rule, names, updates = self.rule, self._taking(taking), {}
        for name in names:
            terms = [self.direction(name, number) * (slope / len(slopes)) for number, slope in enumerate(slopes)]
            updates[name] = sum(terms[1:], terms[0])
        for name in names:
            group: Mapping[str, Any] = next((values for key, values in rule.groups if re.search(key, name)), {})
            decay = rule.weight_decay if self.masters[name].dim() > 1 or rule.decay_1d else 0.0
            decay, lr = group.get("weight_decay", decay), rule.lr * group.get("lr_scale", 1.0)
            self.masters[name] -= lr * (updates[name] + decay * self.masters[name])
            if name in self.alone:
                self.masters[name] = self.rounded(name)
