"""Reference training without offload: plain PyTorch model, plain autograd, and the update rule on whole parameters.

Shares the update kernels with the engine, but no streaming code.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from offload.app.training.objectives import Batch
from offload.engine.gradients.loss_scale import LOSS_SCALES
from offload.engine.loss.loss import LossFunction, run_loss
from offload.engine.units.find import describe_parameters, find_units
from offload.errors import ConfigError
from offload.layout.codecs import EXACT, decoded
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo
from offload.modules import move_buffers
from offload.native import kernels
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule, UpdateStep, parameter_key
from offload.optim.update import clip_coefficient, total_norm

BatchPart = tuple[Batch, float]
"""Rows from a batch, and their share in the batch's mean loss."""


def master_of(info: ParameterInfo, weights: torch.Tensor) -> torch.Tensor:
    """Return the weights as used in training: the dequantized values if the parameter is stored quantized."""
    if info.codec is EXACT:
        return weights
    return decoded(info.codec, weights.reshape(-1), DTYPES[info.compute])


def as_computed(info: ParameterInfo, master: torch.Tensor) -> torch.Tensor:
    """Return flat fp32 master weights as the device computes with them.

    The result is rounded to the compute dtype like in the engine, or dequantized from the link format.
    """
    if info.link is not EXACT:
        return decoded(info.link, master, DTYPES[info.compute])
    if info.compute == "bf16":
        return kernels.split(master.cpu())[0]
    return master.to(DTYPES[info.compute])


@contextmanager
def using_link_weights(model: nn.Module, precision: str, link_weights: str) -> Iterator[None]:
    """Give the trained weights of a fully loaded model the dequantized link format values, and restore them at exit."""
    infos = describe_parameters(model, AdamW(), precision, link_weights=link_weights)
    quantized = [(info, p) for info, p in zip(infos, model.parameters(), strict=True) if info.link is not EXACT]
    before = [parameter.data for _, parameter in quantized]
    try:
        for info, parameter in quantized:
            master = parameter.detach().float().reshape(-1)
            parameter.data = as_computed(info, master).view(info.shape).to(parameter)
        yield
    finally:
        for (_, parameter), data in zip(quantized, before, strict=True):
            parameter.data = data


class ResidentTrainer:
    """Trains a model fully in memory, in any floating-point dtype, with fp32 master weights.

    - device: compute device.
    - update_devices: device for masters, moments and updates, by parameter name.
    - max_grad_norm: None: no clipping.
    - skips: a step with non-finite gradients changes nothing.
    - late_after: first step, counted from 0, whose update becomes visible one step late. None: never.
    - sums_by_unit: sum gradients like the engine. If a unit uses an input in several places, the engine sums their
      gradients before passing them on; plain autograd follows the order of the whole graph.
    - loss_fn: as for `Engine.step`. Its companions are in the model.

    Gradients in 16 bits are summed in fp32 over batch parts and over the places of a tied weight, and rounded once (see
    docs/reference/numerics.md). For this purpose each place of a tied weight has a separate parameter; all follow one
    master weight.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        *,
        precision: str,
        device: torch.device,
        update_devices: Mapping[str, torch.device],
        max_grad_norm: float | None,
        seed: int,
        skips: bool = False,
        late_after: int | None = None,
        sums_by_unit: bool = False,
        frozen_weights: str = "exact",
        link_weights: str = "exact",
        loss_fn: LossFunction | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.rule = rule
        self.lr = rule.lr
        self._update_devices = update_devices
        self._max_grad_norm = max_grad_norm
        self._seed = seed
        self._skips = skips
        self._late_after = late_after
        self._loss_fn = loss_fn
        self.loss_scale = LOSS_SCALES[precision]()
        self._num_done = 0
        self._infos = describe_parameters(model, rule, precision, frozen_weights, link_weights=link_weights)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "use_cache", None) is not None:
                module.config.use_cache = False  # type: ignore[union-attr]  # as in the engine
        units = find_units(model, self._infos)  # before the ties are cut, as in the engine
        self._blocks = [unit.module for unit in units if unit.is_block]
        if sums_by_unit:
            for unit in units:
                unit.module.register_forward_pre_hook(_one_node_for_each_input, with_kwargs=True)
        move_to_device(model, device)
        by_name = dict(model.named_parameters())
        self._places = {name: [p] for name, p in by_name.items()}
        if precision != "fp32":
            self._places = separate_ties(model)
        self._states = [self._begin(info, by_name[info.name]) for info in self._infos]
        self._steps = [0] * len(self._infos)
        self._sums = dict[int, torch.Tensor]()
        # The model computes with rounded masters from the first step on.
        for index in range(len(self._infos)):
            self._show(index)

    def _begin(self, info: ParameterInfo, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return initial states for a parameter: master weights, fp32 [numel], and zeroed optimizer states."""
        device = self._update_devices[info.name]
        states = {"weights": master_of(info, parameter.detach()).to(device, torch.float32, copy=True).view(-1)}
        if info.trainable:
            part = self.rule.parts[info.rule]
            for plane in part.moments:
                size = plane.numel(info.numel)
                states[plane.name] = torch.zeros(size, dtype=plane.dtype, device=device)
            for factor in part.factors:
                states[factor.name] = torch.zeros(factor.numel(info.shape), device=device)
        return states

    def blocks(self, classes: Collection[type]) -> list[nn.Module]:
        return [block for block in self._blocks if type(block) in classes]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, master weights), fp32 on the CPU, in torch's parameter order, without companions."""
        for info, states in zip(self._infos, self._states, strict=True):
            if info.companion:
                continue
            yield info.name, states["weights"].cpu().view(info.shape)

    def step(self, parts: Sequence[BatchPart]) -> tuple[float, float]:
        """Train on a batch in parts. Shares must add up to 1. Uses the learning rate `lr`.

        Return the loss and the gradient norm.
        """
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        for batch, share in parts:
            inputs = {key: value.to(self.device) for key, value in batch.items()}
            part_loss = run_loss(self.model, inputs, self._loss_fn)
            if share != 1.0:
                part_loss = part_loss * share
            part_loss.backward(torch.full_like(part_loss, self.loss_scale.value))
            loss += part_loss.detach().to(torch.float32)
            self._collect()
        return loss.item(), self._update()

    def _collect(self) -> None:
        """Add the gradients left by a backward pass to the sums, fp32 on the CPU."""
        for index, info in enumerate(self._infos):
            for parameter in reversed(self._places[info.name]):  # in backward order
                if parameter.grad is not None:
                    gradient = parameter.grad.to("cpu", torch.float32).contiguous().view(-1)
                    if index in self._sums:
                        gradient = self._sums[index] + gradient
                    self._sums[index] = gradient
                    parameter.grad = None

    def _update(self) -> float:
        """Clip and update with the gradient sums. Return their norm."""
        sums = self._sums
        self._sums = {}
        for index in sums:
            if self._infos[index].compute == "fp16":  # a sum too large for fp16 is infinite
                sums[index] = sums[index].half().float()
        norm = total_norm([kernels.sum_squares(sums[index]) for index in sorted(sums)])  # in the engine's order
        norm /= self.loss_scale.value
        is_late = self._late_after is not None and self._num_done >= self._late_after
        self._num_done += 1
        unscale = 1 / self.loss_scale.value
        self.loss_scale.adjust(norm < float("inf"))
        if not norm < float("inf"):
            if self._skips or self.loss_scale.skips:
                return norm
            raise ConfigError(
                f"the resident side's gradients have the norm {norm} in step {self._num_done}, so nothing can be "
                "compared. Lower --optimizer.lr, or set --train.on_nonfinite skip."
            )
        if is_late:  # the next step sees the updates before this one
            for index in range(len(self._infos)):
                self._show(index)
        scale = unscale * clip_coefficient(norm, self._max_grad_norm)
        for index, gradient in sums.items():
            self._update_parameter(index, gradient, scale)
            if not is_late:
                self._show(index)
        return norm

    def _update_parameter(self, index: int, gradient: torch.Tensor, scale: float) -> None:
        info, part = self._infos[index], self.rule.parts[self._infos[index].rule]
        self._steps[index] += 1
        workspace = None
        if part.by_matrix and (num_bytes := part.workspace_bytes(info.shape)):
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        by = UpdateStep(
            self._steps[index],
            self.lr * info.lr_scale,
            info.weight_decay,
            scale,
            key=parameter_key(info.name, self._seed),
            shape=info.shape,
            workspace=workspace,
        )
        gradient = gradient.to(DTYPES[info.compute])  # once, after all sums: the engine rounds at this place too
        part.update(self._states[index], gradient.to(self._update_devices[info.name]), by)

    def _show(self, index: int) -> None:
        """Copy a parameter's master weights to the model, in the compute dtype."""
        info = self._infos[index]
        master = self._states[index]["weights"]
        computed = as_computed(info, master)
        for parameter in self._places[info.name]:
            # A copy: an fp32 master on the same device would change under the model.
            parameter.data = computed.to(self.device, copy=True).view(info.shape)


def resident_bytes(infos: Sequence[ParameterInfo], rule: UpdateRule) -> Mapping[str, int]:
    """Return the bytes held by a `ResidentTrainer` by name, without activations.

    On the device: "weights", "gradients". On the update devices: "masters", "moments", "gradients in fp32".
    """
    num_bytes = dict.fromkeys(("weights", "gradients", "masters", "moments", "gradients in fp32"), 0)
    for info in infos:
        width = DTYPES[info.compute].itemsize
        num_bytes["weights"] += width * info.numel
        num_bytes["masters"] += 4 * info.numel
        if info.trainable:
            part = rule.parts[info.rule]
            num_bytes["gradients"] += width * info.numel
            num_bytes["gradients in fp32"] += 4 * info.numel
            num_bytes["moments"] += sum(plane.numel(info.numel) * plane.dtype.itemsize for plane in part.moments)
            num_bytes["moments"] += sum(4 * factor.numel(info.shape) for factor in part.factors)
    return num_bytes


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device. Ties are kept, also on devices for which `Module.to` makes new parameters."""
    moved: dict[int, nn.Parameter] = {}
    before = list(model.parameters())  # holds references: ids stay unique
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                values = parameter.detach().to(device)
                moved[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if parameter is not None:
                module._parameters[key] = moved[id(parameter)]
    move_buffers(model, device)
    del before


def separate_ties(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Give every place of a tied weight a separate parameter.

    Return the parameters by first weight name, in module order.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {id(parameter): parameter for parameter in model.parameters()}  # a memo: `deepcopy` copies none of these
    seen: set[int] = set()
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) in seen and any(True for _ in child.parameters()):  # one module in two places
                # The copy shares the parameters until they are separated below.
                parent._modules[key] = copy.deepcopy(child, dict(shared))
            seen.add(id(child))
    places: dict[str, list[nn.Parameter]] = {name: [] for name in first_names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = first_names[id(parameter)]
            if places[name]:
                own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                module._parameters[key] = parameter = own
            places[name].append(parameter)
    return places


def _one_node_for_each_input(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Insert one autograd node between each input and all its uses in a module."""

    def node(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.view_as(value)
        return value

    return tree_map(node, (args, kwargs))
