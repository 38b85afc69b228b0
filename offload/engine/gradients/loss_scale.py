"""Loss scales: a factor on the loss keeps small gradients above the range of fp16 (Micikevicius et al.,
arXiv:1710.03740). The update divides by the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any

import torch

from offload.doors import Door
from offload.errors import ConfigError, NonFiniteError

FIRST = 2.0**16
"""Scale of the first step. This and the numbers below are the rule of `torch.amp.GradScaler`. All scales are powers of
two, so that neither the factor nor the division rounds.
"""
GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000
"""Steps with finite gradients before a growth."""
_LEAST = 2.0**-14
_MOST = 2.0**127
_ENTRY, _EXIT = "offload: entry", "offload: exit"
"""Marks in the graph where tensors enter the model, and where results leave."""
IsWeight = Callable[[torch.Tensor], bool]
IsUnit = Callable[[Any], bool]


class LossScale:
    """No scale: the gradients are those of the loss. Base class of all scales.

    `value`: factor on the loss in the next backward. `skips`: steps with non-finite gradients are skipped.
    """

    value = 1.0
    skips = False

    def adjust(self, is_finite: bool) -> None:
        """Choose the next value after a step. `is_finite`: all gradients of all ranks were finite."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over the state from a checkpoint; other keys are ignored."""

    # -- loops of scripts ------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, is_weight: IsWeight, is_unit: IsUnit) -> None:  # noqa: ARG002
        """Run the backward of a script's loss. `is_weight`: True for weights of the model in a graph. `is_unit`: True
        for the graph node of a unit.
        """
        loss.backward()

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an argument of a script's call for the model. Its gradient has no scale outside the model."""
        return tensor

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result of such a call for the script. Its gradient has the scale inside the model."""
        return tensor

    def check_kept(self, unit: str) -> None:
        """Raise ConfigError if a script's gradient of a tensor that it took out of a unit would have no scale."""

    def check_scaler(self) -> None:
        """Raise ConfigError if a `torch.amp.GradScaler` of a script would be a second scale."""


class DynamicScale(LossScale):
    """Halves the scale after a step with non-finite gradients, and doubles it after 2000 other steps."""

    skips = True

    def __init__(self) -> None:
        self.value = FIRST
        self._num_finite = 0
        """Steps since the last change."""
        self._takes_kept = False
        """The present backward knows its graph, and scales gradients of tensors from inside units too."""

    def adjust(self, is_finite: bool) -> None:
        """Choose the next value after a step. Raises NonFiniteError if no scale helps."""
        if not is_finite:
            self.value *= BACKOFF
            self._num_finite = 0
            if self.value < _LEAST:
                raise NonFiniteError(
                    f"the gradients are not finite in fp16 with any loss scale, down to {self.value:g}: a weight or an "
                    "activation may be too large for fp16. Compute in bf16 or fp32 (--train.precision), or lower "
                    "--optimizer.lr and resume from an earlier checkpoint."
                )
            return
        self._num_finite += 1
        if self._num_finite == INTERVAL:
            self.value = min(self.value * GROWTH, _MOST)
            self._num_finite = 0

    def state_dict(self) -> dict[str, float]:
        return {"loss_scale": self.value, "finite_steps": self._num_finite}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state.get("loss_scale", FIRST))
        self._num_finite = int(state.get("finite_steps", 0))

    def backward(self, loss: torch.Tensor, is_weight: IsWeight, is_unit: IsUnit) -> None:
        """Run the backward from a loss that may depend on weights, or on tensors from inside the model.

        As always, the scale is on where a gradient enters the model, and off where it leaves.
        """
        root = None
        if is_unit(loss.grad_fn) and loss.numel() == 1:  # otherwise torch makes no root
            root = torch.full_like(loss, self.value)
        handles = []
        for node, enters in _entering(loss, is_weight, is_unit):
            # Before the operation, since it may end in fp16. Its gradients for the script have no scale.
            handles.append(node.register_prehook(partial(_times, factors=repeat(self.value))))
            factors = [1.0 if is_inside else 1 / self.value for is_inside in enters]
            handles.append(node.register_hook(lambda given, _, factors=factors: _times(given, factors)))
        self._takes_kept = True
        try:
            loss.backward(root)
        finally:
            self._takes_kept = False
            for handle in handles:
                handle.remove()

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument in fp16. The scale leaves its gradient in fp32."""
        wide = _wide_copy(tensor, _ENTRY)
        wide.register_hook(lambda gradient: gradient / self.value)
        if wide.is_complex():
            return wide
        return wide.to(torch.float16)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result in fp32, as from the autocast of accelerate: without the scale, a gradient from the script
        is below the range of fp16.
        """
        wide = _wide_copy(tensor, _EXIT)
        wide.register_hook(lambda gradient: gradient * self.value)
        return wide

    def check_kept(self, unit: str) -> None:
        if not self._takes_kept:
            raise ConfigError(
                f"the loss depends on a tensor from inside unit {unit} that a hook or an attribute holds, and "
                "loss.backward() scales only what the model returns: call engine.backward(loss) (in a loop over "
                "offload.wrap, optimizer.engine.backward(loss)), or return the tensor from the model."
            )

    def check_scaler(self) -> None:
        raise ConfigError(
            f"a GradScaler steps an optimizer whose engine computes in fp16, with a loss scale of its own "
            f"({self.value:g} now): two scales would multiply. Leave the GradScaler out, or make it with "
            "enabled=False; call loss.backward() and optimizer.step(). optimizer.step_was_skipped tells of a skipped "
            "step."
        )


def _wide_copy(tensor: torch.Tensor, border: str) -> torch.Tensor:
    """Return a copy in fp32 or a wider dtype, marked in the graph. Not the tensor itself, which has other uses."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    node: Any = wide.grad_fn
    node.metadata[border] = True
    return wide


def _times(gradients: tuple[torch.Tensor | None, ...], factors: Iterable[float]) -> tuple[torch.Tensor | None, ...]:
    pairs = zip(gradients, factors, strict=False)
    return tuple(None if gradient is None else gradient * factor for gradient, factor in pairs)


def _entering(loss: torch.Tensor, is_weight: IsWeight, is_unit: IsUnit) -> Iterator[tuple[Any, list[bool]]]:
    """Yield each operation that a script made on weights or on tensors from inside a model, which the model did not
    return; and for each input, whether it is such a tensor.
    """
    inside, outside = set[Any](), set[Any]()
    nodes: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while nodes:
        node, is_inside = nodes.pop()
        if node is None:
            continue
        is_inside = (is_inside or _EXIT in node.metadata or is_unit(node)) and _ENTRY not in node.metadata
        seen = inside if is_inside else outside
        if node not in seen:
            seen.add(node)
            nodes += [(following, is_inside) for following, _ in node.next_functions]

    def enters(node: Any) -> bool:
        if hasattr(node, "variable"):
            return is_weight(node.variable)
        return node in inside and _EXIT not in node.metadata

    for node in outside - inside:
        flags = [following is not None and enters(following) for following, _ in node.next_functions]
        if any(flags) and _ENTRY not in node.metadata:
            yield node, flags


LOSS_SCALES: Door[type[LossScale]] = Door("loss scale", {"fp32": LossScale, "bf16": LossScale, "fp16": DynamicScale})
"""Loss scales by compute dtype."""
