"""Reference for the numerics contract: plain PyTorch, resident parameters, one graph, updates by `kernels.adamw`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from offload import AdamW
from offload.layout.planes import DTYPES
from offload.native import kernels
from offload.optim.rule import ParameterTraits, RuleChoice, UpdateRule, UpdateStep, parameter_key
from tests.engine.device import own_device, twin

Batch = Mapping[str, torch.Tensor]
LossFunction = Callable[[Any, Batch], torch.Tensor]


class Norm(float):
    """Gradient norm that equals another within 1e-7. A device sums the parts in a different order."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, float):  # `pytest.approx` compares by itself
            return NotImplemented
        return math.isclose(self, other, rel_tol=1e-7)

    __hash__ = float.__hash__


def comparable(norm: float) -> float:
    """Return the norm to compare with a norm from other parts or another kernel: exact on the CPU, else a `Norm`."""
    return norm if own_device().type == "cpu" else Norm(norm)


class Reference:
    """Trains a copy of `model` by an update rule. It computes on the accelerator, if present, and updates on the CPU.

    With precision bf16 or fp16 the copy computes in 16 bits under fp32 masters; parameters with `kept(name)` stay in
    fp32. Its gradients are summed in fp32 over micro-batches and over all uses of a tied weight, and rounded once. For
    this the copy is untied: each use has a separate weight, and all of them follow one master. In fp16 the loss has the
    scale of `torch.amp.GradScaler`, by torch's own function; `skipped` lists the steps (from 0) without an update.

    Without `sums_uses` autograd sums the uses of a tied weight, in the compute dtype.

    `shown(master)` returns the fp32 weights to compute with in place of the master. The master gets their gradient
    unchanged.
    """

    growth_interval = 2000

    def __init__(
        self,
        model: nn.Module,
        optimizer: UpdateRule | None = None,
        precision: str = "fp32",
        max_grad_norm: float | None = 1.0,
        micro_batch_size: int | None = None,
        kept: Callable[[str], bool] = lambda name: False,
        group: Callable[[nn.Module], None] = lambda model: None,
        seed: int = 0,
        shown: Callable[[torch.Tensor], torch.Tensor] = lambda master: master,
        sums_uses: bool = True,
    ) -> None:
        self.seed, self.shown = seed, shown
        self.device = own_device()
        self.model = twin(model)
        group(self.model)
        self.rule, self.rows = optimizer or AdamW(), micro_batch_size
        self.max_grad_norm = self.rule.clips_to(max_grad_norm)
        for module in self.model.modules():
            if getattr(getattr(module, "config", None), "use_cache", None) is not None:
                module.config.use_cache = False
        self.named = {name: [p] for name, p in self.model.named_parameters()}
        if precision != "fp32" and sums_uses:
            self.named = untie(self.model)
        self.short = DTYPES[precision]
        self.scale = torch.tensor(2.0**16 if precision == "fp16" else 1.0)
        self._growth_tracker = torch.zeros((), dtype=torch.int32)
        self.skipped: list[int] = []
        self._num_done = 0
        self.split = {name for name in self.named if precision != "fp32" and not kept(name)}
        self.masters = {name: uses[0].detach().to("cpu", torch.float32, copy=True) for name, uses in self.named.items()}
        self.choices = dict(self._choices())
        self.states = {
            name: {"weights": m}
            | {
                p.name: torch.zeros(p.numel(m.numel()), dtype=p.dtype)
                for p in self.rule.parts[self.choices[name].rule].moments
            }
            | {f.name: torch.zeros(f.numel(m.shape)) for f in self.rule.parts[self.choices[name].rule].factors}
            for name, m in self.masters.items()
        }
        self.steps = dict.fromkeys(self.named, 0)
        self._sums: dict[str, torch.Tensor] = {}
        for name in self.named:
            self._show(name)

    def step(
        self, batch: Batch, loss_fn: LossFunction | None = None, count: Callable[[Batch], int] | None = None
    ) -> tuple[torch.Tensor, float]:
        """Train on a batch. Return the loss and the gradient norm. `count` returns a micro-batch's weight."""
        total = torch.zeros(())
        for loss in self.losses(batch, loss_fn, count or count_shifted):
            loss.backward(torch.full_like(loss, float(self.scale)))
            total += loss.detach().cpu().float()
            self.collect()
        return total, self.update()

    def losses(
        self, batch: Batch, loss_fn: LossFunction | None, count: Callable[[Batch], int]
    ) -> Iterator[torch.Tensor]:
        batch = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
        }
        if self.rows is None:  # batches in any form
            inputs = batch if loss_fn is None else {k: v for k, v in batch.items() if k != "labels"}
            outputs = self.model(**inputs)
            yield outputs.loss if loss_fn is None else loss_fn(outputs, batch)
            return
        total = len(next(iter(batch.values())))
        rows = self.rows or total
        for start in range(0, total, rows):
            part = {key: value[start : start + rows] for key, value in batch.items()}
            if rows < total and not count(part):
                continue  # a mean over zero targets is NaN
            if loss_fn is None:
                loss = self.model(**part).loss
            else:
                loss = loss_fn(self.model(**{k: v for k, v in part.items() if k != "labels"}), part)
            yield loss if rows >= total else loss * (count(part) / count(batch))

    def collect(self) -> None:
        """Add the `.grad` tensors from the last backward to the sums, in fp32."""
        for name, uses in self.named.items():
            found = [p.grad.cpu().float() for p in reversed(uses) if p.grad is not None]  # in backward order
            for p in uses:
                p.grad = None
            if found:
                total = found[0] if len(found) == 1 else sum(found[1:], found[0])
                self._sums[name] = self._sums[name] + total if name in self._sums else total.contiguous()

    def update_on(self, device: torch.device) -> None:
        """Move the states to a device. An accelerator kernel is within 2 ulp of the CPU kernel, not bit-equal."""
        for name, states in self.states.items():
            self.states[name] = {plane: values.to(device) for plane, values in states.items()}
            self.masters[name] = self.states[name]["weights"]

    def update(self) -> float:
        """Clip and update with the collected gradients. Return the norm."""
        sums, self._sums = self._sums, {}
        if self.short == torch.float16:
            sums = {name: total.half().float() if name in self.split else total for name, total in sums.items()}
        squares = (kernels.sum_squares(sums[name]) for name in self.named if name in sums)
        norm = math.sqrt(reduce(add, squares, 0.0))  # sum() is compensated since Python 3.12
        norm /= float(self.scale)
        unscale, self._num_done = 1 / float(self.scale), self._num_done + 1
        if self.short == torch.float16:
            found_inf = torch.tensor(float(not math.isfinite(norm)))
            torch._amp_update_scale_(self.scale, self._growth_tracker, found_inf, 2.0, 0.5, self.growth_interval)
            if found_inf:
                self.skipped.append(self._num_done - 1)
                return comparable(norm)
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        for name, gradient in sums.items():
            if name in self.split:
                gradient = gradient.to(self.short)
            gradient = gradient.to(self.masters[name].device)
            choice = self.choices[name]
            self.steps[name] += 1
            lr, key = self.rule.lr * choice.lr_scale, parameter_key(name, self.seed)
            rule, shape = self.rule.parts[choice.rule], tuple(gradient.shape)
            # An engine computes the products of a rule on the device, also for states on the host.
            workspace = torch.empty(rule.workspace_bytes(shape), dtype=torch.uint8, device=self.device)
            by = UpdateStep(
                self.steps[name], lr, choice.weight_decay, scale * unscale, key, shape=shape, workspace=workspace
            )
            states = {plane: values.view(-1) for plane, values in self.states[name].items()}
            if gradient.numel():
                rule.update(states, gradient.reshape(-1), by)
            self._show(name)
        return comparable(norm)

    def _choices(self) -> Iterator[tuple[str, RuleChoice]]:
        """Yield the optimizer choice for each parameter."""
        modules = list(self.model.modules())
        tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
        in_blocks = {id(p) for module in modules if _is_list(module) for p in module.parameters()}
        filters = {id(module.weight) for module in modules if isinstance(module, nn.modules.conv._ConvNd)}
        for name, uses in self.named.items():
            place = [any(id(use) in places for use in uses) for places in (tables, in_blocks, filters)]
            yield name, self.rule.choose(ParameterTraits(name, tuple(uses[0].shape), *place))

    def _show(self, name: str) -> None:
        """Copy the master weights to the model in the compute dtype."""
        for p in self.named[name]:
            master = self.shown(self.masters[name].cpu())
            if name in self.split:
                master = master.half() if self.short == torch.float16 else kernels.split(master)[0]
            p.data = master.to(self.device, copy=True)


def _is_list(module: nn.Module) -> bool:
    """Return True for a ModuleList, and for a Sequential whose modules all have parameters."""
    is_chain = isinstance(module, nn.Sequential) and len(module) > 1
    return isinstance(module, nn.ModuleList) or (is_chain and all(any(True for _ in m.parameters()) for m in module))


def untie(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Give every use of a tied weight a separate parameter. Return the parameters by first name, in torch's order."""
    names = {id(p): name for name, p in model.named_parameters()}
    uses: dict[str, list[nn.Parameter]] = {name: [] for name in names.values()}
    alive = list(model.parameters())  # keep the objects alive, so no id in `names` is reused
    seen: set[int] = set()
    for module in list(model.modules()):
        for key, child in list(module._modules.items()):
            if child is not None and id(child) in seen and next(child.parameters(), None) is not None:
                module._modules[key] = _twin(child)
            seen.add(id(child))
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is None:
                continue
            name = names[id(p)]
            if uses[name]:
                module._parameters[key] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            uses[name].append(module._parameters[key])
    del alive
    return uses


def _twin(module: nn.Module) -> nn.Module:
    """Return a copy of a module used twice. Both share the parameters."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def sum_by_layer(model: nn.Module) -> None:
    """Make every module of a ModuleList sum the gradients of each input before passing them on, as a streamed unit
    does.
    """

    def has_graph(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.requires_grad

    def own(value: Any) -> Any:
        """Return the value with aliased inputs. A container without such tensors stays the same object, as the module
        may write to it.
        """
        is_input = any(map(has_graph, tree_leaves(value)))
        return tree_map(lambda t: t.view_as(t) if has_graph(t) else t, value) if is_input else value

    def alias(module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make one graph node per input, in front of all uses in the module."""
        return tuple(map(own, args)), {key: own(value) for key, value in kwargs.items()}

    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            for module in parent:
                module.register_forward_pre_hook(alias, with_kwargs=True)


def count_shifted(batch: Batch) -> int:
    """Count causal targets: the first label in each row is no target."""
    return int((batch["labels"][:, 1:] != -100).sum())


def count_labels(batch: Batch) -> int:
    """Count the targets without label shift."""
    return int((batch["labels"] != -100).sum())


def fake_quantised(weights: torch.Tensor, precision: str = "fp32") -> torch.Tensor:
    """Quantize a matrix to int8 with one scale per 128 elements and return the dequantized values, in plain PyTorch.

    The values are rounded to the compute precision and returned in fp32.
    """
    if weights.dim() < 2 or weights.numel() < 4096:
        return weights
    blocks = functional.pad(weights.reshape(-1), (0, -weights.numel() % 128)).view(-1, 128)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    levels = (blocks / scales.clamp(min=1e-38)).round().to(torch.int8)
    values = (levels * scales).view(-1)[: weights.numel()].view(weights.shape)
    return values.to(DTYPES[precision]).float()
