"""The cost of PEFT's LoRA on stacks of experts (`target_parameters`), on shapes.

Whole experts: PEFT adds the product of the factors to the whole stack, so a copy of the stack and its gradient are in
memory. Streamed experts: the same work, one expert at a time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from offload.engine.units.find import UnitCandidate
from offload.extras.large.adapted_experts import ExpertAdapters, matrices
from offload.extras.plan.op_counter import OpCounter
from offload.modules import forwards_replaced


@contextmanager
def adapters_on_shapes(model: nn.Module, units: Sequence[UnitCandidate], counter: OpCounter) -> Iterator[None]:
    """Let adapters of stacks run on `meta`, where PEFT's own code refuses, as the engine runs them."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    with ExitStack() as stack:
        for unit in (unit for unit in units if unit.records):
            adapters = ExpertAdapters.over(unit.name, unit.places, model)
            adapters.divert()
            stack.callback(adapters.undo)
            forward = partial(_run_streamed, adapters, unit.module, unit.module.forward, counter)
            stack.enter_context(forwards_replaced({unit.module: forward}))
        modules: list[Any] = list(model.modules()) if lora is not None else []
        for module in modules:
            is_stack = isinstance(module, lora.ParamWrapper) and module.num_experts > 1
            if is_stack and "_activate_lora" not in vars(module):  # not a streamed one, diverted above
                module._activate_lora = partial(_activate_whole, module)
                stack.callback(delattr, module, "_activate_lora")
        yield


class _LowRankChange(nn.Module):
    """A parametrization: the stack plus the product of the factors."""

    def __init__(self, lhs: Tensor, rhs: Tensor, scale: float) -> None:
        super().__init__()
        self.factors = lhs, rhs
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, *self.factors, alpha=self.scale)


@contextmanager
def _activate_whole(wrapper: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Do as `ParamWrapper._activate_lora`, without autocast, which does not know `meta`."""
    names = [name for name in active_adapters if name in wrapper.lora_A]
    if not names:
        yield
        return
    base, key = wrapper.get_base_layer(), wrapper.parameter_name
    needs_grad = getattr(base, key).requires_grad
    change = _LowRankChange(*wrapper.get_delta_factors(names[0]))
    parametrize.register_parametrization(base, key, change, unsafe=True)
    base.parametrizations[key].original.requires_grad_(needs_grad)  # torch sets it for the new place
    try:
        with parametrize.cached():  # one product, however often the family reads the stack
            yield
    finally:
        parametrize.remove_parametrizations(base, key, leave_parametrized=False)


def _run_streamed(
    adapters: ExpertAdapters,
    module: Any,
    forward: Callable[..., Tensor],
    counter: OpCounter,
    hidden: Tensor,
    index: Tensor,
    *others: Any,
) -> Tensor:
    """Run the experts, and count the change of the stacks."""
    if adapters.active:
        num_rows = -(-index.numel() // module.num_experts)  # tokens spread evenly
        hidden = _StreamedChange.apply(hidden, counter, num_rows, *matrices(adapters.active))
    return forward(hidden, index, *others)


class _StreamedChange(torch.autograd.Function):
    """The identity, with the work and the memory of factors [experts, ...] applied to one expert at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, counter: OpCounter, num_rows: int, *factors: Tensor) -> Tensor:
        ctx.counter = counter
        ctx.num_rows = num_rows
        ctx.save_for_backward(*factors)
        with _repeated(counter, len(factors[0])):
            for lhs, rhs in _pairs(factors):
                torch.baddbmm(lhs.new_empty(1, lhs.shape[1], rhs.shape[2]), lhs, rhs)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        factors = ctx.saved_tensors
        with _repeated(ctx.counter, len(factors[0])):
            for lhs, rhs in _pairs(factors):
                results, rows = lhs.new_empty(lhs.shape[1], ctx.num_rows), rhs.new_empty(ctx.num_rows, rhs.shape[2])
                of_weight = (results @ rows)[None]
                torch.baddbmm(of_weight, lhs, rhs)  # again, in the recomputation
                torch.bmm(of_weight, rhs.transpose(1, 2))
                torch.bmm(lhs.transpose(1, 2), of_weight)
        return gradient, None, None, *(torch.zeros_like(factor) for factor in factors)


def _pairs(factors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield lhs and rhs of one expert, for each stack."""
    return zip((lhs[:1] for lhs in factors[::2]), (rhs[:1] for rhs in factors[1::2]), strict=True)


@contextmanager
def _repeated(counter: OpCounter, number: int) -> Iterator[None]:
    """Count the work within the context `number` times, and the memory once."""
    before = counter.cost
    yield
    once = counter.cost - before
    counter.cost = sum(itertools.repeat(once, number), before)
